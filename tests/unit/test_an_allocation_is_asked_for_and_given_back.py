"""Launch mode `allocation`: what Slurm is asked for, what is noted in the job directory, what ends what."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tm_slurm.config import loads
from tm_slurm.coordinator import allocation
from tm_slurm.coordinator.allocation import Allocation
from tm_slurm.coordinator.model import JobState, Plan
from tm_slurm.coordinator.slurm_side import SlurmSide
from tm_slurm.coordinator.training import Training, has_ended
from tm_slurm.slurm import JobInfo, SlurmRefused, SlurmUnavailable
from tm_slurm.submit.salloc import salloc_options
from tm_slurm.submit.submission import script_text

KNOWN = Allocation(job_id=12, controller=11, attempt=1, launched=True)


class FakeSlurm:
    """Jobs by id; what is asked of them is written down."""

    def __init__(self, **states: str) -> None:
        self.nodes_of = {12: ("n1",)}
        self.states = {int(name[1:]): state for name, state in states.items()}
        self.done: list[tuple[str, int]] = []
        self.silent = 0

    def job(self, job_id: int) -> JobInfo:
        if job_id not in self.states:
            raise SlurmRefused("Invalid job id specified")
        nodes = self.nodes_of.get(job_id, ())
        return JobInfo(job_id=job_id, name="x", user="u", state=self.states[job_id], nodes=nodes)

    def cancel(self, job_id: int) -> None:
        if self.silent:
            self.silent -= 1
            raise SlurmUnavailable("no answer")
        self.done.append(("cancel", job_id))

    def begin_not_before(self, job_id: int, at: float) -> None:
        self.done.append(("begin", job_id))

    def shrink(self, job_id: int, keep: list[str]) -> None:
        self.done.append(("shrink", job_id))


def test_what_is_noted_is_read_again(tmp_path: Path) -> None:
    assert Allocation.read(tmp_path) is None
    KNOWN.write(tmp_path)
    assert Allocation.read(tmp_path) == KNOWN
    training = Training.of(tmp_path, 12, 1)
    assert (training.controller, training.without_script, training.restarts) == (11, True, 0)
    assert Training.of(tmp_path / "elsewhere", 12, 1).restarts == 1


@pytest.mark.parametrize("whole", [True, False])
def test_the_last_node_goes_with_the_allocation_and_that_ends_nothing(tmp_path: Path, whole: bool) -> None:
    KNOWN.write(tmp_path)
    slurm = FakeSlurm(j12="RUNNING")
    slurm.nodes_of[12] = ("n1",) if whole else ("n1", "n2")
    training = Training.of(tmp_path, 12, 1)

    async def main() -> None:
        side = SlurmSide(
            slurm=slurm,  # type: ignore[arg-type]
            training=training,
            leader_node="n7",
            state=JobState.initial(Plan(["n1", "n2"], None, 1, 1)),
            feed=lambda given: None,
            leads=lambda: True,
            seen=[],
            poll_interval_s=1.0,
        )
        await side._give_back({"n1"})

    asyncio.run(main())
    assert slurm.done == ([("cancel", 12)] if whole else [("shrink", 12)])
    slurm.states[12] = "CANCELLED"
    assert has_ended(slurm, training) is not whole  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("state", "ends"), [("RUNNING", False), ("COMPLETING", True), ("CANCELLED", True), ("", True)]
)
def test_an_allocation_that_somebody_cancels_ends_training(tmp_path: Path, state: str, ends: bool) -> None:
    KNOWN.write(tmp_path)
    slurm = FakeSlurm(j12=state) if state else FakeSlurm()
    assert has_ended(slurm, Training.of(tmp_path, 12, 1)) is ends  # type: ignore[arg-type]


def test_at_the_end_nothing_stays_allocated_also_if_slurm_is_slow_to_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(allocation, "ASK_AGAIN_S", 0.0)
    slurm = FakeSlurm()
    slurm.silent = 2
    asyncio.run(allocation.end(slurm, KNOWN))  # type: ignore[arg-type]
    assert slurm.done == [("cancel", 12), ("begin", 11)]


@pytest.mark.parametrize(
    ("state", "stops", "begins"),
    [
        ("CANCELLED", True, False),
        ("FAILED", False, False),
        ("RUNNING", False, False),
        ("PENDING", False, True),
    ],
)
def test_only_a_cancelled_controller_stops_training_and_one_in_the_queue_begins_at_once(
    state: str, stops: bool, begins: bool
) -> None:
    slurm, fed = FakeSlurm(j11=state), list[Any]()

    async def main() -> None:
        watching = asyncio.create_task(allocation.watch_controller(slurm, 11, fed.append, 0.001))  # type: ignore[arg-type]
        await asyncio.wait({watching}, timeout=0.2)
        watching.cancel()

    asyncio.run(main())
    assert [given["kind"] for given in fed] == (["stop"] if stops else [])
    assert slurm.done == ([("begin", 11)] if begins else [])


def test_salloc_is_asked_for_what_sbatch_would_have_been() -> None:
    config = loads(
        """
        job:
          {name: "a b", nodes: 4, standbys: 2, ranks_per_node: 2, cpus_per_rank: 3, gpus_per_rank: 1, qos: q,
           partition: gpu, exclude: n9, time_limit: UNLIMITED, memory: 16000, signal_delay_s: 60,
           sbatch: {exclusive: true, oversubscribe: false, nice: 5, wait: true}}
        train: {module: x}
        """,
        name="test",
    )
    options = salloc_options(config, called="tm-nodes-11.0.")
    assert options[:3] == ["--no-shell", "--no-kill", "--job-name=tm-nodes-11.0.a b"]
    asked = {"--nodes=6", "--ntasks-per-node=1", "--cpus-per-task=6", "--gpus-per-node=2", "--signal=USR2@60"}
    asked |= {"--qos=q", "--partition=gpu", "--exclude=n9", "--time=UNLIMITED", "--mem=16000M", "--exclusive"}
    assert asked | {"--nice=5"} == set(options[3:])
    assert "--begin=now+0seconds" in salloc_options(config, called="x", begins=1.0)


def test_the_controller_is_a_job_of_one_cpu() -> None:
    config = loads(
        """
        job:
          {nodes: 4, ranks_per_node: 8, gpus_per_rank: 1, memory: 16G, launch: allocation, directory: /x/%j,
           python: /opt/python3, sbatch: {exclusive: true}}
        train: {module: x}
        """,
        name="test",
    )
    lines = script_text(config, "0123").splitlines()
    asked = {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")}
    assert {"--nodes=1", "--ntasks-per-node=1", "--cpus-per-task=1", "--requeue"} <= asked
    assert not any(word in line for line in asked for word in ("gpu", "mem", "exclusive", "no-kill"))
