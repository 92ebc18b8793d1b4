"""A new leader that begins with a summary knows what one knows that repeats the whole history; a summary that
is not of its history, or not whole, counts for nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from decisions_world import World
from loopback_job import Job

from tm_slurm.coordinator import summary
from tm_slurm.coordinator.journal import Journal, create
from tm_slurm.coordinator.memory import Memory
from tm_slurm.coordinator.model import Plan
from tm_slurm.coordinator.remembering import Remembering
from tm_slurm.observe.step_log import put

SECRET = b"s" * 32


def a_history(seed: int) -> tuple[Plan, list[dict[str, Any]]]:
    """The inputs of a job that has a hard time."""
    chance = random.Random(seed)
    world = World(nodes=8, active=5, ranks_per_node=2)
    world.key_of = lambda rank: f"shard {rank % 5}"
    world.start()
    for _ in range(25):
        node = f"n{chance.randrange(1, 9)}"
        what = chance.choice(["drain", "resume", "lost", "dies", "joins", "leads"])
        if what == "lost":
            world.give({"kind": "node_lost", "node": node, "reason": "test"})
        elif what == "joins":
            world.give({"kind": "node_joined", "node": node})
            world.spawn(node)
        elif what == "leads" and world.state.nodes[node].agent_up:
            world.leads(node)
        elif what == "dies" and world.state.nodes[node].processes:
            world.dies(node, min(world.state.nodes[node].processes))
        else:
            world.event("drain" if what == "drain" else "resume", node)
    return world.plan, world.journal


def knows(memory: Memory) -> list[Any]:
    orders = [memory.orders._given, *map(memory.orders.waiting, memory.decisions.state.nodes)]
    decisions = memory.decisions
    told = [memory.inputs, memory.comment, memory.seen, memory.news.after(0), decisions.leader_node]
    return [decisions.state, orders, decisions.now, decisions._commented, *told]


@pytest.mark.parametrize("seed", range(4))
def test_one_goes_on_from_it_as_from_the_whole_history(seed: int, tmp_path: Path) -> None:
    plan, inputs = a_history(seed)
    whole = Memory(plan, "n1")
    for given in inputs:
        whole.repeat(1, json.loads(json.dumps(given)))
    for at in random.Random(seed).sample(range(1, len(inputs)), 5):
        begun = Memory(plan, "n1")
        for given in inputs[:at]:
            begun.repeat(1, json.loads(json.dumps(given)))
        summary.write(tmp_path, 0, [(1, at)], summary.pickled(begun), SECRET)
        found = summary.newest(tmp_path, 0, [(1, len(inputs))], SECRET)
        assert found is not None and found[1] == [(1, at)]
        for given in inputs[at:]:
            found[0].repeat(1, json.loads(json.dumps(given)))
        assert knows(found[0]) == knows(whole)


def changed(**other: Any) -> Callable[[Path], None]:
    """Something else at its head."""

    def change(path: Path) -> None:
        head, _, rest = path.read_bytes().partition(b"\n")
        path.write_bytes(json.dumps({**json.loads(head), **other}).encode() + b"\n" + rest)

    return change


class Harmful:
    """What must never be unpickled."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("a stranger's pickle was read",)


def of_a_stranger(path: Path) -> None:
    """Somebody who may write into the directory, and does not know the secret."""
    summary.write(path.parent, 0, [(1, 100)], pickle.dumps(Harmful()), b"another" * 5)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"{}\n"),
        lambda path: path.write_bytes(b"[1]\n2"),
        changed(of=[[1, 150]]),
        changed(made_by="another"),
        changed(seal="é"),
        of_a_stranger,
        lambda path: path.unlink(),
    ],
    ids=[
        "cut off",
        "empty",
        "no head",
        "no object",
        "moved on",
        "another program",
        "odd",
        "stranger",
        "gone",
    ],
)
def test_one_that_is_not_whole_or_not_ours_is_passed_over(
    spoil: Callable[[Path], None], tmp_path: Path
) -> None:
    plan, _ = a_history(0)
    summary.write(tmp_path, 0, [(1, 100)], summary.pickled(Memory(plan, "n1")), SECRET)
    assert summary.newest(tmp_path, 0, [(1, 200)], SECRET) is not None
    spoil(tmp_path / "summary.0.1.pickle")
    assert summary.newest(tmp_path, 0, [(1, 200)], SECRET) is None


@pytest.mark.parametrize(
    ("of", "history", "counts"),
    [
        ([(1, 100)], [(1, 100)], True),
        ([(1, 100)], [(1, 300), (2, 50)], True),
        ([(1, 300), (2, 50)], [(1, 300), (2, 80)], True),
        ([(1, 300)], [(1, 200), (2, 50)], False),  # a deposed leader went on after the next had read
        ([(1, 300), (2, 50)], [(1, 200), (3, 50)], False),
        ([(1, 100), (2, 50)], [(1, 200), (2, 50)], False),
        ([(1, 100)], [], False),
    ],
)
def test_it_counts_for_whose_history_begins_so(
    of: list[tuple[int, int]], history: list[tuple[int, int]], counts: bool, tmp_path: Path
) -> None:
    plan, _ = a_history(0)
    summary.write(tmp_path, 0, of, summary.pickled(Memory(plan, "n1")), SECRET)
    assert (summary.newest(tmp_path, 0, history, SECRET) is not None) == counts
    assert summary.newest(tmp_path, 1, history, SECRET) is None  # another start of the job


def test_the_next_one_replaces_it(tmp_path: Path) -> None:
    plan, _ = a_history(0)
    memory = Memory(plan, "n1")
    for position in ([(1, 100)], [(1, 200), (3, 40)], [(1, 200), (3, 90)]):
        memory.inputs = position[-1][1]
        summary.write(tmp_path, 0, position, summary.pickled(memory), SECRET)
    assert [path.name for path in tmp_path.iterdir()] == ["summary.0.3.pickle"]
    found = summary.newest(tmp_path, 0, [(1, 200), (3, 100)], SECRET)
    assert found is not None and found[0].inputs == 90


def test_the_history_is_read_on_from_there(tmp_path: Path) -> None:
    assert create(tmp_path, 0, 1) and create(tmp_path, 0, 2)
    first = Journal(tmp_path, 0, 1, {})
    first.append({"kind": "a"})
    position = first.position()
    first.append({"kind": "b"})
    second = Journal(tmp_path, 0, 2, {})
    assert [given["kind"] for _, given in second.inherited(position)] == ["b"]
    assert [given["kind"] for _, given in second.inherited()] == ["a", "b"]
    first.close()
    second.close()


def test_of_another_program_it_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, _ = a_history(0)
    summary.write(tmp_path, 0, [(1, 100)], summary.pickled(Memory(plan, "n1")), SECRET)
    monkeypatch.setattr(summary, "PROGRAM", "a later one")
    assert summary.newest(tmp_path, 0, [(1, 200)], SECRET) is None


def test_nothing_is_left_of_one_that_the_disk_does_not_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, _ = a_history(0)
    whole = summary.pickled(Memory(plan, "n1"))
    summary.write(tmp_path, 0, [(1, 100)], whole, SECRET)

    def full(path: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(OSError, match="No space"):
            summary.write(tmp_path, 0, [(1, 200)], whole, SECRET)
    assert [path.name for path in tmp_path.iterdir()] == ["summary.0.1.pickle"]
    assert summary.newest(tmp_path, 0, [(1, 200)], SECRET) is not None
    (tmp_path / ".summary.0.1.pickle.99999").touch()  # a leader was killed meanwhile
    summary.write(tmp_path, 0, [(1, 300), (2, 100)], whole, SECRET)
    assert [path.name for path in tmp_path.iterdir()] == ["summary.0.2.pickle"]


def test_what_the_leader_of_then_did_is_repeated_as_its_own(tmp_path: Path) -> None:
    """Its node was drained after it had summed up: it handed over, which only the leader's node does."""
    world = World(nodes=6, active=4, batch_host=None)
    world.start()
    world.give({"kind": "led", "node": "n6", "term": 1})
    half = len(world.journal)
    world.resigns_to_nobody = set(world.plan.order)
    world.event("drain", "n6")
    whole = Memory(world.plan, "n2")
    for given in world.journal:
        whole.repeat(1, given)
    assert create(tmp_path, 0, 1) and create(tmp_path, 0, 2)
    first = Journal(tmp_path, 0, 1, {})
    begun = Memory(world.plan, "n6")
    for number, given in enumerate(world.journal):
        first.append(given)
        if number < half:
            begun.repeat(1, given)
        if number == half - 1:
            summary.write(tmp_path, 0, first.position(), summary.pickled(begun), SECRET)
    first.close()
    leadership: Any = SimpleNamespace(job_dir=tmp_path, attempt=0, keep=lambda: None)
    second = Journal(tmp_path, 0, 2, {})
    known = Remembering(second, leadership, world.plan, "n2", SECRET)
    assert known.covered and knows(known.memory) == knows(whole)
    second.close()


def test_a_new_leader_begins_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over real connections: a move before it, and one after it by the leader that began with it."""
    monkeypatch.setattr(summary, "INPUTS", 5)

    async def act() -> None:
        async with Job(tmp_path, nodes=5, standbys=2) as job:
            job.lead("n1")
            await job.start()
            job.drain("n2")
            await job.until("a move", lambda: job.leader.state.moves_done == 1)
            await job.until("a summary", lambda: list(tmp_path.glob("summary.*")))
            await job.lose_leader()
            job.lead("n1")
            assert job.leader._remembering.covered and job.leader.state.moves_done == 1
            job.drain("n3")
            await job.until("the next move", lambda: job.leader.state.moves_done == 2)

    asyncio.run(act())


def test_what_is_for_people_may_find_a_full_disk() -> None:
    with Path("/dev/full").open("a") as file:
        assert not put(file, "a line of the timeline\n")
        with contextlib.suppress(OSError):
            file.close()
