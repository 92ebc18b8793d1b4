"""How a batch script ends: `python -m tm_slurm.submit.verdict JOB_DIRECTORY` is its last line.

srun ends with the worst code of its tasks, and the tasks of nodes that were given back count: a job that
trained to the end would be called FAILED. What counts is what the coordinator wrote. When srun was let go of
(tm_slurm.submit.step_watch), training goes on: this waits for that word, as long as there are agents.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from tm_slurm.slurm import SlurmRefused, SlurmUnavailable, connect, environment

VerdictState = Literal["completed", "failed", "requeue"]
_NO_VERDICT_CODE = 1
ENDED_BY_SLURM_S = 60.0
BEGIN_LIMIT_S = 20.0
_ASK_AGAIN_S = 0.2
LOOK_S = 0.5
STEP_INTERVAL_S = 5.0
"""Between looks for the verdict, and for the step of the agents."""

AFTERWORD_S = 10.0
"""So long after the end of the step a verdict may still come; when Slurm has said that the job has to end, no
longer than a look takes."""


class NoVerdict(RuntimeError):
    """There is no usable verdict; the message says what was found."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How the job ended, by the coordinator's word. `exit_code` is the batch script's; `traceback` is that of
    the rank that failed first."""

    state: VerdictState
    exit_code: int
    reason: str
    traceback: str = ""
    begins: float | None = None
    """Unix seconds before which a requeued job is not to start"""


def attempt_now() -> int:
    """Return how often Slurm has restarted this job, as the agents count it."""
    said = environment.read(environment.RESTART_COUNT) or "0"
    return int(said) if said.isdigit() else 0


def read_verdict(job_dir: Path, attempt: int) -> Verdict:
    """Read `verdict.json`; raises NoVerdict when it is missing, makes no sense, or is not that of the job's
    start `attempt`.
    """
    path = job_dir / "verdict.json"
    try:
        _look_again(job_dir)
        found = json.loads(path.read_text())
    except OSError as error:
        raise NoVerdict(
            f"no verdict: {path}: {error.strerror}; the coordinator came to no end, see {job_dir}/logs"
        ) from error
    except ValueError as error:
        raise NoVerdict(f"no verdict: {path} is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise NoVerdict(f"no verdict: {path}: expected an object, found {found!r}")
    state, code, reason = found.get("state"), found.get("exit_code"), found.get("reason", "")
    if state not in get_args(VerdictState):
        raise NoVerdict(
            f"no verdict: {path}: expected completed, failed or requeue as state, found {state!r}"
        )
    if not isinstance(code, int) or isinstance(code, bool) or not 0 <= code <= 255:
        raise NoVerdict(f"no verdict: {path}: expected an exit code from 0 to 255, found {code!r}")
    if found.get("attempt", attempt) != attempt:
        raise NoVerdict(
            f"no verdict: {path}: expected that of restart {attempt} of the job, found that of restart "
            f"{found['attempt']!r}; see {job_dir}/logs"
        )
    begins = found.get("begins")
    if begins is not None and (not isinstance(begins, (int, float)) or isinstance(begins, bool)):
        raise NoVerdict(f"no verdict: {path}: expected Unix seconds as begins, found {begins!r}")
    failure = found.get("failure")
    traceback = str(failure.get("traceback", "")) if isinstance(failure, dict) else ""
    return Verdict(
        state=cast(VerdictState, state),
        exit_code=code,
        reason=str(reason),
        traceback=traceback,
        begins=begins,
    )


def _look_again(directory: Path) -> None:
    """A network file system may remember for half a minute that a file was not there; when the directory is
    opened it asks its server.
    """
    os.close(os.open(directory, os.O_RDONLY | os.O_DIRECTORY))


def let_go_file(job_dir: Path, attempt: int) -> Path:
    """Return the file that says that training goes on without srun: the number of its step is in it."""
    return job_dir / f".let-go-{attempt}"


def await_end(job_dir: Path, attempt: int) -> None:
    """Wait until there is a verdict, or there are no agents any more; not at all when srun has ended by
    itself."""
    told = let_go_file(job_dir, attempt)
    try:
        step = told.read_text()
        told.unlink()
    except FileNotFoundError:
        return
    told_to_end = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told_to_end.set())
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # warnings, for the agents
        signal.signal(number, signal.SIG_IGN)
    job_id, gone_since = environment.job_id(), None
    asked_at = -STEP_INTERVAL_S
    while job_id is not None:
        with contextlib.suppress(NoVerdict):
            read_verdict(job_dir, attempt)
            return
        now = time.monotonic()
        if told_to_end.is_set() or now - asked_at >= STEP_INTERVAL_S:
            asked_at = now
            gone_since = (gone_since or now) if _is_over(job_id, step) else None
        if gone_since is not None and now - gone_since >= (LOOK_S if told_to_end.is_set() else AFTERWORD_S):
            return
        time.sleep(LOOK_S)


def _is_over(job_id: int, step: str) -> bool:
    try:
        return step not in connect().steps(job_id)
    except SlurmRefused:  # it does not know the job, or has no steps of it
        return True
    except SlurmUnavailable:
        return False


def end_by_verdict(job_dir: Path) -> int:
    """Say how the job ended, put it back into the queue if that is the verdict, return the exit code to end
    with.
    """
    await_end(job_dir, attempt_now())
    try:
        verdict = read_verdict(job_dir, attempt_now())
    except NoVerdict as missing:
        print(f"tm_slurm: {missing}", file=sys.stderr)
        return _NO_VERDICT_CODE
    print("\n".join(said_of(verdict)))
    if verdict.state == "requeue":
        return _requeue(verdict)
    return verdict.exit_code


def said_of(verdict: Verdict) -> list[str]:
    """Return what the job's output ends with."""
    line = f"tm_slurm: {verdict.state}: {verdict.reason} exit_code={verdict.exit_code}"
    return [line, *([verdict.traceback] if verdict.traceback else [])]


def _requeue(verdict: Verdict) -> int:
    job_id = environment.job_id()
    if job_id is None:
        print("tm_slurm: cannot requeue: not in a Slurm job", file=sys.stderr)
        return verdict.exit_code or _NO_VERDICT_CODE
    sys.stdout.flush()
    told_to_end = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told_to_end.set())
    try:
        connect().requeue(job_id)
    except (SlurmRefused, SlurmUnavailable) as error:
        print(f"tm_slurm: job {job_id} was not requeued: {error}", file=sys.stderr)
        return verdict.exit_code or _NO_VERDICT_CODE
    if verdict.begins is not None:
        _begin_not_before(job_id, verdict.begins)
    # Slurm ends this script now. If it ended by itself, and the job started again at once, its exit code
    # would be taken for that of the new start.
    told_to_end.wait(ENDED_BY_SLURM_S)
    return verdict.exit_code


def _begin_not_before(job_id: int, at: float) -> None:
    """Slurm takes a begin time only when the job is in the queue again, and ends this script then: the batch
    script has it ignore SIGTERM, so there are KillWait seconds (30, usually) for this.
    """
    slurm = connect()
    deadline = time.monotonic() + BEGIN_LIMIT_S
    while True:
        try:
            slurm.begin_not_before(job_id, at)
            return
        except SlurmUnavailable as error:
            if time.monotonic() < deadline:
                time.sleep(_ASK_AGAIN_S)
                continue
            why: Exception = error
        except SlurmRefused as error:
            why = error
        print(f"tm_slurm: job {job_id} may start again before its window has closed: {why}", file=sys.stderr)
        return


def main(arguments: list[str]) -> int:
    """Run as a program: one argument, the job directory."""
    if len(arguments) != 1:
        print("usage: python -m tm_slurm.submit.verdict JOB_DIRECTORY", file=sys.stderr)
        return 2
    return end_by_verdict(Path(arguments[0]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
