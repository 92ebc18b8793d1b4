"""A step that goes on without the srun that has started it.

srun has nothing to do once all agents are there, and it can do harm: when a node has lost its power and is
back before the job has given it back, srun finds its task missing there and ends the whole step ("io error
and missing step"). A step does not need its srun, and goes on when that is lost with its node; but when one
of srun's two processes ends first, or is asked to end (as in a requeue), it takes the step along. So both are
stopped, and then killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from tm_slurm.slurm import environment

STOPPED_LIMIT_S = 2.0
_LOOK_S = 0.01


def missing_agents(job_dir: Path, nodes: Sequence[str], began: float) -> list[str]:
    """Return those of `nodes` whose agent has not written to its log since `began`: Unix seconds by the clock
    of the directory's file system."""
    logs = job_dir / "logs"
    return [node for node in nodes if not _is_newer(logs / f"agent-{node}.log", began)]


def _is_newer(path: Path, began: float) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_mtime >= began
    return False


def let_go(sruns: Collection[int]) -> None:
    """Kill the processes of one srun, so that its step does not notice."""
    _signal_all(sruns, signal.SIGSTOP)
    deadline = time.monotonic() + STOPPED_LIMIT_S
    while not all(map(_is_stopped, sruns)) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    _signal_all(sruns, signal.SIGKILL)


def _signal_all(pids: Collection[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return _fields(Path(f"/proc/{pid}"))[0] in "TtZX"
    return True


def members_of_group(group: int) -> list[int]:
    """Return the processes of a process group of this machine."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(_fields(process)[2]) == group:
                found.append(int(process.name))
    return found


def _fields(process: Path) -> list[str]:
    """Of its `stat`, what comes after the name: state, parent, group, …"""
    return (process / "stat").read_text().rpartition(")")[2].split()


def step_here(job_id: int) -> str | None:
    """Return the number of the step of which this node's agent of the job is a task, None when there is no
    agent of this user here."""
    wanted = f"{environment.JOB_ID}={job_id}".encode()
    for words in _agent_environments():
        if wanted in words:
            for word in words:
                name, _, value = word.partition(b"=")
                if name == environment.STEP_ID.encode():
                    return value.decode()
    return None


AGENT_MODULES = frozenset({b"tm_slurm.agent", b"submitit.core._submit"})


def runs_agents(process: Path) -> bool:
    """Whether a process, by its folder in /proc, is an agent or starts agents. OSError when it has ended."""
    return not AGENT_MODULES.isdisjoint((process / "cmdline").read_bytes().split(b"\0"))


def _agent_environments() -> Iterator[list[bytes]]:
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "comm").read_text().strip() != "srun" and runs_agents(process):
                yield (process / "environ").read_bytes().split(b"\0")
