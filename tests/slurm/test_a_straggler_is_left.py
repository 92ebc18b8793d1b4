"""A node whose rank is slower than its replicas is left for a standby and given back, where the config asks
for it; the job ends bit for bit as if it had never been there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from training_jobs import TrainingJob

from tm_slurm.localcluster import LocalCluster

pytestmark = pytest.mark.slurm

STEPS = 260
SLOW_FROM = 60
PAUSE_S = 0.03
POLICY = {"straggler_slower": 0.3, "straggler_steps": 10}


def test_a_slow_node_is_left(
    cluster: LocalCluster, tmp_path: Path, undisturbed: Callable[..., list[str]]
) -> None:
    slow = {"pause_s": PAUSE_S, "slow_at": [1, SLOW_FROM, 2 * PAUSE_S], "policy": POLICY, "steps": STEPS}
    job = TrainingJob.submit(cluster, tmp_path, **slow)
    job.warm(2)
    node = job.active_nodes()[1]
    event = job.note("event_straggler")
    assert event["node"] == node and event["source"] == "agent"
    assert any(step["step"] >= SLOW_FROM for step in job.files.steps())
    job.note("released", node=node)
    assert job.finish() == undisturbed(steps=STEPS, pause_s=PAUSE_S)
    [said] = [
        line
        for line in job.tm_slurm("events", str(job.files.job_dir)).stdout.splitlines()
        if f"{node}: straggler:" in line
    ]
    assert "times as long as its replicas" in said
