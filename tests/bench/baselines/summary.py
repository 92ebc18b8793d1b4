"""Figures and a table from the trials of all rivals.

A trial of ours that failed counts as endless; those of rivals that failed do not count at all. Ours counts as
no less than undisturbed steps differ (between the quartiles of their times): the downtime of a planned move
is the difference of two steps' times, and may come out as nothing or less.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from baselines.rival import DEATH, FAULTS, PLANNED

OURS = "tm_slurm"
RESTARTS = ("torchrun", "torchrun_10", "requeue", "ft_launcher")
"""Everything ends and starts again from a checkpoint."""

BREAKDOWN = ("migration_naive", "migration_delta_groups", OURS)
"""Naive, + delta groups, + sandbox (all of it)."""

OTHERS = ("migration_naive", "nvrx_inprocess", "torchft_all", "torchft_less")
"""Beside the best of those that restart."""

FEW = 5
"""So many trials there have to be."""

UNPLANNED = "a rank is killed; see by_fault"
COUNTED = {
    "ours_failed": "as endless",
    "ours_at_least": "the median of step_spread_s of its trials",
    "theirs_failed": "not at all",
}
BARS = {
    "planned_over_ours_best_restart": 30.0,
    "planned_over_ours_naive": 3.0,
    "unplanned_over_ours_best_restart": 10.0,
    "unplanned_over_ours_nvrx_inprocess": 4.0,
    "unplanned_over_ours_torchft_all": 4.0,
    "unplanned_over_ours_torchft_less": 1.0,
}
"""At least."""

Parts = Mapping[str, Mapping[str, Any]]
"""rival → {"faults": {fault: {"rows": […]} or {"cannot": why}}}"""

Row = Mapping[str, Any]


def rows_of(parts: Parts, rival: str, fault: str) -> list[Row]:
    """The trials of a rival."""
    return list(parts.get(rival, {}).get("faults", {}).get(fault, {}).get("rows", ()))


def rows_of_all(parts: Parts) -> list[Row]:
    every = [(rival, fault) for rival, part in parts.items() for fault in part["faults"]]
    return [row for rival, fault in every for row in rows_of(parts, rival, fault)]


def times(parts: Parts, rival: str, fault: str) -> list[float]:
    """The downtimes of a rival's trials that went on, seconds."""
    return [float(row["downtime_s"]) for row in rows_of(parts, rival, fault) if "downtime_s" in row]


def median(parts: Parts, rival: str, fault: str) -> float | None:
    """None where there is no trial that counts; of ours infinite where too many have failed."""
    found = times(parts, rival, fault)
    if rival == OURS:
        found += [math.inf] * (len(rows_of(parts, rival, fault)) - len(found))
    return statistics.median(found) if found else None


def floor_s(parts: Parts, fault: str) -> float:
    """What ours counts as at least."""
    found = [float(row["step_spread_s"]) for row in rows_of(parts, OURS, fault) if "step_spread_s" in row]
    return statistics.median(found) if found else 0.0


def commits(parts: Parts, rivals: Iterable[str], fault: str) -> set[str | None]:
    """Of which the sources of these rivals' trials are."""
    return {row.get("commit") for rival in rivals for row in rows_of(parts, rival, fault)}


def measured_restarts(parts: Parts, fault: str) -> list[str]:
    """The restarting rivals that have gone on after this fault."""
    return [rival for rival in RESTARTS if times(parts, rival, fault)]


def best_restart(parts: Parts, fault: str) -> str | None:
    """The restarting rival that is best at this fault, of those that were measured."""
    return min(
        measured_restarts(parts, fault),
        key=lambda rival: statistics.median(times(parts, rival, fault)),
        default=None,
    )


def ratio(other: float | None, ours: float | None, floor: float = 0.0) -> float | None:
    """None where one of them is not known, or ours and `floor` are nothing."""
    if other is None or ours is None or max(ours, floor) <= 0:
        return None
    return other / max(ours, floor)


def over_ours(parts: Parts, rival: str, fault: str) -> dict[str, float] | None:
    """The ratio of the medians; of the pairs of trials that took turns how many there are, and the least and
    the most. None where there is no ratio."""
    floor = floor_s(parts, fault)
    whole = ratio(median(parts, rival, fault), median(parts, OURS, fault), floor)
    if whole is None:
        return None
    pairs = zip(rows_of(parts, rival, fault), rows_of(parts, OURS, fault), strict=False)
    each = [ratio(row.get("downtime_s"), ours.get("downtime_s", math.inf), floor) for row, ours in pairs]
    known = [one for one in each if one is not None]
    spread = {"min": min(known), "max": max(known)} if known else {}
    return {"median": whole, "n": len(known), **spread}


def figures(parts: Parts) -> dict[str, Any]:
    """Ratios of medians, each over ours at the same fault. A figure without a fault in its name is of a drain
    (planned) or of a rank that was killed (unplanned); `by_fault` has them for all faults."""
    by_fault = {fault: _ratios(parts, fault) for fault in FAULTS}
    planned, unplanned = by_fault[PLANNED], by_fault[DEATH]
    breakdown = {rival: median(parts, rival, PLANNED) for rival in BREAKDOWN}
    return {
        "unplanned": UNPLANNED,
        "planned_over_ours_best_restart": planned["best_restart"],
        "planned_over_ours_naive": planned["migration_naive"],
        "unplanned_over_ours_best_restart": unplanned["best_restart"],
        "unplanned_over_ours_nvrx_inprocess": unplanned["nvrx_inprocess"],
        "unplanned_over_ours_torchft_all": unplanned["torchft_all"],
        "unplanned_over_ours_torchft_less": unplanned["torchft_less"],
        "restart_planned_s": _best_restart_s(parts, PLANNED),
        "restart_unplanned_s": _best_restart_s(parts, DEATH),
        "breakdown_planned_s": {rival: _known(value) for rival, value in breakdown.items()},
        "by_fault": by_fault,
    }


def _known(median_s: float | None) -> float | None:
    """An endless one is no number in JSON."""
    return None if median_s == math.inf else median_s


def _best_restart_s(parts: Parts, fault: str) -> float | None:
    best = best_restart(parts, fault)
    return None if best is None else median(parts, best, fault)


def _ratios(parts: Parts, fault: str) -> dict[str, Any]:
    best = best_restart(parts, fault)
    rivals = {"best_restart": best, **{rival: rival for rival in OTHERS}}
    found = {name: rival and over_ours(parts, rival, fault) for name, rival in rivals.items()}
    return {
        **{name: about and about["median"] for name, about in found.items()},
        "spreads": {name: about for name, about in found.items() if about},
        "restarts_measured": measured_restarts(parts, fault),
        "mixed_commits": len(commits(parts, (OURS, *RESTARTS, *OTHERS), fault)) > 1,
    }


def table(parts: Parts) -> str:
    """Rivals by faults: median, number of trials, least and most."""
    lines = ["{:>22} ".format("downtime (s)") + "".join(f"{fault:>26}" for fault in FAULTS)]
    for rival in parts:
        cells = [_cell(parts, rival, fault) for fault in FAULTS]
        lines.append(f"{rival:>22} " + "".join(f"{cell:>26}" for cell in cells))
    notes = [
        f"{rival}, {fault}: cannot: {found['cannot']}"
        for rival, part in parts.items()
        for fault, found in part["faults"].items()
        if "cannot" in found
    ]
    failed = [
        f"{rival}, {fault}: {row[what].splitlines()[0]}"
        for rival, part in parts.items()
        for fault, found in part["faults"].items()
        for row in found.get("rows", ())
        for what in ("failed", "left_behind")
        if what in row
    ]
    mixed = [
        f"{fault}: trials of several commits: {', '.join(sorted(map(str, found)))}"
        for fault in FAULTS
        if len(found := commits(parts, parts, fault)) > 1
    ]
    return "\n".join([*lines, *notes, *failed, *mixed])


def _cell(parts: Parts, rival: str, fault: str) -> str:
    found, seconds = parts[rival]["faults"].get(fault), times(parts, rival, fault)
    if found is None:
        return "not measured"
    if "cannot" in found:
        return "cannot"
    failed = sum("failed" in row for row in found["rows"])
    lost = f" {failed} failed" if failed else ""
    if not seconds:
        return lost.strip()
    middle, low, high = median(parts, rival, fault), min(seconds), max(seconds)
    return f"{middle:.2f} n={len(seconds)} {low:.2f}-{high:.2f}{lost}"
