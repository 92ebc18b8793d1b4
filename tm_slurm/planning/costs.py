"""What an interruption costs, in seconds: measured by a job or by `make bench-downtime`, else the paper's.

The paper's (C. Lao et al., TrainMover, OSDI '26, arXiv 2412.12636): a planned and an unplanned move by number
of GPUs, detection not counted, and what Megatron-LM takes to restart; 8,192 GPUs in production take 6.47
minutes. Between two sizes the figures are interpolated in the logarithm of the size; outside, the nearest
holds.
"""

from __future__ import annotations

import bisect
import json
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SIZES = (32, 128, 256, 512, 1024)
_PLANNED_S = (11.5, 14.5, 15.5, 14.2, 16.6)
_UNPLANNED_S = (19.6, 20.2, 20.4, 20.4, 21.1)
_RESTART_S = (80.0, 190.0, 230.0, 260.0, 300.0)
_PRODUCTION_GPUS, _PRODUCTION_RESTART_S = 8192, 388.0

_BENCH_FIGURES = ("process_death_s", "power_off_s", "unplugged_s", "frozen_s")
"""Kinds of failure in build/bench/downtime.json, detection counted; taken to be equally frequent."""


class UnreadableCosts(ValueError):
    """The file that was named holds no downtimes; one line."""


@dataclass(frozen=True)
class Cost:
    """Seconds, and where the figure is from."""

    seconds: float
    source: str


def paper_planned(gpus: int) -> Cost:
    return Cost(_at(gpus, _SIZES, _PLANNED_S), "the paper's, for this size")


def paper_unplanned(gpus: int, detection_s: float) -> Cost:
    """`detection_s` is added: the paper leaves it out."""
    moved = _at(gpus, _SIZES, _UNPLANNED_S)
    return Cost(moved + detection_s, f"the paper's, for this size, and {detection_s:g} s to notice it")


def paper_restart(gpus: int) -> Cost:
    sizes = (*_SIZES, _PRODUCTION_GPUS)
    seconds = _at(gpus, sizes, (*_RESTART_S, _PRODUCTION_RESTART_S))
    return Cost(seconds, "the paper's Megatron-LM restart, for this size")


def from_timeline(entries: Iterable[dict[str, Any]], source: str) -> tuple[Cost | None, Cost | None]:
    """Unplanned and planned: means of a job's own `downtime` entries; None of a kind that it has not had."""
    unplanned: list[float] = []
    planned: list[float] = []
    for entry in entries:
        if entry["what"] == "downtime":
            (unplanned if "agreed_at" in entry else planned).append(max(0.0, float(entry["downtime_s"])))
    return _mean(unplanned, source), _mean(planned, source)


def from_bench(path: Path) -> Cost | None:
    """The mean of the kinds of failure in a result of `make bench-downtime`; None where there is no file."""
    try:
        figures = json.loads(path.read_text())["figures"]
        found = [float(figures[name]) for name in _BENCH_FIGURES if name in figures]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnreadableCosts(
            f"{path}: expected figures of `make bench-downtime`, found {type(error).__name__}: {error}"
        ) from None
    if not found:
        raise UnreadableCosts(f"{path}: expected some of {', '.join(_BENCH_FIGURES)}, found none of them")
    return Cost(statistics.fmean(found), f"{path}: measured on that machine, {len(found)} kinds of failure")


def _mean(seconds: list[float], source: str) -> Cost | None:
    return Cost(statistics.fmean(seconds), f"{source}, mean of {len(seconds)}") if seconds else None


def _at(gpus: int, sizes: tuple[int, ...], seconds: tuple[float, ...]) -> float:
    if gpus <= sizes[0]:
        return seconds[0]
    if gpus >= sizes[-1]:
        return seconds[-1]
    above = bisect.bisect_right(sizes, gpus)
    low, high = sizes[above - 1], sizes[above]
    share = math.log(gpus / low) / math.log(high / low)
    return seconds[above - 1] + share * (seconds[above] - seconds[above - 1])
