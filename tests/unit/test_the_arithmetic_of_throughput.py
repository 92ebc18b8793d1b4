"""What `make bench-overhead` and `make bench-ettr` compute from what they have measured."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import bench_ettr
import bench_overhead


def test_throughput_is_theirs_over_ours_round_by_round() -> None:
    rows = [
        {
            "over": {"tm": ratio, "gloo": 2 * ratio},
            "tm_over": {"gloo": [0.5, 0.5], "tm_vote": [0.98, 1.0], "tm_beats": [1.0]},
            "agent_cpu_s_a_minute": 1.0,
            "leader_cpu_s_a_minute": leader,
        }
        for ratio, leader in ((0.9, 2.0), (1.0, None), (1.1, 4.0))
    ]
    found, spreads = bench_overhead.figures({"throughput": rows, "snapshots": {"overhead": 0.004}})
    assert found["throughput_over_ddp_tm"] == 1.0 and found["throughput_over_ddp_gloo"] == 2.0
    assert spreads["throughput_over_ddp_tm"] == {"median": 1.0, "min": 0.9, "max": 1.1}
    assert found["vote_alone_throughput"] == pytest.approx(0.99) and found["tm_over_gloo_throughput"] == 2.0
    assert found["coordinator_and_agent_cpu_s_a_minute"] == 3.0
    assert found["snapshots_alone_overhead"] == 0.004
    assert bench_overhead.figures({}) == ({}, {})


def test_ettr_and_stragglers() -> None:
    assert bench_ettr.EVERY_STEPS == 100
    parts = {
        "moves": {"ettr": 0.995, "ettr_by_steps": 0.98, "downtimes_s": [0.1, 0.3, 0.2]},
        "calm": {"false_evictions": 0},
        "straggler": [
            {"loss": loss, "found_after_steps": 14, "loss_without_eviction": 0.25}
            for loss in (0.03, 0.05, 0.04)
        ],
    }
    found = bench_ettr.figures(parts)
    assert found["ettr_600s"] == 0.995 and found["move_downtime_s"] == 0.2
    assert found["false_evictions"] == 0.0 and found["straggler_loss"] == 0.04
    assert bench_ettr.figures({}) == {}
