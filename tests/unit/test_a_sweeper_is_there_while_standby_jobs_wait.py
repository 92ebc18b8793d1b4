"""The job that takes standby jobs out of the queue after a training job that was killed: in the queue only
while a standby job waits there, once, whoever leads."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from tm_slurm.config import loads
from tm_slurm.coordinator import sweeper_job
from tm_slurm.coordinator.allocation import Allocation
from tm_slurm.coordinator.sweeper_job import SweeperJob
from tm_slurm.coordinator.training import Training
from tm_slurm.slurm import JobInfo, QueuedJob, SlurmRefused, SlurmUnavailable
from tm_slurm.submit import sweeper
from tm_slurm.submit.sweeper import SweeperTask, sweeper_config

TRAINING = Training(job_id=7, attempt=1, job_dir=Path("unused"), restarts=1)


class FakeSlurm:
    """A queue of jobs by name, and whether the training job runs."""

    def __init__(self, *names: str, state: str = "RUNNING") -> None:
        self.names = dict(enumerate(names, 20))
        self.state = state
        self.submitted: list[list[str]] = []
        self.asked = 0

    def queued(self, name_prefix: str) -> list[QueuedJob]:
        self.asked += 1
        found = [(number, name) for number, name in self.names.items() if name.startswith(name_prefix)]
        return [QueuedJob(job_id=number, name=name, state="PENDING") for number, name in found]

    def job(self, job_id: int) -> JobInfo:
        return JobInfo(job_id=job_id, name="x", user="u", state=self.state, restarts=1)

    def cancel(self, job_id: int) -> None:
        del self.names[job_id]

    def submit(self, command: list[str]) -> int:
        self.submitted.append(command)
        self.names[99] = next(word for word in command if word.startswith("--called=")).removeprefix(
            "--called="
        )
        return 99


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeper_job, "PATIENCE_S", 0.0)
    monkeypatch.setattr(sweeper, "ASK_LIMIT_S", 0.2)
    monkeypatch.setattr(sweeper, "ASK_AGAIN_S", 0.01)


def tend(
    slurm: FakeSlurm,
    monkeypatch: pytest.MonkeyPatch,
    *waits: bool,
    training: Training = TRAINING,
    leads: bool = True,
    end: bool = False,
) -> None:
    monkeypatch.setattr(sweeper_job, "answer_of", slurm.submit)
    job = SweeperJob(slurm=slurm, training=training, leads=lambda: leads)  # type: ignore[arg-type]

    async def main() -> None:
        for waiting in waits:
            await job.tend(waits=waiting)
        if end:
            await job.end()

    asyncio.run(main())


def test_it_is_submitted_once_while_a_standby_job_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = FakeSlurm()
    tend(slurm, monkeypatch, True, True, True)
    (command,) = slurm.submitted
    assert {"tm_slurm.submit.sweeper", "--of=7", "--attempt=1", "--called=tm-sweeper-7."} <= set(command)


def test_nothing_is_submitted_for_one_that_has_only_just_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeper_job, "PATIENCE_S", 60.0)
    slurm = FakeSlurm()
    tend(slurm, monkeypatch, True, True)
    assert not slurm.submitted


def test_it_is_cancelled_when_none_waits_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = FakeSlurm()
    tend(slurm, monkeypatch, True, False)
    assert slurm.submitted and not slurm.names


def test_a_new_leader_finds_that_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = FakeSlurm("tm-sweeper-7.x")
    tend(slurm, monkeypatch, True)
    assert not slurm.submitted and slurm.names
    tend(slurm, monkeypatch, False)
    assert not slurm.names


def test_at_the_end_it_goes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = FakeSlurm("tm-sweeper-7.x", "tm-sweeper-70.x")
    tend(slurm, monkeypatch, end=True)
    assert list(slurm.names.values()) == ["tm-sweeper-70.x"]
    asked = slurm.asked
    tend(slurm, monkeypatch, False, end=True)
    assert slurm.asked == asked + 1, "what is known is not asked again"


def test_who_does_not_lead_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = FakeSlurm()
    tend(slurm, monkeypatch, True, leads=False)
    assert not slurm.submitted


def test_an_allocation_that_was_given_back_whole_has_no_end_to_wait_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Allocation(job_id=7, controller=6, attempt=1, given_back=True).write(tmp_path)
    slurm = FakeSlurm()
    training = dataclasses.replace(TRAINING, job_dir=tmp_path, without_script=True)
    tend(slurm, monkeypatch, True, training=training)
    assert not slurm.submitted


def test_a_refusal_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = FakeSlurm()

    def refuse(command: list[str]) -> int:
        slurm.submitted.append(command)
        raise SlurmRefused("too many jobs")

    slurm.submit = refuse  # type: ignore[method-assign]
    tend(slurm, monkeypatch, True, True)
    assert len(slurm.submitted) == 1


@pytest.mark.parametrize(("state", "left"), [("RUNNING", 2), ("CANCELLED", 0), ("COMPLETED", 0)])
def test_it_sweeps_only_when_the_training_job_has_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, state: str, left: int
) -> None:
    slurm = FakeSlurm("tm-standby-7.1.1.x", "tm-standby-7.1.2.x", "tm-standby-70.1.1.x", state=state)
    monkeypatch.setattr(sweeper, "connect", lambda: slurm)
    assert SweeperTask(str(tmp_path), 7, 1)() == 0
    assert len(slurm.names) == left + 1


def test_it_asks_again_when_slurm_does_not_say_whether_the_job_has_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slurm, answers = FakeSlurm("tm-standby-7.1.1.x", state="CANCELLED"), [False, True]
    job = slurm.job

    def asked(job_id: int) -> JobInfo:
        if not answers.pop(0):
            raise SlurmUnavailable("no answer")
        return job(job_id)

    slurm.job = asked  # type: ignore[method-assign]
    monkeypatch.setattr(sweeper, "connect", lambda: slurm)
    assert SweeperTask(str(tmp_path), 7, 1)() == 0
    assert not slurm.names and not answers


def test_it_asks_for_next_to_nothing() -> None:
    config = loads(
        """
        job: {name: big, nodes: 4, ranks_per_node: 8, gpus_per_rank: 1, partition: gpu, account: a, qos: q,
              constraint: "h200*4&svc*1", batch_feature: svc, memory: 500G, exclude: n9,
              time_limit: UNLIMITED, 
              sbatch: {dependency: "afterok:3", nice: 5, exclusive: true, gres: "gpu:8"}}
        train: {module: x}
        """,
        name="test",
    )
    job = sweeper_config(config).job
    assert (job.all_nodes, job.ranks_per_node, job.gpus_per_rank, job.memory, job.constraint) == (
        1,
        1,
        0,
        None,
        None,
    )
    assert (job.partition, job.account, job.qos, job.exclude) == ("gpu", "a", "q", "n9")
    assert (job.time_limit, job.sbatch) == (sweeper.MINUTES, {"nice": 5})
