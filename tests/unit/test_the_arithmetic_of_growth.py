"""What `make bench-downtime` concludes of planned moves: how they grow, and whether they cost more than they
may."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import growth_figures


def row(downtime_s: float, **about: Any) -> dict[str, Any]:
    measured = {"crowding": 1.5, "step_spread_s": 0.0, "steady_step_s": 0.1, "downtime_s": downtime_s}
    return {"kind": "drain", **measured, **about}


def test_a_failure_counts_from_its_instant_to_the_first_new_step_less_a_steady_one() -> None:
    cost = {"at": 110.0, "steady_step_s": 0.25, "downtime_s": 99.0}
    assert growth_figures.since_the_fault(109.0, cost) == pytest.approx(0.75)


def test_a_planned_move_may_cost_a_little_and_its_floor() -> None:
    assert growth_figures.limit_s(0.0) == 0.05 and growth_figures.limit_s(1.0) == pytest.approx(1.35)
    assert growth_figures.over_limit(row(2.7, floor_s=1.0)) == pytest.approx(2.0)
    rows = [row(seconds, state_bytes=1, floor_s=0.0) for seconds in (0.01, 0.02, 5.0)]
    rows += [row(seconds, state_bytes=2, floor_s=1.0) for seconds in (1.35, 1.30, 1.40)]
    assert growth_figures.worst_over_limit(rows, "state_bytes") == pytest.approx(1.0)


def test_growth_is_from_the_smallest_case_to_the_worst_one() -> None:
    def growth(by: dict[int, float], spread_s: float = 0.0) -> float | None:
        rows = [row(seconds, ranks=ranks, step_spread_s=spread_s) for ranks, seconds in by.items()]
        return growth_figures.growth(rows, "ranks")

    assert growth({2: 0.1, 4: 0.3, 16: 0.2}) == pytest.approx(3.0)
    assert growth({2: 0.2, 16: 0.1}) == pytest.approx(0.5)
    assert growth({2: 0.1}) is None and growth({2: 0.0, 4: 0.0}) is None and growth({}) is None


def test_a_downtime_counts_as_no_less_than_steps_differ_by_themselves() -> None:
    assert growth_figures.spread([0.10, 0.11, 0.12, 0.13, 0.9]) == pytest.approx(0.02)
    assert growth_figures.spread([0.1]) == 0.0
    rows = [row(-0.004, leavers=1, step_spread_s=0.01), row(0.02, leavers=4, step_spread_s=0.01)]
    assert growth_figures.growth(rows, "leavers") == pytest.approx(2.0)
    rows = [row(-0.004, leavers=1, step_spread_s=0.01), row(0.002, leavers=4, step_spread_s=0.01)]
    assert growth_figures.growth(rows, "leavers") == pytest.approx(1.0)


def test_medians_are_in_the_order_of_numbers() -> None:
    rows = [
        row(seconds, ranks=ranks) for ranks in (16, 2) for seconds in (3.0 * ranks, 1.0 * ranks, 9.0 * ranks)
    ]
    assert list(growth_figures.medians(rows, "ranks").items()) == [("2", 6.0), ("16", 48.0)]


def test_figures_are_of_the_parts_that_were_run() -> None:
    planned = {
        "ranks": [
            *[row(0.1 * n, ranks=n) for n in (2, 4)],
            *[{**row(0.2 * n, ranks=n), "kind": "process_death"} for n in (2, 4)],
        ],
        "leavers": [
            *[row(0.1, leavers=1, gb_s=None), row(0.12, leavers=4, gb_s=None)],
            *[row(0.2, leavers=1, gb_s=0.01), row(0.22, leavers=4, gb_s=0.01)],
        ],
        "sizes": [row(0.02, state_bytes=1 << 20, floor_s=0.001)]
        + [row(seconds, state_bytes=1 << 30, floor_s=0.5) for seconds in (0.5, 0.6, 0.9)],
        "bandwidth": [row(1.2, gb_s=0.05, floor_s=1.0), row(0.1, gb_s=1.0, floor_s=0.06)],
        "groups": [row(0.1, groups=1), row(0.1, groups=16)],
    }
    found = growth_figures.figures(planned)
    assert found["planned_s_by_ranks"] == pytest.approx({"2": 0.2, "4": 0.4})
    assert found["process_death_s_by_ranks"] == pytest.approx({"2": 0.4, "4": 0.8})
    assert found["planned_growth_with_ranks"] == found["process_death_growth_with_ranks"] == pytest.approx(2)
    assert found["planned_s_by_leavers"] == {"1": 0.1, "4": 0.12}
    assert found["planned_growth_with_leavers"] == pytest.approx(1.2)
    assert found["planned_growth_with_leavers_on_slow_links"] == pytest.approx(1.1)
    assert found["planned_ratio_floor_1gb"] == pytest.approx(1.2)
    assert found["planned_s_by_bytes"] == {"1048576": 0.02, "1073741824": 0.6}
    assert found["planned_over_limit"] == pytest.approx(0.6 / 0.7)
    assert found["planned_shaped_over_limit"] == pytest.approx(1.2 / 1.35)
    assert found["planned_s_by_gb_s"] == {"0.05": 1.2, "1": 0.1}
    assert set(growth_figures.BARS) <= set(found) and json.dumps(found)
    assert growth_figures.figures({}) == {}
    assert "planned_growth_with_ranks" not in growth_figures.figures({"ranks": [row(0.1, ranks=2)]})
