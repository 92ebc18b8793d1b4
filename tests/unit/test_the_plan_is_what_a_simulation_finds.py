"""The formulas of `tm-slurm plan` against simulated jobs, within 2 %, and against what is known exactly."""

from __future__ import annotations

import math
from typing import Any

import pytest
from planned_jobs import inputs, simulate_restarts, simulate_standbys

from tm_slurm.planning import restart, with_standbys
from tm_slurm.planning.pool import all_found_one, busy_distribution, none_free
from tm_slurm.planning.sizing import best_number

TOLERANCE = 0.02


@pytest.mark.parametrize(
    ("standbys", "changes"),
    [
        (0, {}),
        (1, {}),
        (2, {"repair_h": 1.0}),
        (3, {"planned_per_day": 24.0, "planned_s": 60.0}),
        (2, {"mttf_h": 0.5, "no_standby_s": 3600.0}),
    ],
)
def test_standbys(standbys: int, changes: dict[str, Any]) -> None:
    of = inputs(**changes)
    said = with_standbys(of, standbys)
    seen = simulate_standbys(of, standbys, events=60_000, seed=7)
    assert said.ettr == pytest.approx(seen.ettr, rel=TOLERANCE)
    assert said.wasted_gpu_h == pytest.approx(seen.wasted_gpu_h(of), rel=TOLERANCE)
    assert said.none_free == pytest.approx(seen.found_none, rel=TOLERANCE)
    assert said.waiting_gpu_h == pytest.approx(168.0 * 8 * seen.waiting_standbys, rel=TOLERANCE)


@pytest.mark.parametrize("changes", [{}, {"mttf_h": 0.5}, {"checkpoint_interval_s": 3600.0}])
def test_restarts(changes: dict[str, Any]) -> None:
    of = inputs(planned_per_day=0.0, **changes)
    seen = simulate_restarts(of, failures=30_000, seed=7)
    said = restart(of)
    assert said.ettr == pytest.approx(seen.ettr, rel=TOLERANCE)
    assert said.wasted_gpu_h == pytest.approx(seen.wasted_gpu_h(of), rel=TOLERANCE)


def test_what_is_known_exactly() -> None:
    assert none_free(0, 3.0) == 1.0 and none_free(5, 0.0) == 0.0
    assert none_free(2, 1.0) == pytest.approx(0.2)  # (1/2) / (1 + 1 + 1/2)
    for standbys, offered in ((3, 0.5), (40, 30.0), (400, 390.0)):
        spread = busy_distribution(standbys, offered)
        assert math.fsum(spread) == pytest.approx(1.0)
        assert spread[-1] == pytest.approx(none_free(standbys, offered))
    rates = {"failures_per_s": 1e-4, "events_per_s": 2e-4, "repair_s": 3600.0}
    assert all_found_one(3, **rates, window_s=0.0) == pytest.approx(1.0)
    assert all_found_one(0, **rates, window_s=5000.0) == pytest.approx(math.exp(-0.5))
    short = all_found_one(2, **rates, window_s=1.0)  # a window so short that it sees one failure at most
    assert 1.0 - short == pytest.approx(1e-4 * none_free(2, 0.72), rel=1e-3)
    long = all_found_one(2, **rates, window_s=40 * 86400.0)
    assert 0.0 <= long < 1e-3


def test_a_job_that_never_fails_only_pays_for_its_standbys() -> None:
    of = inputs(mttf_h=1e9, planned_per_day=0.0)
    assert with_standbys(of, 0).wasted_gpu_h == pytest.approx(0.0, abs=1.0)
    assert with_standbys(of, 3).wasted_gpu_h == pytest.approx(168.0 * 8 * 3, rel=1e-3)
    assert restart(of).ettr == pytest.approx(600.0 / 610.0)
    assert restart(inputs(mttf_h=1e-4)).ettr == pytest.approx(0.0)


@pytest.mark.parametrize(
    "changes", [{}, {"gpus": 256}, {"mttf_h": 0.05}, {"repair_h": 100.0, "gpus": 131072}]
)
def test_the_best_number_is_the_best_of_all(changes: dict[str, Any]) -> None:
    of = inputs(**changes)
    best = best_number(of)
    wasted = [with_standbys(of, k).wasted_gpu_h for k in range(best + 12)]
    assert wasted.index(min(wasted)) == best
