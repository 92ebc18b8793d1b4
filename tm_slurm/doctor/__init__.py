"""What a cluster lacks for tm_slurm, found before a job does: one small function a check."""

from __future__ import annotations

from tm_slurm.doctor.finding import Finding

__all__ = ["Finding"]
