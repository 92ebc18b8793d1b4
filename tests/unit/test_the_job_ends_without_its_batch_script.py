"""Whether the batch script is gone, and what the leader does in its place."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tm_slurm.coordinator import batch_script
from tm_slurm.coordinator.actions import End
from tm_slurm.slurm import JobInfo, NodeInfo, NodeState, SlurmRefused, SlurmUnavailable

COMPLETED = End("completed", 0, "all ranks have finished")


class FakeSlurm:
    """Answers what the test has it answer."""

    def __init__(self, state: str = "ALLOCATED", nodes: tuple[str, ...] = ("n1", "n2")) -> None:
        self.state = state
        self.in_job = nodes
        self.done: list[str] = []
        self.failing: list[Exception] = []

    def job(self, job_id: int) -> JobInfo:
        return JobInfo(job_id=job_id, name="x", user="u", state="RUNNING", nodes=self.in_job)

    def nodes(self, names: list[str]) -> dict[str, NodeInfo]:
        return {"n1": NodeInfo(name="n1", state=NodeState.parse(self.state), address="127.0.0.1")}

    def set_comment(self, job_id: int, text: str) -> None:
        self.done.append(text)

    def cancel(self, job_id: int) -> None:
        if self.failing:
            raise self.failing.pop(0)
        self.done.append("cancel")

    def requeue(self, job_id: int) -> None:
        self.done.append("requeue")

    def begin_not_before(self, job_id: int, at: float) -> None:
        if self.failing:
            raise self.failing.pop(0)
        self.done.append(f"begin {at:g}")


def is_gone(slurm: Any) -> bool:
    return asyncio.run(batch_script.is_gone(slurm, 7, "n1"))


def end(slurm: Any, how: End) -> list[str]:
    asyncio.run(batch_script.end_in_its_place(slurm, 7, how, "n1"))
    return list(slurm.done)


async def silence(*args: object) -> tuple[Any, Any]:
    await asyncio.sleep(30.0)
    raise AssertionError


def test_a_machine_that_refuses_a_connection_is_there() -> None:
    assert not is_gone(FakeSlurm())


def test_a_machine_that_does_not_answer_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_script, "ANSWER_LIMIT_S", 0.05)
    monkeypatch.setattr(asyncio, "open_connection", silence)
    assert is_gone(FakeSlurm())


def test_a_machine_that_answers_on_one_port_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    async def one(host: str, port: int) -> tuple[Any, Any]:
        if port == batch_script.PORTS[-1]:
            raise ConnectionRefusedError
        return await silence()

    monkeypatch.setattr(batch_script, "ANSWER_LIMIT_S", 0.05)
    monkeypatch.setattr(asyncio, "open_connection", one)
    assert not is_gone(FakeSlurm())


@pytest.mark.parametrize("slurm", [FakeSlurm("DOWN*"), FakeSlurm(nodes=("n2", "n3"))])
def test_what_slurm_knows_need_not_be_tried(slurm: FakeSlurm) -> None:
    assert is_gone(slurm)


def test_the_end_says_how_it_really_was() -> None:
    text, act = end(FakeSlurm(), COMPLETED)
    assert act == "cancel" and "completed: all ranks have finished" in text and "n1" in text


def test_a_job_that_goes_back_into_the_queue_is_put_there() -> None:
    assert end(FakeSlurm(), End("requeue", 1, "no standby"))[-1] == "requeue"


def test_a_job_that_is_to_wait_for_a_window_is_told_when_it_is_in_the_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batch_script, "ASK_AGAIN_S", 0.01)
    slurm = FakeSlurm()
    slurm.failing = [SlurmUnavailable("no answer")]
    assert end(slurm, End("requeue", 1, "maintenance", begins=5000.0))[1:] == ["requeue", "begin 5000"]


def test_it_is_tried_until_slurm_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_script, "ASK_AGAIN_S", 0.01)
    slurm = FakeSlurm()
    slurm.failing = [SlurmUnavailable("no answer"), SlurmUnavailable("no answer")]
    assert end(slurm, COMPLETED)[-1] == "cancel"


def test_a_no_is_an_answer() -> None:
    slurm = FakeSlurm()
    slurm.failing = [SlurmRefused("Invalid job id")]
    assert "cancel" not in end(slurm, COMPLETED)
