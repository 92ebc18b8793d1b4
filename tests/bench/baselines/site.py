"""Where a rival runs: nodes of the local cluster, allocated by Slurm, a step of the allocation for each
process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from baselines.run_files import RUN, RunFiles
from tm_slurm.localcluster import LocalCluster

BENCH = Path(__file__).parents[1]
END_LIMIT_S = 15.0
STEP = ("--nodes=1", "--ntasks=1", "--overlap", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--mpi=none")


class Site:
    """One run of one rival. `nodes`: those of the cluster, the first ones for ranks."""

    def __init__(self, cluster: LocalCluster, directory: Path, options: Mapping[str, Any]) -> None:
        self.cluster = cluster
        self.files = RunFiles(directory)
        self.nodes = list(cluster.node_names)
        self.environment = {
            RUN: str(directory),
            "PYTHONPATH": str(BENCH),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
        }
        self._job: str | None = None
        self._launched: list[subprocess.Popen[bytes]] = []
        self._serving: list[subprocess.Popen[bytes]] = []
        (directory / "logs").mkdir(parents=True)
        (directory / "options.json").write_text(json.dumps(options))

    def allocate(self) -> None:
        """All nodes, in one job without a batch script: Slurm can take any of them out."""
        count = len(self.nodes)
        words = ["salloc", "--no-shell", f"--nodes={count}", "--no-kill", "--job-name=bench-baselines"]
        done = self.cluster.run(words, timeout_s=60.0)
        self._job = next(word for word in done.stderr.split() if word.isdigit())

    def launch(self, node: str, *words: str, **environment: str) -> None:
        """Run Python with these words on a node; what it says is in `logs`."""
        assert self._job is not None, "allocate first"
        step = [f"--jobid={self._job}", f"--nodelist={node}", *STEP, f"--output={self.log(node)}"]
        self._launched.append(self._start(["srun", *step, sys.executable, *words], node, environment))

    def serve(self, *words: str, **environment: str) -> None:
        """Run Python with these words on the controller's host, which nothing happens to: a rendezvous store,
        a lighthouse."""
        self._serving.append(self._start([sys.executable, *words], "ctl", environment))

    def _start(
        self, words: Sequence[str], host: str, environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        command, surroundings = self.cluster.command(words, env={**self.environment, **environment})
        with self.log(f"start-{host}").open("ab") as log:
            return subprocess.Popen(
                command,
                env=surroundings,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def why_not(self) -> str | None:
        """Why nothing more will come of this run: more has ended than the one launch that a fault ends."""
        left = sum(launched.poll() is None for launched in self._launched)
        if left >= len(self._launched) - 1:
            return None
        return f"of {len(self._launched)} launches {left} are left"

    def run(self, *words: str, check: bool = True, timeout_s: float = 30.0, **environment: str) -> str:
        """A short command on the controller's host; what it says."""
        surroundings = {**self.environment, **environment}
        return self.cluster.run(words, env=surroundings, check=check, timeout_s=timeout_s).stdout

    def python(self, *words: str, timeout_s: float = 30.0) -> str:
        """The same for Python."""
        return self.run(sys.executable, *words, timeout_s=timeout_s)

    def log(self, host: str) -> Path:
        return self.files.directory / "logs" / f"{host}.log"

    def last_words(self) -> str:
        """The ends of all logs."""
        found = []
        for path in sorted(self.files.directory.glob("logs/*.log")):
            found += [f"--- {path.name}", path.read_text(errors="replace")[-1500:]]
        return "\n".join(found)

    def host_pid(self, process: str) -> int:
        """The number on this machine of a process of the step log ("n3:4711"). LookupError if it is gone."""
        node, _, number = process.partition(":")
        for pid in self.cluster.node_pids(node):
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                    if line.startswith("NSpid:") and line.split()[-1] == number:
                        return pid
        raise LookupError(f"no process {number} on {node}")

    def end(self) -> None:
        """End all that was started here, and put the cluster back in order."""
        if self._job is not None:
            self.cluster.run(["scancel", self._job], check=False)
        started_here = [*self._launched, *self._serving]
        for started in started_here:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGTERM)
        for started in started_here:
            try:
                started.wait(END_LIMIT_S)
            except subprocess.TimeoutExpired:
                os.killpg(started.pid, signal.SIGKILL)
                started.wait(END_LIMIT_S)
        self.cluster.reset()
