"""srun is let go of when all agents of this start are there, and the batch script waits for the verdict then,
as long as there are agents."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tm_slurm.slurm import SlurmUnavailable
from tm_slurm.submit import step_watch, verdict
from tm_slurm.submit.letting_go import let_go, members_of_group, missing_agents

COMPLETED = {"state": "completed", "exit_code": 0, "reason": "done"}


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts Python programs that wait; all are ended afterwards."""
    started: list[subprocess.Popen[bytes]] = []

    def program(*words: str, body: str = "", **environment: str) -> subprocess.Popen[bytes]:
        text = f"import os, signal\n{body}\nprint('here', flush=True)\nsignal.pause()"
        one = subprocess.Popen(
            [sys.executable, "-c", text, *words],
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, **environment},
        )
        started.append(one)
        assert one.stdout is not None and one.stdout.readline() == b"here\n"
        return one

    yield program
    for one in started:
        for pid in members_of_group(one.pid):
            os.kill(pid, signal.SIGKILL)
        one.communicate()


def log_of(job_dir: Path, node: str) -> Path:
    (job_dir / "logs").mkdir(exist_ok=True)
    path = job_dir / "logs" / f"agent-{node}.log"
    path.touch()
    return path


def test_both_of_its_processes_end_together(start: Callable[..., subprocess.Popen[bytes]]) -> None:
    """As long as one is alive and not stopped, it would notice the end of the other one."""
    srun = start(body="os.fork() or signal.pause()")
    both = members_of_group(srun.pid)
    assert len(both) == 2
    let_go(both)
    assert srun.wait(10) == -signal.SIGKILL
    deadline = time.monotonic() + 10
    while members_of_group(srun.pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_agents_of_an_earlier_start_do_not_count(tmp_path: Path) -> None:
    os.utime(log_of(tmp_path, "n1"), (1000.0, 1000.0))
    log_of(tmp_path, "n2")
    assert missing_agents(tmp_path, ["n1", "n2", "n3"], 2000.0) == ["n1", "n3"]
    assert missing_agents(tmp_path, ["n1", "n2", "n3"], 0.0) == ["n3"]


class Watched:
    """A watcher whose sleep is a look at what it has done, and then the next of `events`."""

    def __init__(self, job_dir: Path, monkeypatch: pytest.MonkeyPatch, sruns: list[int]) -> None:
        self.job_dir = job_dir
        self.events: list[Callable[[], object]] = []
        self.let_go: list[list[int]] = []
        monkeypatch.setenv("SLURM_JOB_ID", "1234567")
        monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
        monkeypatch.setattr(step_watch.time, "sleep", lambda _: self.events.pop(0)())
        monkeypatch.setattr(step_watch, "sruns_of", lambda _: sruns)
        monkeypatch.setattr(step_watch, "let_go", lambda pids: self.let_go.append(list(pids)))

    def run(self, *events: Callable[[], object]) -> None:
        self.events = list(events)
        step_watch.watch(self.job_dir, os.getppid())
        assert not self.events


def test_it_is_let_go_of_when_the_last_agent_has_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    start("tm_slurm.agent", SLURM_JOB_ID="1234567", SLURM_STEP_ID="3")
    start("tm_slurm.agent", SLURM_JOB_ID="12345678", SLURM_STEP_ID="4")
    watched = Watched(tmp_path, monkeypatch, [77, 78])

    def second() -> None:
        assert not watched.let_go
        log_of(tmp_path, "n2")

    watched.run(lambda: log_of(tmp_path, "n1"), second)
    assert watched.let_go == [[77, 78]]
    assert verdict.let_go_file(tmp_path, 0).read_text() == "3"


def test_a_step_that_could_not_be_found_again_keeps_its_srun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No agent of this node can be looked at. The verdict ends the watcher."""
    log_of(tmp_path, "n1")
    log_of(tmp_path, "n2")
    watched = Watched(tmp_path, monkeypatch, [])
    watched.run(lambda: None, lambda: (tmp_path / "verdict.json").write_text(json.dumps(COMPLETED)))
    assert not watched.let_go and not verdict.let_go_file(tmp_path, 0).exists()


class Steps:
    """Slurm, as far as steps go: what it answers at each question, the last one for ever."""

    def __init__(self, *answers: set[str] | Exception) -> None:
        self.answers = list(answers)

    def steps(self, job_id: int) -> set[str]:
        assert job_id == 1234567
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., float]]:
    """Waits for the end of a job whose srun was let go of; returns how long, in seconds of a clock that only
    the waiting moves. `events`: what happens at some of these seconds."""
    handlers = {
        number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    }
    monkeypatch.setenv("SLURM_JOB_ID", "1234567")
    verdict.let_go_file(tmp_path, 0).write_text("3")

    def wait(slurm: Steps, events: dict[float, Callable[[], object]] | None = None) -> float:
        now = 0.0

        def sleep(seconds: float) -> None:
            nonlocal now
            for at in [at for at in events or {} if now <= at < now + seconds]:
                (events or {})[at]()
            now += seconds
            assert now < 600, "it waits for ever"

        monkeypatch.setattr(verdict.time, "sleep", sleep)
        monkeypatch.setattr(verdict.time, "monotonic", lambda: now)
        monkeypatch.setattr(verdict, "connect", lambda: slurm)
        verdict.await_end(tmp_path, 0)
        return now

    yield wait
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_the_script_waits_for_the_verdict(waiting: Callable[..., float], tmp_path: Path) -> None:
    def told() -> None:
        (tmp_path / "verdict.json").write_text(json.dumps(COMPLETED))

    assert 300.0 <= waiting(Steps({"batch", "3"}), {300.0: told}) <= 301.0


def test_without_agents_it_does_not_wait_for_ever(waiting: Callable[..., float]) -> None:
    no_answer = SlurmUnavailable("timed out")
    answers = ({"3"}, no_answer, {"batch", "0", "13"})
    assert 10.0 + verdict.AFTERWORD_S <= waiting(Steps(*answers)) <= 16.0 + verdict.AFTERWORD_S


def test_without_an_answer_from_slurm_it_waits(waiting: Callable[..., float], tmp_path: Path) -> None:
    def told() -> None:
        (tmp_path / "verdict.json").write_text(json.dumps(COMPLETED))

    assert waiting(Steps(SlurmUnavailable("timed out")), {120.0: told}) >= 120.0


def test_a_job_that_slurm_ends_waits_for_its_agents_only(waiting: Callable[..., float]) -> None:
    def ended() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    assert 61.0 <= waiting(Steps(*[{"3"}] * 13, set()), {60.2: ended}) <= 63.0


def test_when_srun_ended_by_itself_nothing_is_waited_for(
    waiting: Callable[..., float], tmp_path: Path
) -> None:
    verdict.let_go_file(tmp_path, 0).unlink()
    assert waiting(Steps(AssertionError("nobody asks"))) == 0.0
