"""What a leader does with Slurm, it does once: not again after the leader before, and not any more when
another leads."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from loopback_job import Job

from tm_slurm.coordinator.model import JobState, Notice, Plan
from tm_slurm.coordinator.slurm_side import SlurmSide
from tm_slurm.coordinator.training import Training
from tm_slurm.events import Event
from tm_slurm.slurm import JobInfo, NodeInfo, NodeState, ReservationInfo

PLAN = Plan(["n1", "n2"], "n1", 1, 1)
DRAINED = Event(id="drain/n2/5", kind="drain", node="n2", source="poll", reason="disk", at=5.0)


class FakeSlurm:
    """One job of two nodes, of which n2 is in the state that the test says."""

    def __init__(self, state: str) -> None:
        self.state = state
        self.shrunk: list[list[str]] = []
        self.polled = asyncio.Event()

    def nodes(self, names: Sequence[str]) -> dict[str, NodeInfo]:
        self.polled.set()
        state = NodeState.parse(self.state)
        return {"n2": NodeInfo(name="n2", state=state, reason="disk", reason_at=5.0)}

    def job(self, job_id: int) -> JobInfo:
        return JobInfo(job_id=job_id, name="x", user="u", state="RUNNING", nodes=("n1", "n2"))

    def reservations(self) -> dict[str, ReservationInfo]:
        return {}

    def shrink(self, job_id: int, keep: list[str]) -> None:
        self.shrunk.append(keep)

    def set_comment(self, job_id: int, text: str) -> None:
        raise AssertionError("nobody has asked for a comment")


def run(
    slurm: FakeSlurm,
    *,
    seen: list[Event],
    leads: bool = True,
    release: bool = False,
    state: JobState | None = None,
) -> list[Any]:
    """What the Slurm side of a leader feeds after its first poll, or its first release."""

    async def main() -> list[Any]:
        fed: list[Any] = []
        side = SlurmSide(
            slurm=slurm,  # type: ignore[arg-type]
            training=Training(job_id=7, attempt=0, job_dir=Path("unused"), restarts=0),
            leader_node="n1",
            state=state or JobState.initial(PLAN),
            feed=fed.append,
            leads=lambda: leads,
            seen=seen,
            poll_interval_s=0.01,
        )
        if release:
            side.release("n2")
        tasks = side.start()
        for _ in range(3):
            slurm.polled.clear()
            await asyncio.wait_for(slurm.polled.wait(), 5.0)
        for _ in range(500 if release else 0):
            if any(given["kind"] == "released" for given in fed):
                break
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        return [given for given in fed if given["kind"] != "outlook"]  # another test's concern

    return asyncio.run(main())


def events(fed: list[Any]) -> list[str]:
    return [event["id"] for given in fed if given["kind"] == "events" for event in given["events"]]


def test_an_event_that_the_leader_before_has_handled_is_not_news() -> None:
    assert events(run(FakeSlurm("ALLOCATED+DRAIN"), seen=[])) == [DRAINED.id]
    assert events(run(FakeSlurm("ALLOCATED+DRAIN"), seen=[DRAINED])) == []


def test_what_has_ended_while_nobody_led_is_news() -> None:
    assert events(run(FakeSlurm("ALLOCATED"), seen=[DRAINED])) == [f"resume/{DRAINED.id}"]


@pytest.mark.parametrize("leads", [True, False])
def test_only_who_leads_gives_nodes_back(leads: bool) -> None:
    slurm = FakeSlurm("ALLOCATED")
    assert [given["kind"] for given in run(slurm, seen=[], leads=leads, release=True)] == ["released"]
    assert slurm.shrunk == ([["n1"]] if leads else [])


def test_every_leader_decides_on_the_plan_of_the_first(tmp_path: Path) -> None:
    """One agent has got no answer from Slurm about the batch host: from the same journal it must still
    conclude the same."""

    async def main() -> None:
        async with Job(tmp_path) as job:
            job.plan.batch_host = "n1"
            first = job.lead("n4")
            await job.start()
            await job.lose_leader()
            job.plan.batch_host = None
            second = job.lead("n2")
            assert second.state.plan.batch_host == "n1" and second.state.nodes["n1"].batch_host
            assert second.state.seats == first.state.seats

    asyncio.run(main())


@pytest.mark.parametrize(
    ("kind", "state", "has_it"),
    [
        ("drain", "IDLE+DRAIN", True),
        ("drain", "MIXED+DRAIN", False),
        ("drain", "IDLE", False),  # somebody has resumed it meanwhile
        ("fail", "IDLE+FAIL", True),
        ("fail", "IDLE+COMPLETING+FAIL", False),
        ("reboot", "IDLE+DRAIN+REBOOT_ISSUED", True),
        ("maintenance", "IDLE", True),
        ("maintenance", "IDLE+MAINTENANCE+RESERVED", True),
        ("maintenance", "MIXED+MAINTENANCE", False),
        ("maintenance", "UNKNOWN", False),
    ],
)
def test_the_administrator_has_a_node_when_nothing_of_the_job_is_on_it(
    kind: str, state: str, has_it: bool
) -> None:
    job = JobState.initial(PLAN)
    job.nodes["n2"].standing = "released"
    job.nodes["n2"].notice = Notice("x", kind, "", 1.0, "poll", gives_back=True)
    told = [given["kind"] for given in run(FakeSlurm(state), seen=[], state=job)]
    assert ("node_drained" in told) is has_it
