"""A month of a job with 64K GPUs, event by event: what restarts from checkpoints cost, and what k standbys
do.

Failures come as often as published (tm_slurm/planning/failures.py), planned events four times a day; each
takes what the paper says for the largest size that it has, detection counted. A restart finds another node
free at once; a job with no standby left waits NO_STANDBY_S for one. Nothing here uses the formulas of
tm_slurm.planning, which a test holds against it.
"""

from __future__ import annotations

import heapq
import random
import statistics
from dataclasses import dataclass
from typing import Any

from tm_slurm.planning import Inputs
from tm_slurm.planning.costs import paper_planned, paper_restart, paper_unplanned
from tm_slurm.planning.failures import published_mttf_h

GPUS, GPUS_PER_NODE = 65536, 8
MONTH_S = 30 * 86400.0
HOUR_S = 3600.0
DETECTION_S = 2.0
NO_STANDBY_S = 900.0
"""Until another node has come from the queue and has warmed up."""

REPAIR_H = 12.0
CHECKPOINT_COST_S = 10.0
PLANNED_PER_DAY = 4.0
STANDBYS = (0, 1, 2, 4, 8, 16, 32, 48)
SEEDS = 5


def inputs() -> Inputs:
    """The job. Checkpoints, where restarts are what there is, as often as J. W. Young says."""
    mttf_h = published_mttf_h(GPUS)
    return Inputs(
        gpus=GPUS,
        gpus_per_node=GPUS_PER_NODE,
        mttf_h=mttf_h,
        planned_per_day=PLANNED_PER_DAY,
        downtime_s=paper_unplanned(GPUS, DETECTION_S).seconds,
        no_standby_s=NO_STANDBY_S,
        planned_s=paper_planned(GPUS).seconds,
        restart_s=paper_restart(GPUS).seconds,
        checkpoint_interval_s=(2 * CHECKPOINT_COST_S * mttf_h * HOUR_S) ** 0.5,
        checkpoint_cost_s=CHECKPOINT_COST_S,
        repair_h=REPAIR_H,
        price=0.0,
    )


@dataclass(frozen=True)
class Month:
    """What one month came to."""

    ettr: float
    interruptions: int
    stopped_gpu_h: float
    waiting_gpu_h: float

    @property
    def wasted_gpu_h(self) -> float:
        return self.stopped_gpu_h + self.waiting_gpu_h


def arrivals(of: Inputs, chance: random.Random) -> list[tuple[float, bool]]:
    """When something happens in the month, and whether it is a failure."""
    failures, planned = 1.0 / (of.mttf_h * HOUR_S), of.planned_per_day / 86400.0
    found, now = [], chance.expovariate(failures + planned)
    while now < MONTH_S:
        found.append((now, chance.random() < failures / (failures + planned)))
        now += chance.expovariate(failures + planned)
    return found


def with_standbys(of: Inputs, standbys: int, seed: int) -> Month:
    """Each event takes a standby, if one is free; it is replaced after a repair."""
    chance = random.Random(seed)
    events = arrivals(of, chance)
    back: list[float] = []
    away_s = stopped_s = goes_on = 0.0
    for now, failed in events:
        while back and back[0] <= now:
            heapq.heappop(back)
        has_standby = len(back) < standbys
        if has_standby:
            until = now + chance.expovariate(1.0 / (of.repair_h * HOUR_S))
            heapq.heappush(back, until)
            away_s += min(until, MONTH_S) - now
        takes = of.planned_s if not failed else of.downtime_s if has_standby else of.no_standby_s
        end = min(MONTH_S, max(goes_on, now + takes))
        stopped_s += max(0.0, end - max(goes_on, now))
        goes_on = max(goes_on, end)
    waiting_h = standbys * MONTH_S / HOUR_S - away_s / HOUR_S
    stopped_h = of.gpus * stopped_s / HOUR_S
    return Month(1 - stopped_s / MONTH_S, len(events), stopped_h, of.gpus_per_node * waiting_h)


def with_restarts(of: Inputs, seed: int) -> Month:
    """A failure costs a restart and what was done since the last checkpoint; a planned event a checkpoint
    and a restart."""
    events = arrivals(of, random.Random(seed))
    lasting_s = now = 0.0
    interval, cost = of.checkpoint_interval_s, of.checkpoint_cost_s
    for at, failed in [*events, (MONTH_S, True)]:
        trained_s = max(0.0, at - now)
        whole = int(trained_s / (interval + cost))
        rest_s = trained_s - whole * (interval + cost)
        lasting_s += whole * interval + (0.0 if failed else min(rest_s, interval))
        # an event during a restart begins it again
        now = at + of.restart_s + (0.0 if failed else cost)
    stopped_h = of.gpus * (MONTH_S - lasting_s) / HOUR_S
    return Month(lasting_s / MONTH_S, len(events), stopped_h, 0.0)


def spread(months: list[Month]) -> dict[str, Any]:
    """Means over the seeds, and the least and largest ETTR."""
    return {
        "ettr": statistics.fmean(month.ettr for month in months),
        "ettr_min": min(month.ettr for month in months),
        "ettr_max": max(month.ettr for month in months),
        "interruptions": statistics.fmean(month.interruptions for month in months),
        "stopped_gpu_h": statistics.fmean(month.stopped_gpu_h for month in months),
        "waiting_gpu_h": statistics.fmean(month.waiting_gpu_h for month in months),
        "wasted_gpu_h": statistics.fmean(month.wasted_gpu_h for month in months),
    }


def measure() -> dict[str, Any]:
    """Every strategy over the same months."""
    of = inputs()
    rows: list[dict[str, Any]] = [
        {"strategy": "restart", **spread([with_restarts(of, seed) for seed in range(SEEDS)])}
    ]
    for count in STANDBYS:
        months = [with_standbys(of, count, seed) for seed in range(SEEDS)]
        rows.append({"strategy": f"{count} standbys", **spread(months)})
    for row in rows:
        print(
            f"{row['strategy']:>12}  ETTR {row['ettr']:.4f} ({row['ettr_min']:.4f} to {row['ettr_max']:.4f})"
            f"  wasted {row['wasted_gpu_h']:12,.0f} GPU h",
            flush=True,
        )
    about = {name: getattr(of, name) for name in ("gpus", "mttf_h", "downtime_s", "planned_s", "restart_s")}
    return {"rows": rows, "seeds": SEEDS, **about, "repair_h": REPAIR_H, "no_standby_s": NO_STANDBY_S}
