"""Time that nobody sets: no decision depends on whether the wall clocks of two machines agree."""

from __future__ import annotations

import time

_ELAPSED = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

IN_STEP_S = 1.0
"""A wall clock that is no further from the job's time tells it better than what was counted."""


def elapsed_s() -> float:
    """Seconds on this machine's own clock. It also runs while the machine sleeps, where the kernel counts
    that."""
    return time.clock_gettime(_ELAPSED)


class JobClock:
    """The time `at` of the decisions' inputs, in seconds: the wall clock of the job's first leader, which
    each later leader carries on.

    So a deadline that the leader before has begun does not pass at once, nor stand still, because the next
    one's wall clock is set otherwise.
    """

    def __init__(self, counted: float | None) -> None:
        """`counted`: the job's time now, as this process has counted it since an earlier leader told it; None
        when there was none."""
        wall = time.time()
        now = wall if counted is None or abs(wall - counted) <= IN_STEP_S else counted
        self._offset = now - elapsed_s()

    def now(self) -> float:
        return self._offset + elapsed_s()
