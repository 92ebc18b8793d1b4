"""How often a job fails: the published curve, sacct's record of a cluster, or a job's own timeline.

The curve: a job of 1,024 GPUs fails every 7.9 h, one of 16,384 every 1.8 h (A. Kokolis et al., "Revisiting
Reliability in Large-Scale Machine Learning Research Clusters", HPCA 2025, arXiv 2410.21680). Between the two
it is a straight line on doubly logarithmic paper; outside, failures are in proportion to GPUs, as those of
independent nodes are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tm_slurm.planning.inputs import HOUR_S

SMALL_GPUS, SMALL_MTTF_H = 1024, 7.9
LARGE_GPUS, LARGE_MTTF_H = 16384, 1.8

SACCT_FIELDS = "JobIDRaw,State,NNodes,ElapsedRaw"
SACCT_OPTIONS = (
    "--allusers",
    "--allocations",
    "--duplicates",  # else of a job that was requeued the last run alone
    "--noheader",
    "--parsable2",
    f"--format={SACCT_FIELDS}",
)


class NoFailures(ValueError):
    """What was looked at has no failure in it, or no time: the message says what was found."""


@dataclass(frozen=True)
class FailureRate:
    """`failures` in so many `node_hours`, and where that was seen."""

    failures: int
    node_hours: float
    source: str

    def mttf_h(self, nodes: int) -> float:
        """Hours between two failures of a job on `nodes` nodes, if nodes fail independently."""
        return self.node_hours / self.failures / nodes

    @property
    def uncertainty(self) -> float:
        """Relative standard error: one over the root of the failures counted."""
        return 1.0 / math.sqrt(self.failures)


def published_mttf_h(gpus: int) -> float:
    """The curve."""
    if gpus <= SMALL_GPUS:
        return SMALL_MTTF_H * SMALL_GPUS / gpus
    if gpus >= LARGE_GPUS:
        return LARGE_MTTF_H * LARGE_GPUS / gpus
    slope = math.log(LARGE_MTTF_H / SMALL_MTTF_H) / math.log(LARGE_GPUS / SMALL_GPUS)
    return SMALL_MTTF_H * math.pow(gpus / SMALL_GPUS, slope)


def in_proportion(mttf_h: float, nodes: int) -> Callable[[int], float]:
    """MTTF by number of nodes, from what it is for one number."""
    return lambda other: mttf_h * nodes / other


def from_sacct(text: str, source: str) -> FailureRate:
    """Read `sacct` with SACCT_OPTIONS: jobs that ended NODE_FAIL, in the node hours of all of them."""
    failures, seconds, lines = 0, 0.0, 0
    for line in text.splitlines():
        parts = line.strip().split("|")
        if len(parts) != 4 or not parts[2].isdigit() or not parts[3].isdigit():
            continue
        lines += 1
        seconds += int(parts[2]) * int(parts[3])
        failures += parts[1].split(" ")[0] == "NODE_FAIL"
    if not lines:
        raise NoFailures(f"{source}: expected lines of {SACCT_FIELDS}, found none")
    if not failures or not seconds:
        raise NoFailures(
            f"{source}: no job ended NODE_FAIL in {seconds / HOUR_S:.0f} node hours: look at more days, "
            "or give --mttf"
        )
    return FailureRate(failures, seconds / HOUR_S, f"{source}: {failures} NODE_FAIL")


def from_timeline(entries: Iterable[dict[str, Any]], nodes: int, source: str) -> FailureRate:
    """A job's own failures, in its time on `nodes` nodes. Each loss of ranks counts once."""
    times, failures = [], 0
    for entry in entries:
        times.append(float(entry["at"]))
        failures += entry["what"] == "recovered"
    hours = (max(times) - min(times)) / HOUR_S if times else 0.0
    if not failures or not hours:
        raise NoFailures(f"{source}: no failure in {hours:.1f} h of it: give --mttf")
    return FailureRate(failures, hours * nodes, f"{source}: {failures} failures in {hours:.1f} h")
