"""The leader's network side, without Slurm and without ranks: nonsense is refused, and a successor knows
all."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from loopback_job import Job

from tm_slurm.control import Channel, ChannelClosed, connect
from tm_slurm.coordinator.actions import Note
from tm_slurm.coordinator.election import Candidate, LeaderFile, Leadership, LeaderWatch
from tm_slurm.coordinator.leader import Leader, Limits
from tm_slurm.coordinator.model import Plan
from tm_slurm.observe.follow import JobFiles

SECRET = b"s" * 32
LIMITS = Limits(poll_interval_s=1.0, heartbeat_s=0.1, start_timeout_s=60.0, reconnect_s=0.5)
LEASE_S = 10.0


def claimed(job_dir: Path, node: str) -> Leadership:
    leadership = Candidate(LeaderWatch(job_dir, 0, LEASE_S), node=node, host="127.0.0.1").claim()
    assert leadership is not None
    return leadership


def leader_of(leadership: Leadership, nodes: int, standbys: int) -> Leader:
    return Leader(
        job_id=None,
        node="n1",
        host="127.0.0.1",
        plan=Plan([f"n{i}" for i in range(1, nodes + 1)], None, nodes - standbys, 1),
        leadership=leadership,
        secret=SECRET,
        slurm=None,
        limits=LIMITS,
    )


def lead(
    job_dir: Path, act: Callable[[Leader], Awaitable[None]], nodes: int = 2, standbys: int = 1
) -> Leader:
    """Run a leader of a job of `nodes` nodes, the last `standbys` of them in reserve, while `act` talks to
    it."""

    async def main() -> Leader:
        leader = leader_of(claimed(job_dir, "n1"), nodes, standbys)
        leading = asyncio.create_task(leader.lead())
        acting = asyncio.ensure_future(act(leader))
        await asyncio.wait({leading, acting}, timeout=20.0, return_when=asyncio.FIRST_COMPLETED)
        if acting.done():
            acting.result()
        if not leading.done():
            leading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await leading
        assert acting.done(), "the leader ended before the test did"
        return leader

    return asyncio.run(main())


async def agent(job_dir: Path, node: str) -> Channel:
    """A proved connection as `node`'s agent, after the leader's greeting."""
    known = LeaderFile.read(job_dir)
    while known is None or known.resigned or not known.port:
        await asyncio.sleep(0.01)
        known = LeaderFile.read(job_dir)
    identity = {"role": "agent", "node": node}
    channel = await connect(known.host, known.port, SECRET, identity, timeout_s=5.0)
    assert (await channel.receive())["kind"] == "led"
    BEATING[node] = asyncio.create_task(beat(channel))
    return channel


BEATING: dict[str, asyncio.Task[None]] = {}
"""node → what beats for its newest connection"""


async def beat(channel: Channel) -> None:
    """A sign of life, until the channel is closed."""
    with contextlib.suppress(ChannelClosed):
        while True:
            channel.send({"kind": "beat", "ranks": []})
            await asyncio.sleep(LIMITS.reconnect_s / 5)


def ready(incarnation: int) -> dict[str, Any]:
    return {"kind": "process_ready", "slot": 0, "incarnation": incarnation, "host": "127.0.0.1", "port": 1}


async def told(channel: Channel, kind: str) -> dict[str, Any]:
    """The next message of a kind for a rank process."""
    while True:
        message = await asyncio.wait_for(channel.receive(), 5.0)
        if message.get("message", {}).get("kind") == kind:
            return dict(message["message"])


async def ask(job_dir: Path, request: dict[str, Any]) -> dict[str, Any]:
    known = LeaderFile.read(job_dir)
    assert known is not None
    channel = await connect(known.host, known.port, SECRET, {"role": "user"}, timeout_s=5.0)
    channel.send(request)
    answer = await asyncio.wait_for(channel.receive(), 5.0)
    await channel.close()
    return answer


NONSENSE: list[dict[str, Any]] = [
    {"kind": "process_ready"},
    {"kind": "process_ready", "slot": "x", "incarnation": [], "host": 3, "port": None},
    {"kind": "joined", "epoch": "one"},
    {"kind": "resumed"},
    {"kind": "led", "node": "n2"},
    {"kind": "link_ended"},
    {"kind": "beat", "ranks": [{"steps": 1}]},
    {"kind": "end everything"},
    {"kind": None},
    {"no": "kind"},
]


@pytest.mark.parametrize("nonsense", NONSENSE, ids=repr)
def test_nonsense_from_an_agent_changes_nothing(tmp_path: Path, nonsense: dict[str, Any]) -> None:
    async def act(leader: Leader) -> None:
        channel = await agent(tmp_path, "n1")
        channel.send(nonsense)
        channel.send(ready(7))
        assert (await told(channel, "assign"))["rank"] == 0
        await channel.close()

    lead(tmp_path, act)
    lead(tmp_path, lambda leader: asyncio.sleep(0))  # nor does it keep a successor from reading the journal


def test_a_request_that_is_none_is_answered_with_what_is_wrong(tmp_path: Path) -> None:
    async def act(leader: Leader) -> None:
        channel = await agent(tmp_path, "n1")
        assert "unknown request" in (await ask(tmp_path, {"kind": "x"}))["error"]
        assert "no event" in (await ask(tmp_path, {"kind": "event", "event": {"kind": "drain"}}))["error"]
        event = {"id": "1", "kind": "request", "source": "user", "reason": "", "at": 0.0}
        assert "n9" in (await ask(tmp_path, {"kind": "event", "event": {**event, "node": "n9"}}))["error"]
        standby = await ask(tmp_path, {"kind": "event", "event": {**event, "node": "n2"}})
        assert "no ranks to move" in standby["error"]
        await channel.close()

    lead(tmp_path, act)


def test_a_successor_goes_on_where_the_leader_stopped(tmp_path: Path) -> None:
    async def first(leader: Leader) -> None:
        channel = await agent(tmp_path, "n1")
        channel.send(ready(7))
        await told(channel, "assign")
        await channel.close()

    async def second(leader: Leader) -> None:
        assert leader.state.started
        channel = await agent(tmp_path, "n1")
        assert (await told(channel, "assign"))["rank"] == 0  # said again: the first time may have been lost
        await channel.close()

    lead(tmp_path, first)
    before = LeaderFile.read(tmp_path)
    lead(tmp_path, second)
    after = LeaderFile.read(tmp_path)
    assert before is not None and after is not None and after.term == before.term + 1


def test_an_agent_lost_before_training_began_ends_the_job_with_its_name(tmp_path: Path) -> None:
    async def act(leader: Leader) -> None:
        lost, other = await agent(tmp_path, "n1"), await agent(tmp_path, "n2")
        lost.abort()
        while (await asyncio.wait_for(other.receive(), 5.0)).get("message", {}).get("kind") != "exit":
            continue
        await other.close()

    leader = lead(tmp_path, act, standbys=0)
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert verdict["state"] == "failed" and "n1" in verdict["reason"] and leader.exit_code == 1


async def until_closed(channel: Channel) -> None:
    with contextlib.suppress(ChannelClosed):
        while True:
            await asyncio.wait_for(channel.receive(), 5.0)


def test_an_agent_that_falls_silent_is_lost_although_its_connection_stands(tmp_path: Path) -> None:
    async def act(leader: Leader) -> None:
        await agent(tmp_path, "n2")
        channel = await agent(tmp_path, "n3")
        BEATING["n3"].cancel()
        await until_closed(channel)

    lead(tmp_path, act, nodes=3)
    lost = JobFiles(tmp_path).notes("node_lost")
    assert [entry["node"] for entry in lost] == ["n3"] and "silent" in lost[0]["reason"]


@pytest.mark.parametrize(
    ("epoch", "reason"),
    [
        (0, "its agent is not connected, and its ranks are said to be lost"),
        (-1, "its agent closed the connection"),
    ],
)
def test_an_ended_link_is_evidence_against_a_rank_whose_agent_is_away(
    tmp_path: Path, epoch: int, reason: str
) -> None:
    """Then its node need not be given time to come back. What a rank saw at an older epoch says nothing."""

    async def act(leader: Leader) -> None:
        witness, lost, _ = [await agent(tmp_path, node) for node in ("n1", "n2", "n3")]
        for incarnation, channel in enumerate((witness, lost)):
            channel.send(ready(incarnation))
        await told(witness, "assign")
        ended = {"kind": "link_ended", "rank": 0, "slot": 0, "incarnation": 0, "epoch": epoch, "lost": 1}
        witness.send(ended)
        await asyncio.sleep(2 * LIMITS.reconnect_s)
        assert leader.state.nodes["n2"].standing == "active"  # alone it is no evidence
        lost.abort()
        witness.send(ended)
        await told(witness, "interrupt")

    lead(tmp_path, act, nodes=3)
    (entry,) = JobFiles(tmp_path).notes("node_lost")
    assert (entry["node"], entry["reason"]) == ("n2", reason)


def test_every_agent_hears_something_all_the_time(tmp_path: Path) -> None:
    async def act(leader: Leader) -> None:
        channel = await agent(tmp_path, "n2")
        for _ in range(5):
            alive = await asyncio.wait_for(channel.receive(), 3 * LIMITS.heartbeat_s)
            assert alive["kind"] == "alive" and alive["term"] == 1
        await channel.close()

    lead(tmp_path, act)


def test_a_short_break_of_the_connection_is_not_a_loss(tmp_path: Path) -> None:
    async def act(leader: Leader) -> None:
        channel = await agent(tmp_path, "n1")
        channel.send(ready(7))
        await told(channel, "assign")
        channel.abort()
        again = await agent(tmp_path, "n1")
        again.send(ready(7))
        await told(again, "assign")
        await asyncio.sleep(2 * LIMITS.reconnect_s)
        assert leader.state.nodes["n1"].standing == "active"
        await again.close()

    lead(tmp_path, act)
    assert not (tmp_path / "verdict.json").exists()


@pytest.mark.parametrize("listens", [False, True])
def test_an_agent_of_which_its_node_says_that_it_has_ended_is_not_waited_for(
    tmp_path: Path, listens: bool
) -> None:
    """A node may start again sooner than its agent is held for lost, and Slurm would end the step then."""

    async def act(leader: Leader) -> None:
        with socket.create_server(("127.0.0.1", 0)) as vault:
            channels = [await agent(tmp_path, name) for name in ("n1", "n2", "n3")]
            for number, channel in enumerate(channels, 1):
                channel.send(ready(number))
            await told(channels[0], "assign")
            channels[2].send({"kind": "vault", "host": "127.0.0.1", "port": vault.getsockname()[1]})
            await asyncio.sleep(LIMITS.heartbeat_s)
            if not listens:
                vault.close()
            channels[2].abort()
            beats = [asyncio.create_task(beat(channel)) for channel in channels[:2]]
            deadline = time.monotonic() + 10.0
            while not JobFiles(tmp_path).notes("node_lost"):
                assert time.monotonic() < deadline, "n3 is not held for lost"
                await asyncio.sleep(0.01)
            for task in beats:
                task.cancel()

    lead(tmp_path, act, nodes=3)
    entry = JobFiles(tmp_path).notes("node_lost")[0]
    assert entry["node"] == "n3" and ("nothing listens there" in entry["reason"]) is not listens


@pytest.mark.parametrize("late", [True, False], ids=["late", "lost on its way"])
def test_a_successor_gets_its_order_when_the_private_state_has_come(tmp_path: Path, late: bool) -> None:
    async def act(leader: Leader) -> None:
        channels = {name: await agent(tmp_path, name) for name in ("n1", "n2", "n3")}
        for number, channel in enumerate(channels.values(), 1):
            channel.send(ready(number))
        for rank, name in ((0, "n1"), (1, "n2")):
            assert (await told(channels[name], "assign"))["rank"] == rank
            for step in (0, 1):
                key = {"kind": "replica_key", "slot": 0, "incarnation": rank + 1, "key": "the same"}
                channels[name].send({**key, "rank": rank, "step": step})
        exited = {"slot": 0, "incarnation": 2, "code": -9, "how": "signal SIGKILL", "log": "x"}
        channels["n2"].send({"kind": "process_exited", **exited})
        me = {"slot": 0, "incarnation": 1}
        survivor = {
            "kind": "survivor",
            **me,
            "rank": 0,
            "committed": 7,
            "at_vote": False,
            "wards": {"1": [7]},
        }
        ward = {"kind": "ward", "rank": 1, "step": 7, "private": {"entries": {}}}
        for promised in (1, 2):
            epoch = (await told(channels["n1"], "interrupt"))["epoch"]
            assert epoch == promised
            if promised == 2:  # the successor of the first attempt is asked whether it has taken over
                assert (await told(channels["n3"], "interrupt"))["epoch"] == epoch
                channels["n3"].send({"kind": "not_joined", "slot": 0, "incarnation": 3, "epoch": epoch})
            channels["n1"].send({**survivor, "epoch": epoch})
            assert (await told(channels["n1"], "resolve"))["serve"] == [1]
            source = {"epoch": epoch, "rank": 1, "source": ["n1", 2]}
            channels["n1"].send({"kind": "source_ready", **me, **source})
            if late or promised == 2:
                break
        channels["n1"].send({**ward, "epoch": epoch})
        replace = await told(channels["n3"], "replace")
        assert replace["epoch"] == epoch and replace["private"] == {"entries": {}}
        for channel in channels.values():
            await channel.close()

    assert lead(tmp_path, act, nodes=3).exit_code == 1


@pytest.mark.parametrize("ended", [True, False], ids=["of the job's end", "deposed"])
def test_what_is_held_back_of_the_steps_is_written_at_the_jobs_end_alone(tmp_path: Path, ended: bool) -> None:
    """One that was deposed may have been frozen for long: the next leader has written all that by then."""

    async def act(leader: Leader) -> None:
        channel, other = await agent(tmp_path, "n1"), await agent(tmp_path, "n2")
        told_by_1 = {"rank": 1, "epoch": 0, "step": 0, "steps": [[0, 1.0, 0.1, 0.5]]}
        channel.send({"kind": "beat", "ranks": [told_by_1]})  # rank 0 may still tell it
        channel.send(ready(1))
        other.send(ready(2))
        await told(channel, "assign")
        if ended:
            leader.stop("enough")
        else:
            leader._leadership.step_down()

    lead(tmp_path, act, standbys=0)
    assert [step["step"] for step in JobFiles(tmp_path).steps()] == ([0] if ended else [])


def test_the_status_tells_of_a_move_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However seldom it is written while nothing happens."""
    monkeypatch.setattr("tm_slurm.coordinator.leader.STATUS_INTERVAL_S", 600.0)
    monkeypatch.setattr("tm_slurm.coordinator.leader.STATUS_LIMIT_S", 600.0)

    async def main() -> None:
        async with Job(tmp_path) as job:
            job.lead("n4")
            await job.start()
            job.drain("n1")
            await job.until("a move", lambda: job.leader.state.moves_done == 1)
            status = JobFiles(tmp_path).status
            await job.until("a status that knows it", lambda: (status() or {}).get("epoch") == 1)

    asyncio.run(main())


def test_a_leader_keeps_its_lease_between_what_it_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands are told to start in one go, and that takes longer than a lease; what it tells after it leads
    no more, nobody is told. Meanwhile no full search for garbage holds it up twice."""
    searches = len(gc.callbacks)

    async def act(leader: Leader) -> None:
        assert len(gc.callbacks) == searches + 1
        kept: list[str] = []
        noted: list[str] = []
        monkeypatch.setattr(leader._leadership, "keep", lambda: kept.append("kept") or True)
        monkeypatch.setattr(leader, "_noted", lambda note: noted.append(note.what))
        leader._perform([Note("one", {}), Note("two", {})])
        assert len(kept) == 2 and noted == ["one", "two"]
        monkeypatch.setattr(leader._leadership, "keep", leader._leadership.step_down)
        leader._perform([Note("three", {})])
        assert noted == ["one", "two"] and await leader._outcome == "deposed"

    lead(tmp_path, act)
    assert len(gc.callbacks) == searches
