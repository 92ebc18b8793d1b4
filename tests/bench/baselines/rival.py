"""What a rival has to be able to do so that a fault can be put into it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from baselines.site import Site

RANKS = 4
PLANNED, DEATH, POWER_OFF, UNPLUGGED = "planned", "process_death", "power_off", "unplugged"
FAULTS = (PLANNED, DEATH, POWER_OFF, UNPLUGGED)
"""A drained node; SIGKILL to a rank; all processes of a node at once, their connections closed; a node from
which no packet comes any more."""


class Rival(ABC):
    """One way to get over an interruption. Ranks are numbered 0 to RANKS - 1; each is on a node of its own,
    and there is one more node."""

    name: ClassVar[str]
    what: ClassVar[str]
    """in one sentence"""
    tuning: ClassVar[Mapping[str, Any]]
    """every setting that is not the default, and what is arranged in its favour"""
    packages: ClassVar[Sequence[str]] = ("torch",)
    """whose versions matter"""
    ranks_after: ClassVar[int] = RANKS
    """how many ranks it needs to go on"""
    cannot: ClassVar[Mapping[str, str]] = {}
    """fault → why this rival cannot get over it"""

    def __init__(self, site: Site) -> None:
        self.site = site

    @abstractmethod
    def start(self) -> None:
        """Start training, and whatever waits in reserve."""

    @property
    def reserve(self) -> str:
        """The one more node."""
        return self.site.nodes[RANKS]

    def is_ready(self) -> bool:
        """Whether what waits in reserve has nothing left to do."""
        return True

    @abstractmethod
    def leave(self, node: str, rank: int) -> None:
        """Just after a drain of `node`, where `rank` is: what its operator does about it. Returns at once."""

    @abstractmethod
    def lost(self, fault: str, node: str, rank: int) -> None:
        """At the instant of a fault on `node`, where `rank` was: what its operator does, who knows of it."""

    def look_after(self) -> None:
        """Called again and again until training goes on."""
        return

    def why_not(self) -> str | None:
        """Why training will never go on; None as long as it may."""
        return self.site.why_not()


class WithStandby(Rival):
    """One whose standby says in a file that it is ready (`Files.make_standby`)."""

    def is_ready(self) -> bool:
        return self.site.files.is_ready(self.reserve)
