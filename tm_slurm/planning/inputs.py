"""What a plan is computed from. Times in seconds unless a name says hours."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

HOUR_S = 3600.0
DAY_S = 86400.0
WEEK_H = 168.0


class ImpossibleInput(ValueError):
    """A number that no job can have; the message is one line and names the option."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """One job, its failures, and what each kind of interruption costs it."""

    gpus: int
    """GPUs that train"""
    gpus_per_node: int
    mttf_h: float
    """hours between two failures that stop the job, of all its nodes together"""
    planned_per_day: float
    """drains, maintenance, stragglers: events that are announced"""
    downtime_s: float
    """an unplanned failure, with a standby free: from the fault until training goes on"""
    no_standby_s: float
    """the same when none is free: until another node has come and warmed up"""
    planned_s: float
    """a planned move: how long training pauses"""
    restart_s: float
    """a restart of the whole job from its checkpoint, until the first step begins"""
    checkpoint_interval_s: float
    """training between two checkpoints, where restart is what there is"""
    checkpoint_cost_s: float
    """how long training stands still for writing one"""
    repair_h: float
    """hours until a standby that was used is replaced"""
    price: float
    """of one GPU for one hour"""

    def __post_init__(self) -> None:
        for name in ("gpus", "gpus_per_node", "mttf_h", "repair_h", "checkpoint_interval_s"):
            if not getattr(self, name) > 0:
                raise ImpossibleInput(f"{option(name)}: expected more than 0, found {getattr(self, name):g}")
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < math.inf:
                raise ImpossibleInput(f"{option(field.name)}: expected 0 or more, found {value:g}")
        if self.gpus % self.gpus_per_node:
            raise ImpossibleInput(
                f"--gpus {self.gpus}: expected a multiple of --gpus-per-node {self.gpus_per_node}"
            )
        if self.no_standby_s < self.downtime_s:
            raise ImpossibleInput(
                f"--no-standby {self.no_standby_s:g}: expected at least --downtime, {self.downtime_s:g}: "
                "a failure without a standby cannot be over sooner than one with"
            )

    @property
    def nodes(self) -> int:
        """Nodes that train."""
        return self.gpus // self.gpus_per_node

    @property
    def failures_per_s(self) -> float:
        return 1.0 / (self.mttf_h * HOUR_S)

    @property
    def planned_per_s(self) -> float:
        return self.planned_per_day / DAY_S


_OPTIONS = {
    "mttf_h": "--mttf",
    "planned_per_day": "--planned",
    "downtime_s": "--downtime",
    "no_standby_s": "--no-standby",
    "planned_s": "--planned-downtime",
    "restart_s": "--restart",
    "checkpoint_interval_s": "--checkpoint-interval",
    "checkpoint_cost_s": "--checkpoint-cost",
    "repair_h": "--repair",
}


def option(name: str) -> str:
    """The command line's name of an input."""
    return _OPTIONS.get(name, "--" + name.replace("_", "-"))
