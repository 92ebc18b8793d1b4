"""How a batch script ends: `python -m tm_slurm.submit.verdict JOB_DIRECTORY` is its last line.

srun ends with the worst code of its tasks, and the tasks of nodes that were given back count: a job that
trained to the end would be called FAILED. What counts is what the coordinator wrote.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from tm_slurm.slurm import SlurmRefused, SlurmUnavailable, connect, environment

VerdictState = Literal["completed", "failed", "requeue"]
_NO_VERDICT_CODE = 1
ENDED_BY_SLURM_S = 60.0


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
    failure = found.get("failure")
    traceback = str(failure.get("traceback", "")) if isinstance(failure, dict) else ""
    return Verdict(state=cast(VerdictState, state), exit_code=code, reason=str(reason), traceback=traceback)


def _look_again(directory: Path) -> None:
    """A network file system may remember for half a minute that a file was not there; when the directory is
    opened it asks its server.
    """
    os.close(os.open(directory, os.O_RDONLY | os.O_DIRECTORY))


def end_by_verdict(job_dir: Path) -> int:
    """Say how the job ended, put it back into the queue if that is the verdict, return the exit code to end
    with.
    """
    try:
        verdict = read_verdict(job_dir, attempt_now())
    except NoVerdict as missing:
        print(f"tm_slurm: {missing}", file=sys.stderr)
        return _NO_VERDICT_CODE
    print(f"tm_slurm: {verdict.state}: {verdict.reason} exit_code={verdict.exit_code}")
    if verdict.traceback:
        print(verdict.traceback)
    if verdict.state == "requeue":
        return _requeue(verdict)
    return verdict.exit_code


def _requeue(verdict: Verdict) -> int:
    job_id = environment.job_id()
    if job_id is None:
        print("tm_slurm: cannot requeue: not in a Slurm job", file=sys.stderr)
        return verdict.exit_code or _NO_VERDICT_CODE
    sys.stdout.flush()
    try:
        connect().requeue(job_id)
    except (SlurmRefused, SlurmUnavailable) as error:
        print(f"tm_slurm: job {job_id} was not requeued: {error}", file=sys.stderr)
        return verdict.exit_code or _NO_VERDICT_CODE
    # Slurm ends this script now. If it ended by itself, and the job started again at once, its exit code
    # would be taken for that of the new start.
    time.sleep(ENDED_BY_SLURM_S)
    return verdict.exit_code


def main(arguments: list[str]) -> int:
    """Run as a program: one argument, the job directory."""
    if len(arguments) != 1:
        print("usage: python -m tm_slurm.submit.verdict JOB_DIRECTORY", file=sys.stderr)
        return 2
    return end_by_verdict(Path(arguments[0]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
