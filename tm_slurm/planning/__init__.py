"""How many standbys a training job should have. Formulas only: no torch, no numpy."""

from __future__ import annotations

from tm_slurm.planning.inputs import ImpossibleInput, Inputs
from tm_slurm.planning.strategies import Strategy, restart, with_standbys

__all__ = ["ImpossibleInput", "Inputs", "Strategy", "restart", "with_standbys"]
