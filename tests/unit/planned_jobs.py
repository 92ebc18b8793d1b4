"""Inputs for plans, and a simulation of what happens to such a job that shares no formula with them."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass
from typing import Any

from tm_slurm.planning import Inputs

HOUR = 3600.0


def inputs(**changes: Any) -> Inputs:
    """A job that is interrupted often, so that a simulation of some thousand hours sees enough."""
    usual: dict[str, Any] = {
        "gpus": 16384,
        "gpus_per_node": 8,
        "mttf_h": 1.8,
        "planned_per_day": 4.0,
        "downtime_s": 60.0,
        "no_standby_s": 900.0,
        "planned_s": 15.0,
        "restart_s": 388.0,
        "checkpoint_interval_s": 600.0,
        "checkpoint_cost_s": 10.0,
        "repair_h": 4.0,
        "price": 2.0,
    }
    return Inputs(**(usual | changes))


@dataclass
class Seen:
    """What a simulation has seen of a job."""

    ettr: float
    waiting_standbys: float
    found_none: float

    def wasted_gpu_h(self, of: Inputs) -> float:
        return 168.0 * (of.gpus * (1.0 - self.ettr) + of.gpus_per_node * self.waiting_standbys)


def simulate_standbys(of: Inputs, standbys: int, *, events: int, seed: int) -> Seen:
    """Event by event: arrivals, a pool with repairs under way, and one clock of when training goes on."""
    chance = random.Random(seed)
    failures, planned = 1.0 / (of.mttf_h * HOUR), of.planned_per_day / (24.0 * HOUR)
    repairs: list[float] = []
    now = stopped = busy_s = 0.0
    goes_on = 0.0
    failed = found_none = 0
    for _ in range(events):
        before, now = now, now + chance.expovariate(failures + planned)
        while repairs and repairs[0] <= now:
            busy_s += (repairs[0] - before) * len(repairs)
            before = heapq.heappop(repairs)
        busy_s += (now - before) * len(repairs)
        has_standby = len(repairs) < standbys
        if has_standby:
            heapq.heappush(repairs, now + chance.expovariate(1.0 / (of.repair_h * HOUR)))
        takes = of.planned_s
        if chance.random() < failures / (failures + planned):
            failed += 1
            found_none += not has_standby
            takes = of.downtime_s if has_standby else of.no_standby_s
        end = max(goes_on, now + takes)
        stopped += end - max(goes_on, now)
        goes_on = end
    return Seen(1.0 - stopped / now, standbys - busy_s / now, found_none / failed)


def simulate_restarts(of: Inputs, *, failures: int, seed: int) -> Seen:
    """From checkpoint to checkpoint; planned events, of which there must be none here, left out."""
    assert of.planned_per_day == 0
    chance = random.Random(seed)
    rate = 1.0 / (of.mttf_h * HOUR)
    lasting, now = 0.0, 0.0
    seen, next_failure = 0, chance.expovariate(rate)
    restarting = False
    while seen < failures:
        takes = of.checkpoint_interval_s + of.checkpoint_cost_s + (of.restart_s if restarting else 0.0)
        if now + takes < next_failure:
            now += takes
            lasting += of.checkpoint_interval_s
            restarting = False
        else:
            now, seen, restarting = next_failure, seen + 1, True
            next_failure = now + chance.expovariate(rate)
    return Seen(lasting / now, 0.0, 0.0)
