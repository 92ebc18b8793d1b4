"""A job's coordinator without agents or ranks: the real leader, which hears what root's programs tell it.

As a program: `python event_receiver.py UID JOB_DIR JOB_ID NODE…`, on the host of the cluster's controller.
"""

from __future__ import annotations

import asyncio
import contextlib
import encodings.idna  # noqa: F401  (resolves names; a user may not read it later)
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from waiting import until

from tm_slurm.coordinator.election import Candidate, LeaderFile, LeaderWatch
from tm_slurm.coordinator.leader import Leader, Limits
from tm_slurm.coordinator.model import Plan
from tm_slurm.localcluster import LocalCluster

LIMITS = Limits(poll_interval_s=1.0, heartbeat_s=0.5, start_timeout_s=600.0, reconnect_s=2.0)
LEASE_S = 60.0
HERE = Path(__file__)


class Receiver:
    """The process, seen from the test."""

    def __init__(self, process: subprocess.Popen[bytes], job_dir: Path) -> None:
        self.process = process
        self.job_dir = job_dir

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        """What the coordinator has taken, in order: each with `at`, when it was journalled (Unix seconds)."""
        found = []
        with contextlib.suppress(FileNotFoundError):
            for line in (self.job_dir / "timeline.jsonl").read_text().splitlines():
                entry = json.loads(line)
                if entry["what"].startswith("event_") and kind in (None, entry["what"][len("event_") :]):
                    found.append(entry)
        return found

    def await_event(self, kind: str, source: str | None = None, timeout_s: float = 10.0) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            return next((e for e in self.events(kind) if source in (None, e["source"])), None)

        found = until(look, timeout_s=timeout_s)
        assert found is not None
        return found

    def counts(self) -> dict[str, int]:
        """How many frames were accepted, known already, or refused: as the status file says, twice a
        second."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            return dict(json.loads((self.job_dir / "status.json").read_text())["signed_events"])
        return {}

    def await_count(self, what: str, least: int = 1, timeout_s: float = 10.0) -> None:
        until(lambda: self.counts().get(what, 0) >= least, timeout_s=timeout_s)

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)


def make_job_dir(path: Path, uid: int = 0) -> Path:
    """A job directory as tm_slurm makes it, with what matters here."""
    path.mkdir(mode=0o700)
    secret = path / "secret"
    secret.touch(mode=0o600)
    secret.write_bytes(secrets.token_bytes(32))
    for owned in (path, secret):
        os.chown(owned, uid, uid)
    return path


@contextlib.contextmanager
def receiver(cluster: LocalCluster, job_dir: Path, job_id: int, uid: int = 0) -> Iterator[Receiver]:
    """A coordinator that leads, until the end of the block; of the user `uid`."""
    command, environment = cluster.command(
        [sys.executable, str(HERE), str(uid), str(job_dir), str(job_id), *cluster.node_names],
        env={"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with (job_dir.parent / f"{job_dir.name}.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:

        def leads() -> bool:
            assert process.poll() is None, Path(log.name).read_text()
            found = LeaderFile.read(job_dir)
            return found is not None and found.port != 0

        until(leads, timeout_s=60.0)
        yield Receiver(process, job_dir)
    finally:
        process.kill()
        process.wait(10)


@contextlib.contextmanager
def allocation(cluster: LocalCluster, *options: str, user: str | None = None) -> Iterator[int]:
    """Nodes to start steps on, one after the other: the job's id."""
    name = f"alloc{time.monotonic_ns()}"
    cluster.run(["salloc", "--no-shell", f"--job-name={name}", *options], user=user)
    job_id = int(cluster.run(["squeue", "--noheader", f"--name={name}", "--format=%A"]).stdout)
    try:
        yield job_id
    finally:
        cluster.run(["scancel", str(job_id)], check=False)


async def _lead(job_dir: Path, job_id: int, nodes: list[str]) -> None:
    leadership = Candidate(LeaderWatch(job_dir, 0, LEASE_S), node=nodes[-1], host="ctl").claim()
    assert leadership is not None, "somebody else leads in this directory"
    plan = Plan(nodes, None, len(nodes), 1)
    leader = Leader(
        job_id=job_id,
        node=nodes[-1],
        host="ctl",
        plan=plan,
        leadership=leadership,
        secret=(job_dir / "secret").read_bytes(),
        slurm=None,
        limits=LIMITS,
    )
    await leader.lead()


if __name__ == "__main__":
    os.setgid(int(sys.argv[1]))  # not before: a user may not be let in where our interpreter is
    os.setuid(int(sys.argv[1]))
    asyncio.run(_lead(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]))
