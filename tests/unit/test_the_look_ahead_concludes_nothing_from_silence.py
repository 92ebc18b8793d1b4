"""What the leader learns of Slurm's plans: news once, and nothing from a question without an answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest

from tm_slurm.coordinator.lookout import Lookout
from tm_slurm.coordinator.model import JobState, Plan
from tm_slurm.slurm import (
    JobInfo,
    NodeInfo,
    NodeState,
    ReservationInfo,
    SlurmRefused,
    SlurmUnavailable,
)


class Enough(Exception):
    """The test has seen what it wanted to."""


class Answers:
    """A Slurm that says what the test has it say, or fails at one of the questions."""

    def __init__(self) -> None:
        self.started = time.time() - 100.0
        self.about_job: dict[str, Any] = {}
        self.listed: list[ReservationInfo] = []
        self.failing: dict[str, Exception] = {}
        self.asked: list[str] = []
        self.enough = 1_000_000

    def _ask(self, what: str) -> None:
        self.asked.append(what)
        if self.asked.count("job") >= self.enough:
            raise Enough
        if what in self.failing:
            raise self.failing[what]

    def job(self, job_id: int) -> JobInfo:
        self._ask("job")
        about = {"start_time": self.started, "end_time": self.started + 9000.0, **self.about_job}
        return JobInfo(job_id=job_id, name="x", user="u", state="RUNNING", **about)

    def reservations(self) -> dict[str, ReservationInfo]:
        self._ask("reservations")
        return {reservation.name: reservation for reservation in self.listed}

    def nodes(self, names: Sequence[str]) -> dict[str, NodeInfo]:
        self._ask("nodes")
        return {name: NodeInfo(name=name, state=NodeState.parse("MIXED"), cpus=4) for name in names}

    def reserve(self, name: str, *nodes: str, flags: tuple[str, ...] = ("MAINT",), cpus: int = 4) -> None:
        starts = self.started + 1000.0
        self.listed.append(
            ReservationInfo(
                name=name,
                nodes=nodes,
                start_time=starts,
                end_time=starts + 60.0,
                flags=frozenset(flags),
                cpus=cpus,
            )
        )


class Watch:
    """A look-out over a job of n1 and n2, and what it told."""

    def __init__(self) -> None:
        self.slurm = Answers()
        self.state = JobState.initial(Plan(["n1", "n2"], "n1", 1, 1))
        self.told: list[dict[str, Any]] = []
        slurm: Any = self.slurm
        self.lookout = Lookout(
            slurm=slurm, job_id=7, state=self.state, feed=self._take, poll_interval_s=0.001
        )

    def _take(self, given: dict[str, Any]) -> None:
        self.told.append(given)
        if given["kind"] == "outlook":
            self.state.outlook = {key: given[key] for key in ("windows", "starts", "ends")}

    def look(self) -> list[dict[str, Any]]:
        """What is new at one more look."""
        self.told = []
        asyncio.run(self.lookout.look())
        return self.told

    def windows(self) -> list[str]:
        return [window["name"] for window in self.state.outlook["windows"]]


def test_news_are_told_once() -> None:
    watch = Watch()
    assert len(watch.look()) == 1 and watch.windows() == []
    assert watch.look() == []
    watch.slurm.reserve("fans", "n2", "n9")
    (outlook,) = watch.look()
    assert outlook["windows"][0]["nodes"] == ["n2"] and abs(outlook["wall"] - time.time()) < 60.0
    assert watch.look() == []
    watch.slurm.listed.clear()
    assert len(watch.look()) == 1 and watch.windows() == []


@pytest.mark.parametrize("what", ["job", "reservations", "nodes"])
@pytest.mark.parametrize("error", [SlurmUnavailable("no answer"), SlurmRefused("no")])
def test_a_question_without_an_answer_changes_nothing(what: str, error: Exception) -> None:
    """A poller for drains took a failed call for "nothing is drained" and cancelled a move."""
    watch = Watch()
    watch.slurm.reserve("fans", "n2", flags=())
    watch.look()
    assert watch.windows() == ["fans"]
    at_home = watch.lookout.at_home
    watch.slurm.failing[what] = error
    assert watch.look() == [] and watch.windows() == ["fans"] and watch.lookout.at_home == at_home
    del watch.slurm.failing[what]
    assert watch.look() == []


def test_it_looks_again_and_again_whatever_the_answer() -> None:
    watch = Watch()
    watch.slurm.failing["job"] = SlurmUnavailable("no answer")
    watch.slurm.enough = 3

    with pytest.raises(Enough):
        asyncio.run(asyncio.wait_for(watch.lookout.look_for_ever(), 10.0))
    assert watch.told == [] and watch.lookout.at_home is None
    del watch.slurm.failing["job"]
    watch.slurm.enough = 6
    with pytest.raises(Enough):
        asyncio.run(asyncio.wait_for(watch.lookout.look_for_ever(), 10.0))
    assert [given["kind"] for given in watch.told] == ["outlook"] and watch.lookout.at_home == frozenset()


def test_the_reservation_that_the_job_runs_in_is_its_home() -> None:
    watch = Watch()
    watch.slurm.reserve("mine", "n1", "n2")
    watch.slurm.about_job = {"reservations": ("mine",)}
    watch.look()
    assert watch.windows() == [] and watch.lookout.at_home == {"n1", "n2"}


def test_a_reservation_of_some_cpus_is_none_of_the_nodes() -> None:
    watch = Watch()
    watch.slurm.reserve("cores", "n2", flags=(), cpus=3)
    watch.slurm.reserve("whole", "n2", flags=(), cpus=4)
    watch.look()
    assert watch.windows() == ["whole"]


def test_preemption_is_an_event_once() -> None:
    watch = Watch()
    watch.slurm.about_job = {"preempt_time": watch.slurm.started - 5.0}
    assert [given["kind"] for given in watch.look()] == ["outlook"], "that was before the job's last requeue"
    watch.slurm.about_job = {
        "preempt_time": watch.slurm.started + 50.0,
        "end_time": watch.slurm.started + 80.0,
    }
    told = watch.look()
    (event,) = next(given for given in told if given["kind"] == "events")["events"]
    assert event["kind"] == "preempt" and event["deadline"] == watch.slurm.started + 80.0
    assert not any(given["kind"] == "events" for given in watch.look())
