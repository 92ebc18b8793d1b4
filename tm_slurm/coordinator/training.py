"""The training job, as those see it who ask Slurm for further nodes for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tm_slurm.coordinator.allocation import Allocation
from tm_slurm.slurm import Slurm, SlurmRefused, SlurmUnavailable

IS_ENDING = frozenset({"COMPLETING", "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"})
"""Nothing of such a job can come any more."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """The job that standby jobs are for. `attempt`: how often training has been started before; `restarts`:
    how often Slurm has restarted that very job."""

    job_id: int
    attempt: int
    job_dir: Path
    restarts: int
    controller: int | None = None
    """the job of the controller that has asked for it, in launch mode `allocation`"""
    without_script: bool = False
    """whether it is an allocation without a batch script"""

    @classmethod
    def of(cls, job_dir: Path, job_id: int, attempt: int) -> Training:
        """As the job directory tells."""
        allocation = Allocation.read(job_dir)
        if allocation is None:
            return cls(job_id=job_id, attempt=attempt, job_dir=job_dir, restarts=attempt)
        controller = allocation.controller
        known: dict[str, Any] = {"restarts": 0, "controller": controller, "without_script": True}
        return cls(job_id=job_id, attempt=attempt, job_dir=job_dir, **known)

    @property
    def prefix(self) -> str:
        """How the names of its standby jobs begin, whichever attempt they are of."""
        return standby_jobs_of(self.job_id)

    def name_of(self, ask: int) -> str:
        """How the name of the standby job for an ask begins."""
        return f"{self.prefix}{self.attempt}.{ask}."

    @property
    def sweeper(self) -> str:
        """How the name of the job begins that takes its standby jobs out of the queue when it has ended."""
        return f"tm-sweeper-{self.job_id}."


def standby_jobs_of(job_id: int) -> str:
    """How the names of a training job's standby jobs begin."""
    return f"tm-standby-{job_id}."


def has_ended(slurm: Slurm, training: Training) -> bool:
    """Whether the training job is over or has been requeued; False as long as nobody can tell."""
    if training.without_script:
        allocation = Allocation.read(training.job_dir)
        if allocation is not None and allocation.job_id == training.job_id and allocation.given_back:
            return False
    try:
        job = slurm.job(training.job_id)
    except SlurmUnavailable:
        return False
    except SlurmRefused:  # it is over for so long that Slurm knows it no longer
        return True
    return job.is_over or job.state in IS_ENDING or job.restarts != training.restarts
