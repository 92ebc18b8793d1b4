"""Faults of every kind, injected into a job on the local cluster, each with the instant at which it was."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence

from training_jobs import TrainingJob


def process_death(job: TrainingJob, node: str) -> float:
    """SIGKILL to the rank process of a node. All here answer the wall-clock instant just before the fault."""
    return process_deaths(job, [node])


def process_deaths(job: TrainingJob, nodes: Sequence[str]) -> float:
    """The same to those of several nodes at once."""
    pids = [job.rank_pid(node) for node in nodes]
    at = time.time()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return at


def power_off(job: TrainingJob, node: str) -> float:
    """All processes of the node die at once; their connections are closed."""
    at = time.time()
    job.cluster.power_off(node)
    return at


def unplugged(job: TrainingJob, node: str) -> float:
    """No packet comes from the node any more; all goes on there."""
    at = time.time()
    job.cluster.unplug(node)
    return at


def frozen(job: TrainingJob, node: str) -> float:
    """All processes of the node stop where they are; its kernel still answers."""
    at = time.time()
    job.cluster.freeze(node)
    return at


FAULTS: dict[str, Callable[[TrainingJob, str], float]] = {
    "process_death": process_death,
    "power_off": power_off,
    "unplugged": unplugged,
    "frozen": frozen,
    "leader_node": power_off,
}
