"""Lets go of srun when all agents are there, or ends it when it is still there at the verdict. A batch
script starts this before srun (see tm_slurm.submit.prepare):
`python -m tm_slurm.submit.step_watch JOB_DIRECTORY $$ </dev/null & disown`.

Once all agents are there, srun is killed so that the step does not notice (tm_slurm.submit.letting_go); the
last line of the script waits for the verdict then (tm_slurm.submit.verdict).

Before, or when some never come, srun waits for each task that it has started, and for some in vain: for
that of a dead node that the job gave back before Slurm noticed its death, nobody ever tells srun; an agent
that was given up and is stopped does not end. The job would hold all its nodes although training is over.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

from tm_slurm.slurm import HostlistError, environment, expand
from tm_slurm.submit.letting_go import let_go, missing_agents, runs_agents, step_here
from tm_slurm.submit.verdict import NoVerdict, attempt_now, let_go_file, read_verdict

LOOK_S = 1.0
"""Between two looks for the verdict."""

GRACE_S = 5.0
"""How long srun may take to end by itself once there is a verdict. Its agents end within a second or two."""

_GRACE_LOOK_S = 0.1
_PR_SET_PDEATHSIG = 1


def watch(job_dir: Path, script: int) -> None:
    """Wait until all agents of this start of the job are there and let go of the srun that the batch script
    (its pid) waits in; or until there is a verdict, and end that srun. Returns when that is done, or when the
    batch script has ended.
    """
    attempt = attempt_now()
    nodes, began = _nodes(), _began(job_dir, attempt)
    while not _has_verdict(job_dir, attempt):
        if nodes and not missing_agents(job_dir, nodes, began) and _let_go(job_dir, attempt, script):
            return
        time.sleep(LOOK_S)
        if os.getppid() != script:
            return
    deadline = time.monotonic() + GRACE_S
    while sruns_of(script) and time.monotonic() < deadline:
        time.sleep(_GRACE_LOOK_S)
    left = sruns_of(script)
    if left and os.getppid() == script:
        print(
            "tm_slurm: the job has its verdict, and srun still waits for tasks: ending srun", file=sys.stderr
        )
        for pid in reversed(left):  # with the first of them ends the script, and this process
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _nodes() -> list[str]:
    with contextlib.suppress(HostlistError):
        return expand(environment.read(environment.JOB_NODES) or "")
    return []


def _began(job_dir: Path, attempt: int) -> float:
    """What is older in the job directory is of an earlier start of the job: its first start makes the
    directory anew."""
    if attempt == 0:
        return 0.0
    with contextlib.suppress(OSError):
        mark = job_dir / f".launch-{attempt}"
        mark.touch()
        return mark.stat().st_mtime
    return time.time()


def _let_go(job_dir: Path, attempt: int, script: int) -> bool:
    """Whether srun is gone now: a step that cannot be found again afterwards is left as it is."""
    job_id, sruns = environment.job_id(), sruns_of(script)
    step = None if job_id is None else step_here(job_id)
    if step is None or not sruns:
        return False
    try:
        let_go_file(job_dir, attempt).write_text(step)
    except OSError as error:
        print(f"tm_slurm: srun is not let go of: {error}", file=sys.stderr)
        return False
    print(f"tm_slurm: {len(_nodes())} agents are there; the step goes on without srun", file=sys.stderr)
    let_go(sruns)
    return True


def sruns_of(script: int) -> list[int]:
    """Return the processes by which the batch script waits for the agents: its child srun, and srun's own
    child, which has the same name. No other step that the script may have started is among them.
    """
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                name, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(")")
                if name == "srun" and runs_agents(entry):
                    parents[int(entry.name)] = int(rest.split()[1])
    found = [script]
    for above in found:
        found += [pid for pid, parent in parents.items() if parent == above]
    return found[1:]


def _has_verdict(job_dir: Path, attempt: int) -> bool:
    try:
        read_verdict(job_dir, attempt)
    except NoVerdict:
        return False
    return True


def _end_with(script: int) -> bool:
    """From now on this process ends when the batch script does, whatever it waits in (Linux, prctl(2)). False
    when that has ended already. Warnings that Slurm sends to all processes of the job are not for it.
    """
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    return os.getppid() == script


def main(arguments: list[str]) -> int:
    """Run as a program: the job directory, and the pid of the batch script, whose child this is."""
    if len(arguments) != 2 or not arguments[1].isdigit():
        print("usage: python -m tm_slurm.submit.step_watch JOB_DIRECTORY PID", file=sys.stderr)
        return 2
    if _end_with(int(arguments[1])):
        watch(Path(arguments[0]), int(arguments[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
