"""Jobs for the tests against real daemons: submitted as a user does, watched through what the job writes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tm_slurm.localcluster import LocalCluster
from tm_slurm.localcluster.processes import command_name, environment_of
from tm_slurm.observe.follow import JobFiles
from tm_slurm.slurm import JobInfo
from tm_slurm.slurm.interface import REQUEUE_PAUSE_S
from tm_slurm.slurm.scontrol_text import parse_jobs

LOOK_S = 0.03
LIMIT_S = 90.0
AFTERWORD_S = 3.0
"""What is awaited of a job may still come so long after it has failed."""

ASK_AGAIN_S = 5.0
ORDER_S = 3.0
"""An order and what it answers take no longer, unless the machine is starved."""

SHOWN = {"JobState", "Reason", "Restarts", "StartTime", "EligibleTime", "NodeList", "BatchHost", "ExitCode"}
SCRIPT = Path(__file__).with_name("tiny_training.py")
TM_SLURM = str(Path(sys.executable).with_name("tm-slurm"))


def until(what: str, test: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
    """The first true value of `test`; AssertionError saying what was awaited."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        value = test()
        if value:
            return value
        time.sleep(LOOK_S)
    raise AssertionError(f"not within {limit_s:.0f} s: {what}")


def config_text(directory: Path, **settings: Any) -> str:
    """A config for the tiny training; `settings` are job.* keys, but for steps, its options and `policy`."""
    steps = settings.pop("steps", 60)
    options = {key: settings.pop(key, default) for key, default in OPTIONS.items()}
    script = str(settings.pop("script", SCRIPT))
    # a starved machine must not be taken for a dead one
    policy = {"heartbeat_s": 0.1, "poll_interval_s": 0.5, "keepalive_s": 5.0, **settings.pop("policy", {})}
    job = {"name": "tiny", "nodes": 2, "standbys": 2, "directory": str(directory / "%j"), **settings}
    train = {"script": script, "steps": steps, "options": options}
    return json.dumps({"job": job, "train": train, "policy": policy})  # JSON is YAML


def parent_of(pid: int) -> int:
    """OSError when the process has ended."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


AGENTS = {b"submitit.core._submit", b"tm_slurm.agent"}
"""The modules that an agent is started as."""

OPTIONS: dict[str, Any] = {
    "gates": [],
    "crash_at": None,
    "hang_at": None,
    "die_at": None,
    "nan_at": None,
    "slow_at": None,
    "busy": 0,
    "pause_s": 0.0,
    "sharded": False,
    "keep": False,
    "stages": 1,
}
"""What the tiny and the staged training understand, and their defaults."""


def gates_of_a_move(first: int) -> list[int]:
    """The steps with a gate that `TrainingJob.pass_gates` passes. One boundary is enough for preparing a move
    unless the order for it is late; then it is the next one."""
    return list(range(first, first + 5))


class TrainingJob:
    """One submitted job."""

    def __init__(self, cluster: LocalCluster, job_id: int, job_dir: Path) -> None:
        self.cluster = cluster
        self.job_id = job_id
        self.files = JobFiles(job_dir)

    @classmethod
    def submit(
        cls, cluster: LocalCluster, directory: Path, *, user: str | None = None, **settings: Any
    ) -> TrainingJob:
        config = directory / "config.yaml"
        config.write_text(config_text(directory, **settings))
        return cls.submit_config(cluster, config, user=user)

    @classmethod
    def submit_config(
        cls, cluster: LocalCluster, config: Path, *, user: str | None = None, **settings: Any
    ) -> TrainingJob:
        """Any config; `settings` are keys of it with __ for the dot, as in job__nodes=4."""
        words = [f"--set={key.replace('__', '.')}={value}" for key, value in settings.items()]
        command = [TM_SLURM, "submit", str(config), "--json", *words]
        done = cluster.run(command, user=user, cwd=config.parent, timeout_s=60.0)
        answer = json.loads(done.stdout)
        return cls(cluster, int(answer["job_id"]), Path(answer["job_dir"]))

    def tm_slurm(self, *words: str) -> subprocess.CompletedProcess[str]:
        """The command line, as the user of this job, in a terminal wide enough to break no sentence."""
        env = {"COLUMNS": "200"}
        return self.cluster.run([TM_SLURM, *words], env=env, timeout_s=30.0, check=False)

    def note(self, what: str, **fields: Any) -> dict[str, Any]:
        """Wait for an entry of the timeline that has these fields."""

        def find() -> dict[str, Any] | None:
            for entry in self.files.notes(what):
                if all(entry.get(key) == value for key, value in fields.items()):
                    return entry
            return None

        return self.until(f"{what} {fields}", self.unless_failed(find))

    def unless_failed(self, test: Callable[[], Any]) -> Callable[[], Any]:
        """The same question, which is not asked any more when the job has failed."""
        failed_at: list[float] = []

        def ask() -> Any:
            verdict = self.files.verdict()
            found = test()
            if found or verdict is None or verdict["state"] != "failed":
                return found
            failed_at.append(time.monotonic())
            if failed_at[-1] - failed_at[0] > AFTERWORD_S:
                raise AssertionError(f"in vain, the job has failed: {verdict['reason']}")
            return None

        return ask

    def until(self, what: str, test: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
        """As `until` alone, and what has happened so far when it fails."""
        try:
            return until(what, test, limit_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.story()}") from None

    def at_step(self, step: int) -> None:
        self.until(
            f"step {step}", self.unless_failed(lambda: any(s["step"] >= step for s in self.files.steps()))
        )

    def open_gate(self, step: int) -> None:
        (self.files.job_dir / f"gate-{step}").touch()

    def let_prepare(self, first: int, moves: int = 1) -> None:
        """With gates at `gates_of_a_move(first)`: let a move that was noticed be prepared, at one of the
        boundaries between them; the switch needs another one."""

        def prepared() -> bool:
            return len(self.files.notes("prepared")) >= moves

        self.at_step(first - 1)  # ranks that are slow to begin would pass all gates in a moment
        for step in gates_of_a_move(first)[:-1]:
            self.open_gate(step)
            with contextlib.suppress(AssertionError):  # the order for it came after that boundary
                until("the move is prepared", prepared, ORDER_S)
                return
        self.until("the move is prepared", prepared)

    def pass_gates(self, first: int, moves: int = 1) -> None:
        """With gates at `gates_of_a_move(first)`: let a move that was noticed be prepared, and done."""
        self.let_prepare(first, moves)
        for step in gates_of_a_move(first):
            self.open_gate(step)

    def warm(self, count: int) -> None:
        """Wait until so many standbys are warm."""

        def warm() -> bool:
            return len({entry["node"] for entry in self.files.notes("warm")}) >= count

        self.until(f"{count} warm standbys", self.unless_failed(warm))

    def rank_pids(self, node: str, slot: int = 0) -> set[int]:
        """The rank process in a slot of a node and those that it has started, which have its environment."""
        mine = {f"TM_SLURM_JOB_DIR={self.files.job_dir}", f"TM_SLURM_SLOT={slot}"}
        return {pid for pid in self.cluster.node_pids(node) if mine <= environment_of(pid)}

    def rank_pid(self, node: str, slot: int = 0) -> int:
        """The rank process in a slot of a node; AssertionError when there is none."""
        pids = self.rank_pids(node, slot)
        for pid in pids:
            with contextlib.suppress(OSError):
                if parent_of(pid) not in pids:
                    return pid
        raise AssertionError(f"no rank process in slot {slot} of {node}")

    def agent_pid(self, node: str) -> int:
        """The agent of a node; AssertionError when there is none."""
        for pid in self.cluster.node_pids(node):
            if command_name(pid).startswith("python") and f"SLURM_JOB_ID={self.job_id}" in environment_of(
                pid
            ):
                with contextlib.suppress(OSError):
                    if AGENTS & set(Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")):
                        return pid
        raise AssertionError(f"no agent on {node}")

    def kill_rank(self, node: str, slot: int = 0) -> None:
        """SIGKILL to the rank process in a slot of a node."""
        os.kill(self.rank_pid(node, slot), signal.SIGKILL)

    def runs_again(self, starts: int = 2) -> None:
        """Wait until a requeued job leads itself for the time `starts`. Slurm lets it wait for two minutes
        from when its last process has ended. It is asked not to, again and again, since that may be after the
        first time; but not so often that its start is always put off to the present."""
        asked_at = time.monotonic()  # the first time when the old start has been cleared away

        def leads() -> bool:
            nonlocal asked_at
            if time.monotonic() - asked_at > ASK_AGAIN_S and self.info().state == "PENDING":
                asked_at = time.monotonic()
                soon = f"StartTime=now+{REQUEUE_PAUSE_S}seconds"
                ask = ["scontrol", "update", f"JobId={self.job_id}", soon]
                self.cluster.run(ask, timeout_s=10.0, check=False)
            return len(self.files.notes("leads")) >= starts

        self.until("the job runs again", leads, 170.0)

    def seats(self) -> list[str]:
        """The node of each rank now."""
        status = self.until("a status", self.files.status)
        return [str(rank["node"]) for rank in status["ranks"]]

    def active_nodes(self) -> list[str]:
        """The nodes that had ranks at the start, in rank order of their names."""
        return list(self.note("started")["nodes"])

    def standing(self, node: str) -> str:
        status = self.files.status() or {"nodes": []}
        return next((str(n["standing"]) for n in status["nodes"] if n["node"] == node), "?")

    def finish(self, limit_s: float = LIMIT_S) -> list[str]:
        """Wait for the end, which must be a good one; the digest of every rank."""
        verdict = self.until("the job's verdict", self.files.verdict, limit_s)
        assert verdict["state"] == "completed", f"{verdict}\n{self.story()}"
        self.until("Slurm calls the job COMPLETED", lambda: self.info().state == "COMPLETED", 20.0)
        return [str(d) for d in self.files.notes("trained")[-1]["digests"]]

    def info(self) -> JobInfo:
        return parse_jobs(
            self.cluster.run(["scontrol", "-o", "show", "job", str(self.job_id)], timeout_s=10.0).stdout
        )[0]

    def story(self) -> str:
        """What a failed test shows: the timeline and the ends of the logs."""
        show = ["scontrol", "-o", "show", "job", str(self.job_id)]
        shown = self.cluster.run(show, timeout_s=10.0, check=False).stdout.split()
        lines = [" ".join(word for word in shown if word.split("=")[0] in SHOWN)]
        lines += [json.dumps(entry) for entry in self.files.timeline()[-25:]]
        for path in sorted((self.files.job_dir / "logs").glob("*.log"), key=lambda p: p.stat().st_mtime)[-8:]:
            lines += [f"--- {path.name}", path.read_text(errors="replace")[-1500:]]
        return "\n".join(lines)
