"""Ends the step of a job that has its verdict. A batch script starts it before srun (see
tm_slurm.submit.prepare): `python -m tm_slurm.submit.step_watch JOB_DIRECTORY $$ </dev/null & disown`.

srun waits for each task that it has started, and for some in vain: for that of a dead node that the job gave
back before Slurm noticed its death, nobody ever tells srun; an agent that was given up and is stopped does
not end. The job would hold all its nodes although training is over.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

from tm_slurm.submit.verdict import NoVerdict, attempt_now, read_verdict

LOOK_S = 1.0
"""Between two looks for the verdict."""

GRACE_S = 5.0
"""How long srun may take to end by itself once there is a verdict. Its agents end within a second or two."""

_GRACE_LOOK_S = 0.1
_PR_SET_PDEATHSIG = 1
_AGENT_MODULES = frozenset({b"tm_slurm.agent", b"submitit.core._submit"})
"""What the step runs: no other step that the batch script may have started is touched."""


def watch(job_dir: Path, script: int) -> None:
    """Wait for the verdict of this start of the job, then end the srun that the batch script (its pid) still
    waits in. Returns when that is done, or when the batch script has ended.
    """
    attempt = attempt_now()
    while not _has_verdict(job_dir, attempt):
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


def sruns_of(script: int) -> list[int]:
    """Return the processes by which the batch script waits for the agents: its child srun, and srun's own
    child, which has the same name.
    """
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                name, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(")")
                if name == "srun" and _runs_agents(entry):
                    parents[int(entry.name)] = int(rest.split()[1])
    found = [script]
    for above in found:
        found += [pid for pid, parent in parents.items() if parent == above]
    return found[1:]


def _runs_agents(process: Path) -> bool:
    return not _AGENT_MODULES.isdisjoint((process / "cmdline").read_bytes().split(b"\0"))


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
