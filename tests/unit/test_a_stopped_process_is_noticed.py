"""The agent sees that a rank process was stopped (SIGSTOP), and is fooled by nothing else."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tm_slurm.agent.ranks import Command, Ranks
from tm_slurm.agent.standstill import UNWELL_LIMIT_S, Standstill, state_of


def story(*looks: tuple[float, str | None], limit_s: float = 2.0) -> list[tuple[float, str, str]]:
    """What is found at which of these looks, given as (time, state)."""
    standstill = Standstill(limit_s)
    found = ((now, standstill.look(state, now)) for now, state in looks)
    return [(now, finding.kind, finding.how) for now, finding in found if finding is not None]


def every(step_s: float, until_s: float, state: str, since_s: float = 0.0) -> list[tuple[float, str | None]]:
    count = round((until_s - since_s) / step_s)
    return [(since_s + number * step_s, state) for number in range(count + 1)]


def test_a_stopped_process_is_told_once_when_the_limit_has_passed() -> None:
    found = story((0.0, "R"), *every(0.5, 10.0, "T", since_s=0.5))
    assert found == [(2.5, "process_stopped", "stopped (SIGSTOP) for 2.0 s")]


def test_it_is_told_again_when_it_has_gone_on_in_between() -> None:
    looks = [*every(0.5, 3.0, "T"), (3.5, "S"), *every(0.5, 7.0, "T", since_s=4.0)]
    assert [(now, kind) for now, kind, _ in story(*looks)] == [
        (2.0, "process_stopped"),
        (3.5, "process_goes_on"),
        (6.0, "process_stopped"),
    ]


@pytest.mark.parametrize("state", ["R", "S", "t", "I", "X", None])
def test_a_process_that_runs_sleeps_or_is_traced_is_left_alone(state: str | None) -> None:
    assert story(*[(float(now), state) for now in range(200)]) == []


def test_short_stops_do_not_add_up() -> None:
    assert story(*[(0.5 * n, "S" if n % 4 == 3 else "T") for n in range(100)]) == []


def test_time_in_which_the_agent_itself_was_stopped_does_not_count() -> None:
    """A frozen node that thaws: the agent is back a moment before its ranks are."""
    assert story((0.0, "S"), (0.1, "T"), (600.0, "T"), (600.1, "S")) == []
    slow = story((0.0, "S"), (0.1, "T"), *[(600.0 + 0.5 * n, "T") for n in range(4)])
    assert [now for now, *_ in slow] == [601.0]


@pytest.mark.parametrize(("state", "word"), [("D", "uninterruptible"), ("Z", "main thread")])
def test_what_may_be_in_order_is_noted_late_and_not_as_stopped(state: str, word: str) -> None:
    found = story(*every(0.5, UNWELL_LIMIT_S + 60.0, state))
    assert len(found) == 1 and found[0][0] >= UNWELL_LIMIT_S
    assert found[0][1] == "process_unwell" and word in found[0][2]


def test_a_process_that_is_gone_has_no_state() -> None:
    assert state_of(os.getpid()) in ("R", "S")
    assert state_of(2**22 + 1) is None


# ---- with real processes ----

Reports = list[dict[str, Any]]
SPEAKS = """
import json, os, socket, struct, time
agent = socket.socket(fileno=int(os.environ["TM_SLURM_AGENT_FD"]))
from tm_slurm.control import FrameSocket
FrameSocket(agent).send({"kind": "process_ready", "host": "h", "port": 1})
time.sleep(600)
"""


def with_one_rank(job_dir: Path, act: Callable[[Ranks, int, Reports], Awaitable[None]]) -> None:
    """A rank process that says that it is there and sleeps; `act` gets its process id and the reports."""
    (job_dir / "logs").mkdir()

    async def main() -> None:
        reports: Reports = []
        command = Command(
            argv=(sys.executable, "-c", SPEAKS), job_dir=job_dir, node="n1", host="h", cpus_per_rank=1
        )
        ranks = Ranks(command, 1, reports.append, stopped_limit_s=0.4)
        await ranks.start_missing()
        try:
            await told(reports, "process_ready")
            (rank,) = ranks._running.values()
            await act(ranks, rank.process.pid, reports)
        finally:
            await ranks.end_all(grace_s=0.0)

    asyncio.run(main())


async def told(
    reports: Reports, kind: str, ranks: Ranks | None = None, limit_s: float = 10.0
) -> dict[str, Any]:
    """Wait for a report of a kind; with `ranks`, looking at the processes as the agent's beat does."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        for report in reports:
            if report["kind"] == kind:
                return report
        if ranks is not None:
            ranks.look(time.monotonic())
        await asyncio.sleep(0.05)
    raise AssertionError(f"no {kind} within {limit_s} s: {reports}")


def kinds(ranks: Ranks) -> list[str]:
    return [fact["kind"] for fact in ranks.facts()]


def test_a_real_process_that_is_stopped_is_reported_and_a_fact_until_it_goes_on(tmp_path: Path) -> None:
    async def act(ranks: Ranks, pid: int, reports: Reports) -> None:
        os.kill(pid, signal.SIGSTOP)
        report = await told(reports, "process_stopped", ranks)
        assert report["slot"] == 0 and report["incarnation"] == reports[0]["incarnation"]
        assert "SIGSTOP" in report["how"]
        assert kinds(ranks) == ["process_ready", "process_stopped"]
        os.kill(pid, signal.SIGCONT)
        deadline = time.monotonic() + 10.0
        while "process_stopped" in kinds(ranks) and time.monotonic() < deadline:
            ranks.look(time.monotonic())
            await asyncio.sleep(0.01)
        assert kinds(ranks) == ["process_ready"]

    with_one_rank(tmp_path, act)


def test_a_stopped_process_can_be_ended(tmp_path: Path) -> None:
    async def act(ranks: Ranks, pid: int, reports: Reports) -> None:
        os.kill(pid, signal.SIGSTOP)
        await told(reports, "process_stopped", ranks)
        await ranks.end_all(grace_s=0.0)
        assert "SIGKILL" in (await told(reports, "process_exited"))["how"]

    with_one_rank(tmp_path, act)


def test_how_a_process_ended_is_a_fact_until_another_is_started_in_its_place(tmp_path: Path) -> None:
    """The leader that was told may have died before it had written it down."""

    async def act(ranks: Ranks, pid: int, reports: Reports) -> None:
        os.kill(pid, signal.SIGKILL)
        await told(reports, "process_exited")
        (fact,) = ranks.facts()
        assert (fact["kind"], fact["slot"], fact["code"]) == ("process_exited", 0, -signal.SIGKILL)
        await ranks.start_missing()
        assert "process_exited" not in kinds(ranks)

    with_one_rank(tmp_path, act)
