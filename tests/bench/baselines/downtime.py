"""What an interruption has cost, from the step log alone: for every rival by the same arithmetic.

*Unplanned*: from the instant of the fault until the slowest rank has done a new step, less a steady one
(bench_downtime's definition). *Planned*: the longest that a rank was between the last step that the leaver's
process did and its first new one, less a steady one (`tm_slurm.observe.record`). New is a step that nobody
had done before: what is done again after a checkpoint does not count.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from growth_figures import spread

from baselines.steps import Step

STEADY_STEPS = 40
"""Steps before the fault whose median is the steady one; those at the very beginning of a job are slower."""


@dataclass(frozen=True)
class Cost:
    """Seconds. `first_new_step`: its number; `redone_steps`: those done a second time by some rank before it.
    `steady_step_s` has been taken off; `step_spread_s`: how much such steps differ, between the quartiles of
    their times."""

    downtime_s: float
    steady_step_s: float
    step_spread_s: float
    first_new_step: int
    redone_steps: int


def process_of(steps: Iterable[Step], rank: int, until: float | None = None) -> str | None:
    """The process that did the last step of `rank` (up to an instant); None before its first one."""
    mine = [each for each in steps if each.rank == rank and (until is None or each.at <= until)]
    return max(mine).process if mine else None


def steady_steps_s(steps: Iterable[Step], until: float) -> list[float]:
    """The times between two steps, one after the other, of the same process: of the last ones of each rank up
    to an instant. ValueError when there are none."""
    gaps: list[float] = []
    known = sorted(each for each in steps if each.at <= until)
    for rank in sorted({each.rank for each in known}):
        mine = [each for each in known if each.rank == rank and each.process == process_of(known, rank)]
        pairs = itertools.pairwise(mine[-STEADY_STEPS - 1 :])
        gaps += [late.at - early.at for early, late in pairs if late.step == early.step + 1]
    if not gaps:
        raise ValueError("no two steps, one after the other, before the fault")
    return gaps


def unplanned(steps: Sequence[Step], *, at: float, victim: str, ranks: int) -> Cost | None:
    """The cost of a fault that ended the process `victim` at the instant `at`, once `ranks` ranks have done a
    new step; None before that."""
    first = max((each.step for each in steps if each.at <= at), default=-1) + 1
    ends = _first_new(steps, first, after=at, without=victim)
    if len(ends) < ranks:
        return None
    end = sorted(ends.values())[ranks - 1]
    return _cost(end - at, steady_steps_s(steps, at), first, _redone(steps, first, at, victim))


def planned(steps: Sequence[Step], *, leaver: str, noticed_at: float, ranks: int) -> Cost | None:
    """The cost of having the process `leaver` go, once `ranks` ranks have done a new step without it; None
    before that. `noticed_at`: when it was asked to; steps up to then are steady ones."""
    last = max(each for each in steps if each.process == leaver)
    first = last.step + 1
    before = _last_done(steps, last)
    ends = _first_new(steps, first, after=last.at, without=leaver)
    gaps = sorted(ends[rank] - before[rank] for rank in ends if rank in before)
    if len(gaps) < ranks:
        return None
    steady_s = steady_steps_s(steps, noticed_at)
    return _cost(gaps[ranks - 1], steady_s, first, _redone(steps, first, last.at, leaver))


def _cost(gap_s: float, steady_s: Sequence[float], first: int, redone: int) -> Cost:
    steady = statistics.median(steady_s)
    return Cost(gap_s - steady, steady, spread(steady_s), first, redone)


def _last_done(steps: Sequence[Step], last: Step) -> dict[int, float]:
    """rank → when it had done the leaver's last step (or the last one before that), for the first time: it
    may have been a moment later than the leaver, and it may do it again."""
    firsts: dict[int, dict[int, float]] = {}
    for rank in {each.rank for each in steps}:
        process = process_of(steps, rank, last.at)
        for each in sorted(each for each in steps if each.rank == rank and each.process == process):
            firsts.setdefault(rank, {}).setdefault(each.step, each.at)
    ends = {rank: [step for step in done if step <= last.step] for rank, done in firsts.items()}
    return {rank: firsts[rank][max(done)] for rank, done in ends.items() if done}


def _first_new(steps: Iterable[Step], first: int, *, after: float, without: str) -> dict[int, float]:
    """rank → when it did step `first` or a later one. What the process that is gone may still have done with
    what it had received counts for nothing."""
    ends: dict[int, float] = {}
    for each in steps:
        if each.step >= first and each.at > after and each.process != without:
            ends[each.rank] = min(each.at, ends.get(each.rank, each.at))
    return ends


def _redone(steps: Iterable[Step], first: int, at: float, gone: str) -> int:
    """How many steps were done a second time by the rank that did most of them."""
    done = {(each.rank, each.step) for each in steps if each.at <= at}
    again: dict[int, set[int]] = {}
    for each in steps:
        if each.at > at and each.step < first and each.process != gone and (each.rank, each.step) in done:
            again.setdefault(each.rank, set()).add(each.step)
    return max((len(found) for found in again.values()), default=0)
