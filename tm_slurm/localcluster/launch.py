"""Starting daemons that outlive us: never our children (no zombies), their identity known from the start."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tm_slurm.localcluster.errors import LocalClusterError
from tm_slurm.localcluster.layout import Layout
from tm_slurm.localcluster.processes import ProcessId
from tm_slurm.localcluster.requirements import program, search_path

MARK = "TM_SLURM_LOCAL_CLUSTER"
"""Environment variable with the cluster's directory in everything that the cluster starts."""

_TIMEOUT_S = 10.0
_NEVER = -1
"""A start time that no process has."""
# `read` is the shell's own, so /proc/self is the shell, and the number is that of our process namespace.
_SELF = "read -r pid rest </proc/self/stat"
_EXEC = _SELF + '; echo "$pid"; exec "$@" >>"$0" 2>&1'
# Closes our pipes only when all is set up, so that we read what went wrong. A shell that waits reaps the
# orphans of a process namespace, whose first process it is.
_HOLD = """
set -e
{self}
{script}
echo "$pid"
exec >/dev/null 2>&1
set +e
trap "" HUP INT TERM
while :; do sleep 86400 & wait; done
"""


def daemon_environment(layout: Layout) -> dict[str, str]:
    """A small environment of its own: nothing of the caller's shell reaches a daemon."""
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "TZ") if name in os.environ}
    return {
        **kept,
        "PATH": search_path(),
        "LC_ALL": "C.UTF-8",
        "SLURM_CONF": str(layout.slurm_conf),
        MARK: str(layout.directory),
    }


def detach(command: Sequence[str], *, layout: Layout, log: Path, prefix: Sequence[str] = ()) -> ProcessId:
    """Starts a program in a session of its own, output appended to a log; `prefix` enters other surroundings.

    Raises:
        LocalClusterError: it could not be started.
    """
    return announce(
        [*prefix, program("setsid"), "--fork", "sh", "-c", _EXEC, str(log), *command],
        daemon_environment(layout),
        shown=Path(command[0]).name,
    )


def host_process(command: Sequence[str], script: str, arguments: Sequence[str], layout: Layout) -> ProcessId:
    """Starts a shell as the first process of a host.

    `command` makes its namespaces, `script` sets it up from inside.
    """
    body = _HOLD.format(self=_SELF, script=script)
    return announce(
        [*command, program("setsid"), "--fork", "sh", "-c", body, *arguments],
        daemon_environment(layout),
        shown=f"host {arguments[1]}",
    )


def announce(command: Sequence[str], environment: Mapping[str, str], *, shown: str) -> ProcessId:
    """Runs a command whose detached child says its process number and lets go of our pipes.

    The identity may be that of a process that has ended already. `shown` names the child for people.
    """
    done = finish(command, environment)
    if done.returncode != 0 or not done.stdout.strip().isdigit():
        said = (done.stderr.strip().splitlines() or ["it ended at once"])[-1]
        raise LocalClusterError(f"could not start {shown}: {said}")
    pid = int(done.stdout)
    return ProcessId.of(pid) or ProcessId(pid, _NEVER)


def finish(
    command: Sequence[str], environment: Mapping[str, str] | None = None, *, stdin: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a short command to its end and returns whatever came of it.

    Raises:
        LocalClusterError: it took over 10 s.
    """
    try:
        return subprocess.run(
            list(command),
            env=dict(environment)
            if environment is not None
            else {"PATH": search_path(), "LC_ALL": "C.UTF-8"},
            input=stdin if stdin is not None else "",
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        raise LocalClusterError(f"`{' '.join(command)}` took over {_TIMEOUT_S:g} s") from None
