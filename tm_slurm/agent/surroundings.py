"""What the agent learns from Slurm's environment: who it is, which job this is, who else is there."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Surroundings:
    """`nodes`: the allocation in Slurm's order. `attempt`: how often Slurm has restarted the job."""

    node: str
    job_id: int | None
    nodes: tuple[str, ...]
    attempt: int

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
