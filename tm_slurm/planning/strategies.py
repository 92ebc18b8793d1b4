"""What a job gets done, and what it wastes: with restarts from checkpoints, and with k standbys.

Failures and planned events are independent Poisson processes, of rates l = 1/MTTF and m.

**With k standbys.** A failure stops training for D1 seconds if a standby is free and for D0 seconds if none
is; a planned event for Dp. Training goes on when all of them are dealt with, so at a random instant it runs
if no failure has come in the last D1 seconds, none has found the pool empty in the D0 - D1 seconds before
those, and no planned event has come in the last Dp. The three are independent (Poisson arrivals in disjoint
times; exactly so while Dp is no more than D1):

    ETTR(k) = exp(-l·D1) · V(k; D0 - D1) · exp(-m·Dp)        V: tm_slurm.planning.pool.all_found_one

For k = 0 this is exp(-l·D0 - m·Dp). Nothing is redone: the state comes from replicas (paper, section 7).

**With restarts.** Each one takes R and begins anew if a failure comes meanwhile; what was done since the last
checkpoint, written every t seconds of training at a cost of c, is lost. Then t seconds of work take
(1/l)·exp(l·R)·(exp(l·(t + c)) - 1) (J. T. Daly, "A higher order estimate of the optimum checkpoint interval
for restart dumps", Future Generation Computer Systems 22, 2006). A planned event writes a checkpoint first,
and loses nothing:

    ETTR = t·l / (exp(l·R)·(exp(l·(t + c)) - 1)) · exp(-m·(R + c))

The usual interval is J. W. Young's, t = sqrt(2·c·MTTF) (CACM 17(9), 1974).

**Wasted GPU hours a week**, G GPUs in nodes of g, b of k standbys being replaced on average:

    168 · (G·(1 - ETTR) + g·(k - b))

A standby that waits is wasted whole; a node that is away for repair is nobody's waste, as in every strategy.
Not in it: checkpoints that a job with standbys writes as well, and the wait for Slurm to start a job.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tm_slurm.planning.inputs import HOUR_S, WEEK_H, Inputs
from tm_slurm.planning.pool import all_found_one, busy_on_average, none_free


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """What one way of dealing with interruptions comes to."""

    standbys: int | None
    """None: restarts"""
    ettr: float
    """effective training time ratio, 0 to 1"""
    stopped_gpu_h: float
    """GPU hours a week that were paid for and in which nothing lasting was computed"""
    waiting_gpu_h: float
    """GPU hours a week of standbys that wait"""
    none_free: float | None
    """share of failures that find no standby"""
    cost_week: float

    @property
    def wasted_gpu_h(self) -> float:
        """A week."""
        return self.stopped_gpu_h + self.waiting_gpu_h


def restart(inputs: Inputs) -> Strategy:
    """Every interruption is a restart of the whole job."""
    rate, interval = inputs.failures_per_s, inputs.checkpoint_interval_s
    planned = math.exp(-inputs.planned_per_s * (inputs.restart_s + inputs.checkpoint_cost_s))
    try:
        spent = math.exp(rate * inputs.restart_s) * math.expm1(rate * (interval + inputs.checkpoint_cost_s))
        ettr = interval * rate / spent * planned
    except OverflowError:  # failures come so fast that no interval is ever finished
        ettr = 0.0
    return _strategy(inputs, None, ettr, waiting=0.0, blocked=None)


def with_standbys(inputs: Inputs, standbys: int) -> Strategy:
    """Interruptions are moves to one of `standbys` nodes in reserve (0: to a node that has to come first)."""
    failures, planned = inputs.failures_per_s, inputs.planned_per_s
    events, repair_s = failures + planned, inputs.repair_h * HOUR_S
    found = all_found_one(
        standbys,
        failures_per_s=failures,
        events_per_s=events,
        repair_s=repair_s,
        window_s=inputs.no_standby_s - inputs.downtime_s,
    )
    ettr = math.exp(-failures * inputs.downtime_s - planned * inputs.planned_s) * found
    waiting = standbys - busy_on_average(standbys, events * repair_s)
    return _strategy(inputs, standbys, ettr, waiting=waiting, blocked=none_free(standbys, events * repair_s))


def _strategy(
    inputs: Inputs, standbys: int | None, ettr: float, *, waiting: float, blocked: float | None
) -> Strategy:
    stopped = WEEK_H * inputs.gpus * (1.0 - ettr)
    idle = WEEK_H * inputs.gpus_per_node * waiting
    return Strategy(
        standbys=standbys,
        ettr=ettr,
        stopped_gpu_h=stopped,
        waiting_gpu_h=idle,
        none_free=blocked,
        cost_week=(stopped + idle) * inputs.price,
    )
