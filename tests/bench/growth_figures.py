"""What bench_downtime concludes from the interruptions that it has measured: the definition of downtime, the
limit of a planned one, and how either grows. No measurement in here."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

BASE_S, SLOPE = 0.05, 1.3
"""A planned move may cost `BASE_S` seconds and `SLOPE` times its floor."""

BARS = {
    "planned_over_limit": 1.0,
    "planned_shaped_over_limit": 1.0,
    "planned_growth_with_ranks": 1.5,
    "planned_growth_with_leavers": 1.3,
    "process_death_growth_with_ranks": 1.5,
}
GIGABYTE = 1 << 30

Row = dict[str, Any]


def since_the_fault(at: float, cost: Mapping[str, Any]) -> float:
    """Downtime of a failure in seconds, by the design's definition: from the instant `at` of the fault until
    the first new step at the slowest rank, less a steady step. `cost`: the job's own entry."""
    return float(cost["at"]) - at - float(cost["steady_step_s"])


def limit_s(floor_s: float) -> float:
    """Seconds that a planned move may cost whose state takes `floor_s` through raw sockets."""
    return BASE_S + SLOPE * floor_s


def medians(rows: Iterable[Row], key: str, value: str = "downtime_s") -> dict[str, float]:
    """The median of `value` for each value of `key`, the smallest key first; keys are text, as in JSON."""
    by: dict[float, list[float]] = {}
    for row in rows:
        by.setdefault(row[key], []).append(float(row[value]))
    return {f"{found:g}": statistics.median(by[found]) for found in sorted(by)}


def growth(by: Mapping[str, float]) -> float | None:
    """How many times the first (the smallest case) the largest of all others is; None where there are no two,
    or the first is not above nothing."""
    first, *others = by.values() or [0.0]
    return max(others) / first if others and first > 0 else None


def over_limit(row: Row) -> float:
    """What a planned move has cost, over what it may have cost."""
    return float(row["downtime_s"]) / limit_s(float(row["floor_s"]))


def worst_over_limit(rows: Iterable[Row], key: str) -> float:
    """The largest of the medians, one for each value of `key`, of cost over limit."""
    return max(medians([{**row, "over_limit": over_limit(row)} for row in rows], key, "over_limit").values())


def figures(planned: Mapping[str, list[Row]]) -> dict[str, Any]:
    """From the rows of the parts that have been run."""
    found: dict[str, Any] = {}
    if rows := planned.get("ranks", []):
        drained = [row for row in rows if row["kind"] == "drain"]
        found["planned_s_by_ranks"] = medians(drained, "ranks")
        found["process_death_s_by_ranks"] = medians([row for row in rows if row not in drained], "ranks")
        found["crowding_by_ranks"] = medians(rows, "ranks", "crowding")
        found["planned_growth_with_ranks"] = growth(found["planned_s_by_ranks"])
        found["process_death_growth_with_ranks"] = growth(found["process_death_s_by_ranks"])
    if rows := planned.get("leavers", []):
        found["planned_s_by_leavers"] = medians(rows, "leavers")
        found["planned_growth_with_leavers"] = growth(found["planned_s_by_leavers"])
    if rows := planned.get("sizes", []):
        found["planned_s_by_bytes"] = medians(rows, "state_bytes")
        found["planned_over_limit"] = worst_over_limit(rows, "state_bytes")
        if ratios := [row["downtime_s"] / row["floor_s"] for row in rows if row["state_bytes"] == GIGABYTE]:
            found["planned_ratio_floor_1gb"] = statistics.median(ratios)
    if rows := planned.get("bandwidth", []):
        found["planned_s_by_gb_s"] = medians(rows, "gb_s")
        found["floor_s_by_gb_s"] = medians(rows, "gb_s", "floor_s")
        found["planned_shaped_over_limit"] = worst_over_limit(rows, "gb_s")
    if rows := planned.get("groups", []):
        found["planned_s_by_groups"] = medians(rows, "groups")
    return {name: value for name, value in found.items() if value is not None}
