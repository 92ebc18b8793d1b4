"""What `make bench-downtime` concludes of interruptions: how they grow, and whether they cost more than they
may."""

from __future__ import annotations

import json
import random
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import bench_downtime
import bench_warmup
import growth_figures
import snapshot_overhead


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


def test_medians_differ_less_than_what_they_are_medians_of() -> None:
    values = random.Random(5)
    count, normal_quartiles_s = 25, 2 * 0.6745
    medians = [statistics.median(values.gauss(0.0, 1.0) for _ in range(count)) for _ in range(4000)]
    assert growth_figures.spread_of_median(normal_quartiles_s, count) == pytest.approx(
        growth_figures.spread(medians), rel=0.05
    )
    assert growth_figures.spread_of_median(0.01, 1) == 0.01


def test_the_more_trials_the_smaller_a_growth_is_told() -> None:
    def rows(count: int) -> list[dict[str, Any]]:
        cases = ((1, 0.004), (4, 0.008))
        return [row(s, leavers=n, step_spread_s=0.02) for n, s in cases for _ in range(count)]

    assert growth_figures.growth(rows(4), "leavers") == 1.0, "a noisy machine, and few trials"
    assert growth_figures.growth(rows(100), "leavers") == pytest.approx(2.0)
    fewer = rows(100)[:-96]  # of four leavers
    assert growth_figures.told_apart_s(fewer, "leavers") == growth_figures.told_apart_s(rows(4), "leavers")


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
        + [row(seconds, state_bytes=1 << 30, floor_s=0.5) for seconds in (0.5, 0.6, 0.9)]
        + [{**row(seconds, state_bytes=1 << 20), "kind": "process_death"} for seconds in (0.2, 0.3, 0.4)],
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
    assert found["process_death_s_by_bytes"] == {"1048576": 0.3}
    assert found["planned_growth_with_ranks_told_apart_s"] == 0.0
    assert found["planned_s_by_bytes"] == {"1048576": 0.02, "1073741824": 0.6}
    assert found["planned_over_limit"] == pytest.approx(0.6 / 0.7)
    assert found["planned_shaped_over_limit"] == pytest.approx(1.2 / 1.35)
    assert found["planned_s_by_gb_s"] == {"0.05": 1.2, "1": 0.1}
    assert set(growth_figures.BARS) <= set(found) and json.dumps(found)
    assert growth_figures.figures({}) == {}
    assert "planned_growth_with_ranks" not in growth_figures.figures({"ranks": [row(0.1, ranks=2)]})


def test_the_figures_of_a_run_are_of_the_parts_that_it_has() -> None:
    parts = {
        "unplugged": [row(2.0), row(2.2), row(2.1)],
        "state": {"state_1gb_ratio_floor": {"ratios": [1.1, 1.3, 1.2]}},
        "groups": [row(0.1, groups=1)],
    }
    found = bench_downtime.figures(parts)
    assert found.pop("detection_limit_s") > 0
    assert found == {"unplugged_s": 2.1, "state_1gb_ratio_floor": 1.2, "planned_s_by_groups": {"1": 0.1}}
    of_no_mode = bench_warmup.figures({"throughput": {"median": 1.01}, "a mode of old": {}})
    assert of_no_mode["recording_off_throughput_ratio"] == 1.01 and of_no_mode["first_step_ratio_max"] is None


def test_what_snapshots_cost_cannot_be_said_of_one() -> None:
    seconds = {step: 0.1 + 0.01 * (step in (60, 61, 160, 161)) for step in range(20, 240)}
    found = snapshot_overhead.inside({"seconds": seconds, "taken": [5, 60, 160]})
    assert found["longer"] == pytest.approx([0.1] * 4) and found["every_steps"] == 100
    with pytest.raises(
        ValueError, match="expected two snapshots or more in the steps from 20 to 240, found 1"
    ):
        snapshot_overhead.inside({"seconds": seconds, "taken": [5, 60]})
