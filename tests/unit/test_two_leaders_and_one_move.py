"""A leader is lost in the middle of a planned move: the next one finishes it or takes it back, whatever the
moment was, and no rank is ever in two places."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from loopback_job import Job

from tm_slurm.coordinator.journal import Journal
from tm_slurm.coordinator.leader import Leader
from tm_slurm.observe.follow import JobFiles

PHASES = {"preparing": "joined", "armed": "vote", "switching": "resumed"}
"""Phase of a move → what has not happened yet in it."""


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tm_slurm.agent.following.LOOK_S", 0.01)
    monkeypatch.setattr("tm_slurm.coordinator.leader.TICK_S", 0.01)


def run(job_dir: Path, act: Callable[[Job], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        async with Job(job_dir, **options) as job:
            job.lead("n4")
            await job.start()
            await act(job)

    asyncio.run(main())


async def moved(job: Job) -> None:
    """The move of n1's rank is done, and n1 has been left."""
    await job.until("the move is done", lambda: job.leader.state.moves_done == 1)
    await job.until("the leaver is left", lambda: job.agents["n1"].left)
    assert job.seats()[0] in ("n3", "n4") and job.seats()[1] == "n2"
    assert job.leader.state.seats[0] == (job.seats()[0], 0) and job.leader.state.epoch == 1


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("meanwhile", [False, True], ids=["after", "while nobody leads"])
def test_the_next_leader_finishes_it(tmp_path: Path, phase: str, meanwhile: bool) -> None:
    async def act(job: Job) -> None:
        job.hold = {PHASES[phase]}
        job.drain("n1")
        await job.until(phase, lambda: job.leader.state.move.phase == phase and job.held)
        await job.lose_leader()
        if meanwhile:
            job.release_held()
        second = job.lead("n2")
        assert second.state.move is not None and second.state.move.phase == phase
        if not meanwhile:
            await job.until("all come", lambda: all(name in second._agents for name in job.agents))
            job.release_held()
        await moved(job)

    run(tmp_path, act)
    assert len(JobFiles(tmp_path).notes("moved")) == 1
    assert [entry["term"] for entry in JobFiles(tmp_path).notes("leads")] == [1, 2]


RESUMED = {"id": "resume/1", "kind": "resume", "node": "n1", "source": "poll", "reason": "test"}


def test_what_the_leader_before_has_said_into_the_void_is_said_again(tmp_path: Path) -> None:
    """It has taken the move back, and nobody has heard it: the joiner would wait for ever."""

    async def act(job: Job) -> None:
        job.hold = {"joined"}
        job.drain("n1")
        await job.until("preparing", lambda: job.held)
        job.leader._agents._send = lambda node, frame: None  # type: ignore[method-assign]
        assert job.leader._feed({"kind": "events", "events": [RESUMED]}) and job.leader.state.move is None
        joiner = job.held[0][1]
        await job.lose_leader()
        assert joiner.joining is not None
        job.lead("n2")
        await job.until("the joiner is told, too", lambda: joiner.joining is None)

    run(tmp_path, act)


@pytest.mark.parametrize("phase", ["preparing", "armed"])
def test_the_next_leader_takes_it_back_when_the_reason_is_gone(tmp_path: Path, phase: str) -> None:
    async def act(job: Job) -> None:
        job.hold = {PHASES[phase]}
        job.drain("n1")
        await job.until(phase, lambda: job.leader.state.move.phase == phase and job.held)
        await job.lose_leader()
        second = job.lead("n2")
        second._feed({"kind": "events", "events": [RESUMED]})
        await job.until("the move is given up", lambda: second.state.move is None)
        for agent in job.agents.values():  # what each was told about it has been obeyed, by the joiner too
            await job.until("cancelled", lambda: all(p.joining is None for p in agent.processes.values()))  # noqa: B023
        assert job.seats() == {0: "n1", 1: "n2"} and second.state.epoch == 0

    run(tmp_path, act)
    assert not JobFiles(tmp_path).notes("moved")


class Loses:
    """Loses the first leader at its `at`-th record from now on, as `how` says."""

    def __init__(self, leader: Leader, at: int, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done = asyncio.Event()
        self._left = at
        self._how = how
        self._leader = leader
        append = leader._journal.append

        def append_or_not(*records: dict[str, Any]) -> None:
            for record in records:
                one_or_not(record)

        def one_or_not(record: dict[str, Any]) -> None:
            self._left -= 1
            if self._left == 0 and how == "before":
                self._lose()
            else:
                append(record)
            if self._left == 0 and how == "written":
                self._lose()
            if self._left == 0 and how == "unheard":
                leader._agents._send = lambda node, frame: None  # type: ignore[method-assign]
            if self._left == -3 and how == "unheard":
                self._lose()

        monkeypatch.setattr(leader._journal, "append", append_or_not)

    def _lose(self) -> None:
        self._leader._leadership.step_down()
        self.done.set()


RECORDS = 9
"""So many inputs a move takes from the drain to the end, in this job."""


@pytest.mark.parametrize("how", ["before", "written", "unheard"])
@pytest.mark.parametrize("at", range(1, RECORDS + 1))
def test_no_moment_is_a_wrong_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, how: str) -> None:
    """before: an input reaches the leader and is written nowhere. written: it is written, and nothing is done
    about it. unheard: what the leader tells from then on never arrives, three inputs later it is gone."""

    async def act(job: Job) -> None:
        loses = Loses(job.leader, at, how, monkeypatch)
        job.drain("n1")
        try:
            await asyncio.wait_for(loses.done.wait(), 0.3)
        except asyncio.TimeoutError:
            loses._lose()
        await job.lose_leader()
        job.lead("n2")
        if not any(node.notice for node in job.leader.state.nodes.values()):
            job.drain("n1")  # the poll of Slurm tells the new leader again
        await moved(job)

    run(tmp_path, act)


def test_the_moments_are_all_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(job: Job) -> None:
        written: list[str] = []
        append = job.leader._journal.append

        def noted(*records: dict[str, Any]) -> None:
            append(*records)
            written.extend(record["kind"] for record in records)

        monkeypatch.setattr(job.leader._journal, "append", noted)
        job.drain("n1")
        await moved(job)
        assert written.index("agent_gone" if "agent_gone" in written else written[-1]) + 1 <= RECORDS, written

    run(tmp_path, act)


def test_what_a_thawed_leader_does_is_not_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(job: Job) -> None:
        first = job.leader
        monkeypatch.setattr(first._agents, "say_alive", lambda turn, turns: None)  # frozen
        monkeypatch.setattr(first._leadership, "is_due", lambda: False)
        second = job.lead("n2")
        await job.until("all follow", lambda: all(name in second._agents for name in job.agents))
        assert first._leadership.holds()  # to its own clock no time has passed, and it has not looked yet
        assert first._feed({"kind": "stop", "reason": "a frozen leader's idea"})
        assert first.state.verdict is not None and second.state.verdict is None
        assert await asyncio.wait_for(job.leading[0], 5.0) == "deposed"
        assert JobFiles(tmp_path).verdict() is None
        assert not any(order["kind"] == "exit" for agent in job.agents.values() for order in agent.obeyed)
        await job.lose_leader()
        third = job.lead("n3")
        assert third.state.verdict is None and third._leadership.term == 3

    run(tmp_path, act)


def test_a_long_history_does_not_cost_the_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(job: Job) -> None:
        for _ in range(20):
            job.leader._feed({"kind": "node_joined", "node": "n1"})
        await job.lose_leader()
        leadership = job.claim("n2")
        inherited = Journal.inherited
        passed = 0.0

        def slowly(journal: Journal, after: Any) -> Any:
            nonlocal passed
            for record in inherited(journal, after):
                passed += leadership.lease_s / 8
                yield record

        clock = leadership._clock
        leadership._clock = lambda: clock() + passed
        monkeypatch.setattr(Journal, "inherited", slowly)
        monkeypatch.setattr(job, "claim", lambda node: leadership)
        job.lead("n2")
        assert passed > 2 * leadership.lease_s and leadership.holds()

    run(tmp_path, act)
