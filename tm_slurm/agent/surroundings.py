"""What the agent learns from Slurm's environment: who it is, which job this is, who else is there."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tm_slurm.coordinator.journal import history
from tm_slurm.coordinator.refilling import Brought


@dataclass(frozen=True, kw_only=True)
class Standby:
    """What an agent is told that comes with a standby job: which training job that is for (`of`), which start
    of it (`attempt`), and what was asked for there (`ask`)."""

    of: int
    attempt: int
    ask: int


@dataclass(frozen=True)
class Surroundings:
    """`job_id`: the training job. `nodes`: its allocation in Slurm's order. `attempt`: how often Slurm has
    restarted it. `brought`: which standby job this node has come with, and for what."""

    node: str
    job_id: int | None
    nodes: tuple[str, ...]
    attempt: int
    brought: Brought = field(default_factory=dict)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Surroundings:
        """Read SLURM_*; without Slurm this host is the only node."""
        from tm_slurm.slurm import expand

        node = environment.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]
        listed = environment.get("SLURM_JOB_NODELIST") or environment.get("SLURM_NODELIST")
        job_id = environment.get("SLURM_JOB_ID")
        return cls(
            node=node,
            job_id=int(job_id) if job_id else None,
            nodes=tuple(expand(listed)) if listed else (node,),
            attempt=int(environment.get("SLURM_RESTART_COUNT") or 0),
        )

    def with_standby(self, standby: Standby, job_dir: Path) -> Surroundings:
        """The same node as part of the training job that its own job is for. FileNotFoundError when that has
        never been led."""
        _, about = history(job_dir, standby.attempt)
        if about is None:
            raise FileNotFoundError(f"{job_dir}: there is no journal of start {standby.attempt} of the job")
        brought = {"ask": standby.ask, "job": self.job_id or 0}
        return Surroundings(self.node, standby.of, tuple(about["order"]), standby.attempt, brought)
