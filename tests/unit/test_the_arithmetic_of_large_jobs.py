"""What `make bench-scale` computes: a simulated month agrees with the formulas, simulated nodes with the real
decisions, and figures come from what was measured."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import bench_scale
import scale_journal
import scale_month
from simulated_nodes import links

from tm_slurm.control.handshake import SECRET_BYTES
from tm_slurm.coordinator.journal import create, journal_path, replay
from tm_slurm.planning import restart, with_standbys


@pytest.mark.parametrize("standbys", [0, 8, 32])
def test_a_simulated_month_with_standbys_is_what_the_formula_says(standbys: int) -> None:
    of = scale_month.inputs()
    months = [scale_month.with_standbys(of, standbys, seed) for seed in range(8)]
    assert scale_month.spread(months)["ettr"] == pytest.approx(with_standbys(of, standbys).ettr, rel=0.03)


def test_a_simulated_month_of_restarts_is_what_the_formula_says() -> None:
    of = scale_month.inputs()
    months = [scale_month.with_restarts(of, seed) for seed in range(8)]
    assert scale_month.spread(months)["ettr"] == pytest.approx(restart(of).ettr, rel=0.06)


def test_links_grow_with_the_logarithm_of_the_job() -> None:
    for world_size in (2, 7, 64, 16384):
        found = {rank: links(rank, world_size) for rank in range(0, world_size, max(1, world_size // 50))}
        assert max(map(len, found.values())) <= math.ceil(math.log2(world_size)) + 2
        assert all(rank not in linked for rank, linked in found.items())
    assert all(3 in links(other, 8) for other in links(3, 8))


def test_simulated_nodes_do_what_the_decisions_ask_of_them(tmp_path: Path) -> None:
    (tmp_path / "secret").touch(0o600)
    (tmp_path / "secret").write_bytes(b"s" * SECRET_BYTES)
    assert create(tmp_path, 0, 1)
    writer = scale_journal.JournalWriter(tmp_path, 12)
    for number in range(4):
        writer.moves(number)
        writer.loses(number)
    writer.close()
    state = writer.decisions.state
    assert state.started and not state.ended and state.moves_done == 4 and state.recoveries_done == 4
    assert journal_path(tmp_path, 0, 1).stat().st_size > 0
    assert sum(given["kind"] == "survivor" for given in replay(tmp_path, 0)) == 4 * 11


def row(nodes: int, messages: int) -> dict[str, Any]:
    steady = {"cores": nodes / 1e5, "beats_over_wanted": 0.8, "alive_over_wanted": 1.0}
    return {
        "nodes": nodes,
        "made": {"at": "2026-11-30T10:00:00+00:00", "commit": "abc"},
        "move_ms": [10.0, 30.0, 20.0],
        "messages": [messages],
        "rss_mb": 100.0,
        "successor_rss_mb": 120.0,
        "steady": steady,
        "polling": {"cores": 0.05},
        "takeover": {"takeover_s": 2.5, "all_back_s": 4.0},
        "rack": {"moved_s": 1.0},
    }


def test_figures_are_of_the_largest_job_and_ratios_of_one_run() -> None:
    found = bench_scale.figures({"nodes": [row(64, 30), row(16384, 45)]})
    assert found["move_ms_16384"] == 20.0 and found["messages_16384_over_64"] == 1.5
    assert found["coordinator_rss_mb"] == 120.0 and found["coordinator_cores"] == pytest.approx(0.2048 + 0.05)
    assert found["heartbeats_kept_up"] == 0.8
    assert "messages_16384_over_64" not in bench_scale.figures({"nodes": [row(64, 30)]})
    assert bench_scale.figures({}) == {}
    assert json.dumps(found)
