"""What a leader does about standby jobs in Slurm's queue: it knows those of the leaders before it by their
names, and takes out what nobody asks for."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tm_slurm.config import loads
from tm_slurm.coordinator import standby_jobs
from tm_slurm.coordinator.model import Ask, JobState, Node, Plan
from tm_slurm.coordinator.standby_jobs import StandbyJobs
from tm_slurm.coordinator.training import Training
from tm_slurm.slurm import QueuedJob, SlurmRefused, SlurmUnavailable
from tm_slurm.submit.standby import standby_config

TRAINING = Training(job_id=7, attempt=1, job_dir=Path("unused"), restarts=1)


class FakeSlurm:
    """A queue of standby jobs, as (id, end of the name, state)."""

    def __init__(self, *jobs: tuple[int, str, str]) -> None:
        self.jobs = [
            QueuedJob(job_id=number, name=f"tm-standby-7.{rest}", state=s) for number, rest, s in jobs
        ]
        self.cancelled: list[int] = []
        self.silent = 0

    def queued(self, name_prefix: str) -> list[QueuedJob]:
        if self.silent:
            self.silent -= 1
            raise SlurmUnavailable("no answer")
        return [job for job in self.jobs if job.name.startswith(name_prefix)]

    def cancel(self, job_id: int) -> None:
        self.cancelled.append(job_id)


def look(
    slurm: FakeSlurm,
    *asks: Ask,
    leads: bool = True,
    sweep: bool = False,
    answer: int | Exception = 99,
    monkeypatch: pytest.MonkeyPatch | None = None,
) -> list[Any]:
    """What a leader feeds after one look at the queue, or when the job is over."""
    fed: list[Any] = []
    plan = Plan(["n1", "n2"], "n1", 1, 1, refill=True)
    state = JobState.initial(plan)
    state.asks = {ask.number: ask for ask in asks}
    state.nodes["n7"] = Node("n7", False, "standby", agent_up=True, connected=True, job_id=57)
    commands: list[list[str]] = []

    def submit(command: list[str]) -> int:
        commands.append(command)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def main() -> None:
        jobs = StandbyJobs(
            slurm=slurm,  # type: ignore[arg-type]
            training=TRAINING,
            leader_node="n1",
            state=state,
            feed=fed.append,
            leads=lambda: leads,
            poll_interval_s=0.01,
        )
        await (jobs.sweep() if sweep else jobs._look())

    if monkeypatch is not None:
        monkeypatch.setattr(standby_jobs, "answer_of", submit)
    asyncio.run(main())
    return [*fed, *commands]


def an_ask(number: int, job_id: int | None = None, **fields: Any) -> Ask:
    return Ask(number, 0.0, ("n1", "n2"), 30, job_id, **fields)


def test_what_the_leader_before_has_asked_for_is_known_by_its_name() -> None:
    slurm = FakeSlurm((51, "1.1.tiny", "PENDING"), (52, "1.12.tiny", "PENDING"))
    told = look(slurm, an_ask(1), an_ask(12, 52))
    assert told == [{"kind": "standby_job", "ask": 1, "job": 51}] and slurm.cancelled == []


def test_what_is_not_in_the_queue_is_submitted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    *told, command = look(FakeSlurm(), an_ask(3), monkeypatch=monkeypatch)
    assert told == [{"kind": "standby_job", "ask": 3, "job": 99}]
    words = {
        "--of=7",
        "--attempt=1",
        "--ask=3",
        "--called=tm-standby-7.1.3.",
        "--exclude=n1,n2",
        "--minutes=30",
    }
    assert words <= set(command)


def test_a_refusal_is_told_and_no_answer_concludes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    told = look(FakeSlurm(), an_ask(3), answer=SlurmRefused("no such qos"), monkeypatch=monkeypatch)
    assert told[0] == {"kind": "standby_job_refused", "ask": 3, "why": "no such qos"}
    told = look(FakeSlurm(), an_ask(3), answer=SlurmUnavailable("silence"), monkeypatch=monkeypatch)
    assert ["tm_slurm.submit.standby" in command for command in told] == [True]


def test_a_queue_that_does_not_answer_changes_nothing() -> None:
    slurm = FakeSlurm((60, "1.9.tiny", "PENDING"))
    slurm.silent = 1
    assert look(slurm, an_ask(1), an_ask(2, 52)) == [] and slurm.cancelled == []


def test_what_nobody_asks_for_is_cancelled_and_what_joined_is_not() -> None:
    slurm = FakeSlurm(
        (57, "1.4.tiny", "RUNNING"),
        (58, "0.1.tiny", "PENDING"),
        (59, "1.5.tiny", "PENDING"),
        (60, "1.6.t", "RUNNING"),
    )
    look(slurm, an_ask(4, 57, node="n7"), an_ask(5, 59, unwanted=True))
    assert sorted(slurm.cancelled) == [58, 59, 60]


def test_only_who_leads_changes_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = FakeSlurm((58, "0.1.tiny", "PENDING"))
    assert look(slurm, an_ask(3), leads=False, monkeypatch=monkeypatch) == [] and slurm.cancelled == []


@pytest.mark.parametrize("state", ["COMPLETING", "CANCELLED", None])
def test_a_job_that_is_over_is_told(state: str | None) -> None:
    slurm = FakeSlurm((51, "1.1.tiny", state)) if state else FakeSlurm()
    assert look(slurm, an_ask(1, 51)) == [{"kind": "standby_job_over", "ask": 1}] and slurm.cancelled == []


def test_at_the_end_all_that_has_not_joined_is_cancelled_also_if_slurm_is_slow_to_answer() -> None:
    slurm = FakeSlurm((57, "1.4.tiny", "RUNNING"), (58, "1.5.tiny", "PENDING"))
    slurm.silent = 1
    look(slurm, an_ask(4, 57, node="n7"), sweep=True)
    assert slurm.cancelled == [58]


def test_a_standby_job_is_asked_for_as_the_training_job_was() -> None:
    config = loads(
        """
        job:
          {name: big, nodes: 4, standbys: 2, ranks: 8, ranks_per_node: 2, partition: gpu, account: a, qos: q,
           constraint: h200, exclude: n9, time_limit: 600, sbatch: {dependency: "afterok:3", nice: 5}}
        train: {module: x}
        """,
        name="test",
    )
    job = standby_config(config, called="tm-standby-7.0.1.", exclude="n1,n2", minutes=45).job
    assert (job.name, job.nodes, job.standbys, job.ranks_per_node) == ("tm-standby-7.0.1.big", 1, 0, 2)
    assert (job.partition, job.account, job.qos, job.constraint) == ("gpu", "a", "q", "h200")
    assert (job.exclude, job.time_limit, job.sbatch) == ("n9,n1,n2", 45, {"nice": 5})
    assert standby_config(config, called="x", exclude="", minutes=None).job.time_limit == 600


@pytest.mark.parametrize(
    ("constraint", "of_one"),
    [(None, None), ("svc", None), ("gpu*5&svc*1", "gpu"), ("[gpu*5&svc*1]", "gpu"), ("a&b&svc*1", "a&b")],
)
def test_a_standby_job_need_not_be_on_a_node_for_the_batch_script(
    constraint: str | None, of_one: str | None
) -> None:
    config = loads("job: {batch_feature: svc}\ntrain: {module: x}\n", name="test")
    config = replace(config, job=replace(config.job, constraint=constraint))
    job = standby_config(config, called="x", exclude="", minutes=None).job
    assert (job.constraint, job.batch_feature) == (of_one, None)
