"""Finds the rank that is slow: in every step the others wait for it.

All ranks of a job take equally long for a step, since each waits for the slowest. What tells them apart is
the part of it in which none of a rank's collectives is under way: its own work (tm_slurm.runtime tells it
with its heartbeats, if policy.straggler_slower is set). Ranks with the same parameters have the same work;
so each is compared with the median of its replicas, step by step.

    slow      step after step, its own work took more than `slower` longer than theirs: the excess is summed
              up (a cumulative sum, Page 1954), a step in which it is less takes from the sum, and no single
              step counts for more than one that is slower by twice `slower`. With `steps` of these the sum
              is full; a rank that is slower by less fills it later, one that is slower by no more than
              `slower` in the median of the last `steps` never
    not yet   in the first UNSETTLED steps after a start or an interruption
    nobody    a rank without replicas is compared with nobody

Pure: no clock, no network.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Set
from dataclasses import dataclass

UNSETTLED = 5
"""Steps after an interruption that are not judged: they may compile, allocate, or contain the pause."""

KEPT_STEPS = 100
"""So far ranks may be apart in what they have told: one has just reported, another does so soon."""

LEAST_S = 1e-4
"""Own work that is shorter is noise."""


@dataclass(frozen=True)
class Straggler:
    """`ratio`: how many times as long its own work took as that of its replicas, in the median of the last
    `steps`."""

    rank: int
    step: int
    ratio: float


class Stragglers:
    """Of one job. `slower`: 0.1 for 10 %. `replicas`: a rank and those with the same work."""

    def __init__(self, *, slower: float, steps: int, replicas: Callable[[int], Set[int]]) -> None:
        self._limit = math.log(1.0 + slower)
        self._most = math.log(1.0 + 2.0 * slower) - self._limit
        """that a step counts for"""
        self._steps = steps
        self._replicas = replicas
        self._told: dict[int, dict[int, float]] = {}
        """step → rank → seconds of its own work, until all replicas have told"""
        self._sums: dict[int, float] = {}
        self._ratios: dict[int, deque[float]] = {}
        """rank → those of the last steps"""
        self._newest = -1
        self._from: int | None = 0
        """the first step that is judged; None: to be found when one is heard of"""

    def disturbed(self) -> None:
        """Something else explains what steps take now: begin again when it is over."""
        self._told.clear()
        self._sums.clear()
        self._ratios.clear()
        self._newest, self._from = -1, None  # steps may be done again

    def worked(self, rank: int, step: int, seconds: float) -> Straggler | None:
        """A rank's own work in a step; the straggler, if this shows that one is."""
        self._newest = max(self._newest, step)
        if self._from is None:
            self._from = step + UNSETTLED
        if step < self._from:
            return None
        for old in [old for old in self._told if old <= self._newest - KEPT_STEPS]:
            del self._told[old]  # somebody has not told, and will not
        told = self._told.setdefault(step, {})
        told[rank] = seconds
        group = self._replicas(rank)
        if len(group) < 2 or len(told) < len(group) or not group <= told.keys():
            return None
        return self._judge({member: max(told.pop(member), LEAST_S) for member in group}, step)

    def _judge(self, worked: dict[int, float], step: int) -> Straggler | None:
        in_order = sorted(worked.values())
        found: list[Straggler] = []
        for rank, seconds in worked.items():
            ratio = seconds / _median_without(in_order, seconds)
            ratios = self._ratios.setdefault(rank, deque(maxlen=self._steps))
            ratios.append(ratio)
            more = min(max(math.log(ratio) - self._limit, -self._most), self._most)
            self._sums[rank] = max(0.0, self._sums.get(rank, 0.0) + more)
            if self._sums[rank] > (self._steps - 0.5) * self._most:
                middle = statistics.median(ratios)
                if math.log(middle) > self._limit:
                    found.append(Straggler(rank, step, middle))
        return max(found, key=lambda slow: slow.ratio, default=None)


def _median_without(in_order: list[float], one: float) -> float:
    """The median of sorted values, one of them left out."""
    at = in_order.index(one) if len(in_order) < 64 else -1
    if at < 0:  # of so many one makes no difference
        return statistics.median(in_order[len(in_order) // 2 - 1 : len(in_order) // 2 + 1])
    return statistics.median(in_order[:at] + in_order[at + 1 :])
