"""Figures and a table from the trials of all rivals."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from baselines.rival import DEATH, FAULTS, PLANNED

OURS = "tm_slurm"
RESTARTS = ("torchrun", "torchrun_10", "requeue", "ft_launcher")
"""Everything ends and starts again from a checkpoint."""

BREAKDOWN = ("migration_naive", "migration_delta_groups", OURS)
"""Naive, + delta groups, + sandbox (all of it)."""

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


def times(parts: Parts, rival: str, fault: str) -> list[float]:
    """The downtimes of a rival's trials that went on, seconds."""
    rows = parts.get(rival, {}).get("faults", {}).get(fault, {}).get("rows", ())
    return [float(row["downtime_s"]) for row in rows if "downtime_s" in row]


def median(parts: Parts, rival: str, fault: str) -> float | None:
    """None where there is no trial that went on."""
    found = times(parts, rival, fault)
    return statistics.median(found) if found else None


def best_restart(parts: Parts, fault: str) -> float | None:
    """The median of the restarting rival that is best at this fault."""
    found = [median(parts, rival, fault) for rival in RESTARTS]
    return min((each for each in found if each is not None), default=None)


def ratio(other: float | None, ours: float | None) -> float | None:
    return other / ours if other is not None and ours is not None and ours > 0 else None


def figures(parts: Parts) -> dict[str, Any]:
    """Ratios of medians, each over ours at the same fault. A figure without a fault in its name is of a drain
    (planned) or of a rank that was killed (unplanned); `by_fault` has them for all faults."""
    by_fault = {fault: _ratios(parts, fault) for fault in FAULTS}
    planned, unplanned = by_fault[PLANNED], by_fault[DEATH]
    return {
        "planned_over_ours_best_restart": planned["best_restart"],
        "planned_over_ours_naive": planned["migration_naive"],
        "unplanned_over_ours_best_restart": unplanned["best_restart"],
        "unplanned_over_ours_nvrx_inprocess": unplanned["nvrx_inprocess"],
        "unplanned_over_ours_torchft_all": unplanned["torchft_all"],
        "unplanned_over_ours_torchft_less": unplanned["torchft_less"],
        "restart_planned_s": best_restart(parts, PLANNED),
        "restart_unplanned_s": best_restart(parts, DEATH),
        "breakdown_planned_s": {rival: median(parts, rival, PLANNED) for rival in BREAKDOWN},
        "by_fault": by_fault,
    }


def _ratios(parts: Parts, fault: str) -> dict[str, float | None]:
    ours = median(parts, OURS, fault)
    others = ("migration_naive", "nvrx_inprocess", "torchft_all", "torchft_less")
    found = {rival: ratio(median(parts, rival, fault), ours) for rival in others}
    return {"best_restart": ratio(best_restart(parts, fault), ours), **found}


def table(parts: Parts) -> str:
    """Rivals by faults: median, number of trials, least and most."""
    lines = ["{:>22} ".format("downtime (s)") + "".join(f"{fault:>26}" for fault in FAULTS)]
    for rival, part in parts.items():
        cells = [_cell(part["faults"].get(fault), times(parts, rival, fault)) for fault in FAULTS]
        lines.append(f"{rival:>22} " + "".join(f"{cell:>26}" for cell in cells))
    notes = [
        f"{rival}, {fault}: cannot: {found['cannot']}"
        for rival, part in parts.items()
        for fault, found in part["faults"].items()
        if "cannot" in found
    ]
    failed = [
        f"{rival}, {fault}: {row['failed'].splitlines()[0]}"
        for rival, part in parts.items()
        for fault, found in part["faults"].items()
        for row in found.get("rows", ())
        if "failed" in row
    ]
    return "\n".join([*lines, *notes, *failed])


def _cell(found: Mapping[str, Any] | None, seconds: list[float]) -> str:
    if found is None:
        return "not measured"
    if "cannot" in found:
        return "cannot"
    failed = sum("failed" in row for row in found["rows"])
    lost = f" {failed} failed" if failed else ""
    if not seconds:
        return lost.strip()
    middle, low, high = statistics.median(seconds), min(seconds), max(seconds)
    return f"{middle:.2f} n={len(seconds)} {low:.2f}-{high:.2f}{lost}"
