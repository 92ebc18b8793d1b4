"""What bench_downtime concludes from the interruptions that it has measured: the definition of downtime, the
limit of a planned one, and how either grows. No measurement in here."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

BASE_S, SLOPE = 0.05, 1.3
"""A planned move may cost `BASE_S` seconds and `SLOPE` times its floor."""

BARS = {
    "planned_over_limit": 1.0,
    "planned_shaped_over_limit": 1.0,
    "planned_growth_with_ranks": 1.5,
    "planned_growth_with_leavers": 1.3,
    "planned_growth_with_leavers_on_slow_links": 1.3,
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
    return {f"{found:.12g}": statistics.median(by[found]) for found in sorted(by)}


def spread(steps_s: Sequence[float]) -> float:
    """How much undisturbed steps differ: seconds between the quartiles of their times; 0 for a single one."""
    if len(steps_s) < 2:
        return 0.0
    low, _, high = statistics.quantiles(steps_s, n=4, method="inclusive")
    return high - low


def spread_of_median(spread_s: float, count: int) -> float:
    """How much the medians of `count` values differ each of which differs by `spread_s`: seconds between the
    quartiles.

    The standard deviation of a median is that of the values times √(π / (2 · count)) for many values that are
    normally distributed, and distances of quartiles are in proportion to standard deviations. For few values
    it is somewhat less than that; for one it is that value's own."""
    return spread_s * min(1.0, math.sqrt(math.pi / (2 * count)))


def told_apart_s(rows: Iterable[Row], key: str) -> float:
    """How long a median downtime must be to be told apart from none. A downtime is the time of a step less
    that of the median one, so by themselves downtimes differ as steps do (`step_spread_s`, the median of all
    rows), and their medians less, the more there are of each; the case with the fewest counts."""
    rows = list(rows)
    fewest = min(Counter(row[key] for row in rows).values())
    return spread_of_median(statistics.median(float(row["step_spread_s"]) for row in rows), fewest)


def growth(rows: Iterable[Row], key: str) -> float | None:
    """How many times the downtime of the smallest case the largest one of all others is; either counts as no
    less than what can be told apart. None where there are no two cases, or nothing differs."""
    rows = list(rows)
    first, *others = medians(rows, key).values() or [0.0]
    if not others:
        return None
    least = told_apart_s(rows, key)
    smallest = max(first, least)
    return max(*others, least) / smallest if smallest > 0 else None


def grown(rows: Iterable[Row], key: str, kind: str, name: str) -> dict[str, Any]:
    """The figures of an interruption of a kind by a key: medians, growth, and what that can tell apart."""
    rows = list(rows)
    if not rows:
        return {}
    found: dict[str, Any] = {f"{kind}_s_by_{name}": medians(rows, key)}
    factor = growth(rows, key)
    if factor is not None:
        figure = f"{kind}_growth_with_{name}"
        found |= {figure: factor, f"{figure}_told_apart_s": told_apart_s(rows, key)}
    return found


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
        for kind, name in (("drain", "planned"), ("process_death", "process_death")):
            found |= grown(_of(rows, kind), "ranks", name, "ranks")
        for value in ("crowding", "step_spread_s", "steady_step_s"):
            found[f"{value}_by_ranks"] = medians(rows, "ranks", value)
    if rows := planned.get("leavers", []):
        for slow, name in ((False, "leavers"), (True, "leavers_on_slow_links")):
            some = [row for row in _of(rows, "drain") if (row["gb_s"] is not None) == slow]
            found |= grown(some, "leavers", "planned", name)
        found |= grown(_of(rows, "process_death"), "leavers", "process_death", "leavers")
    if deaths := _of(planned.get("sizes", []), "process_death"):
        found["process_death_s_by_bytes"] = medians(deaths, "state_bytes")
    if rows := _of(planned.get("sizes", []), "drain"):
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
    return found


def _of(rows: Iterable[Row], kind: str) -> list[Row]:
    return [row for row in rows if row["kind"] == kind]
