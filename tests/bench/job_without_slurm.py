"""A job of real agents and rank processes on this machine, without Slurm: all nodes are this one, and listen
on loopback."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tm_slurm.cli.jobs import ask_leader
from tm_slurm.config import load
from tm_slurm.localcluster.processes import environment_of
from tm_slurm.observe.follow import JobFiles
from tm_slurm.submit.job_dir import prepare_job_dir

LOOK_S = 0.02
LIMIT_S = 120.0
END_S = 10.0


class JobWithoutSlurm:
    """From the start of its agents to `end`; a context, too. `settings` are keys of the config with __ for
    the dot, as in job__nodes=4. AssertionError when what is awaited does not come within LIMIT_S."""

    def __init__(self, config: Path, directory: Path, **settings: Any) -> None:
        overrides = {key.replace("__", "."): value for key, value in settings.items()}
        asked = load(config, {**overrides, "job.directory": str(directory)})
        self.files = JobFiles(prepare_job_dir(asked, None))
        self.nodes = [f"n{number}" for number in range(1, asked.job.nodes + asked.job.standbys + 1)]
        self._said = directory.with_name(f"{directory.name}.log").open("wb")
        self._agents = [self._agent(node) for node in self.nodes]
        self._requests = 0

    def _agent(self, node: str) -> subprocess.Popen[bytes]:
        slurm = {"SLURMD_NODENAME": node, "SLURM_JOB_NODELIST": ",".join(self.nodes)}
        rest = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
        words = [sys.executable, "-m", "tm_slurm.agent", "--job-dir", str(self.files.job_dir)]
        return subprocess.Popen(words, env={**rest, **slurm}, stdout=self._said, stderr=self._said)

    def __enter__(self) -> JobWithoutSlurm:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End all agents; they end their ranks."""
        for agent in self._agents:
            with contextlib.suppress(ProcessLookupError):
                agent.terminate()
        for agent in self._agents:
            try:
                agent.wait(END_S)
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait()
        self._said.close()

    def until(self, what: str, test: Callable[[], Any]) -> Any:
        """The first true value of `test`."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            if found := test():
                return found
            verdict = self.files.verdict()
            if verdict is not None and verdict["state"] == "failed":
                raise AssertionError(f"in vain, the job has failed ({what}): {verdict['reason']}")
            time.sleep(LOOK_S)
        raise AssertionError(f"not within {LIMIT_S:.0f} s: {what}; {self.files.timeline()[-5:]}")

    def at_step(self, step: int) -> None:
        self.until(f"step {step}", lambda: self.last_step() >= step)

    def last_step(self) -> int:
        steps = self.files.steps()
        return int(steps[-1]["step"]) if steps else 0

    def calm(self) -> dict[str, Any]:
        """The status once no move is in flight, all ranks are at a step and all that stand by are warm."""
        return dict(self.until("warm standbys and no move", self._calm))

    def _calm(self) -> dict[str, Any] | None:
        status = self.files.status()
        if status is None or status["move"] is not None:
            return None
        ready = [node["warm"] for node in status["nodes"] if node["standing"] == "standby"]
        standing = all(rank["step"] is not None for rank in status["ranks"])
        return (
            status
            if standing and all(ready) and len(ready) + len(status["ranks"]) == len(self.nodes)
            else None
        )

    def rank_pid(self, node: str) -> int:
        """The rank process of a node, which has one rank."""
        agent = self._agents[self.nodes.index(node)].pid
        mine = f"TM_SLURM_JOB_DIR={self.files.job_dir}"
        children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
        found = [int(pid) for pid in children if mine in environment_of(int(pid))]
        if len(found) != 1:
            raise AssertionError(f"expected one rank process on {node}, found {found}")
        return found[0]

    def move_away(self, node: str) -> None:
        """Ask for it, as `tm-slurm migrate` does."""
        self._requests += 1
        event = {"id": f"request:{node}:{self._requests}", "kind": "request", "node": node, "source": "user"}
        answer = ask_leader(
            self.files.job_dir,
            {"kind": "event", "event": {**event, "reason": "a benchmark", "at": time.time()}},
        )
        if "error" in answer:
            raise AssertionError(f"{node} is not left: {answer['error']}")
