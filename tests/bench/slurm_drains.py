"""An ordinary user's training job on the local cluster whose nodes are drained, one after another, while it
trains: how soon the coordinator knows, how soon Slurm has the node back, and how soon another one is warm in
its place."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ordinary_user import USER, directory_of
from training_jobs import TrainingJob

from tm_slurm.localcluster import LocalCluster

ACTIVE, STANDBYS = 3, 1
STEP_S = 0.05
STEPS = 100_000
"""More than there is time for: the job is cancelled at the end."""


@dataclass
class Drains:
    """Seconds, one entry for each drained node. `known` and `released`: from the administrator's command to
    the coordinator's journal, and until Slurm calls the node DRAINED; `refilled`: from when the node was
    given back until another is warm, `joined` until another has come."""

    known: list[float] = field(default_factory=list)
    released: list[float] = field(default_factory=list)
    joined: list[float] = field(default_factory=list)
    refilled: list[float] = field(default_factory=list)


def measure(cluster: LocalCluster, rounds: int) -> Drains:
    """Drain `rounds` nodes that hold ranks. Polls are a second apart, as configured by default."""
    found = Drains()
    with directory_of(USER) as directory:
        job = _submit(cluster, directory)
        try:
            job.warm(STANDBYS)
            for _ in range(rounds):
                _drain_one(cluster, job, found)
        finally:
            cluster.run(["scancel", str(job.job_id)], timeout_s=20.0)
            cluster.wait_idle(timeout_s=60.0)
    return found


def _submit(cluster: LocalCluster, directory: Path) -> TrainingJob:
    policy: dict[str, Any] = {"refill": True, "poll_interval_s": 1.0, "heartbeat_s": 0.5}
    size = {"nodes": ACTIVE, "standbys": STANDBYS, "steps": STEPS, "pause_s": STEP_S}
    return TrainingJob.submit(cluster, directory, user=USER, policy=policy, **size)


def _drain_one(cluster: LocalCluster, job: TrainingJob, found: Drains) -> None:
    batch_host = job.info().batch_host
    node = next(name for name in job.seats() if name != batch_host)
    before = job.files.notes("refilled")
    called_at = time.time()
    cluster.drain(node, "disk")

    def first(what: str, **fields: Any) -> float:
        def look() -> float | None:
            for entry in job.files.notes(what):
                if entry["at"] >= called_at and all(entry.get(k) == v for k, v in fields.items()):
                    return float(entry["at"])
            return None

        return float(job.until(f"{what} {fields}", job.unless_failed(look)))

    found.known.append(first("event_drain", node=node) - called_at)
    found.released.append(first("drained", node=node) - called_at)
    given_back = first("released", node=node)
    came = job.until("another node", lambda: job.files.notes("refilled")[len(before) :])[0]
    found.joined.append(came["at"] - given_back)
    found.refilled.append(first("warm", node=came["node"]) - given_back)
    cluster.resume(node)
