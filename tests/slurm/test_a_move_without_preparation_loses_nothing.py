"""A planned move whose standby has not warmed up, and one for which all groups are made anew, end with the
same bits: what they cost is measured beside ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from training_jobs import TrainingJob, config_text, gates_of_a_move

from tm_slurm.localcluster import LocalCluster

pytestmark = pytest.mark.slurm


@pytest.mark.parametrize("switches", [{}, {"comm": {"delta_groups": False}}], ids=["cold", "naive"])
def test_a_move_without_preparation_ends_with_the_same_bits(
    cluster: LocalCluster,
    tmp_path: Path,
    undisturbed: Callable[..., list[str]],
    switches: dict[str, Any],
) -> None:
    whole = json.loads(config_text(tmp_path, gates=[*gates_of_a_move(20), 40]))
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({**whole, **switches, "standby": {"warm_up": False}}))
    job = TrainingJob.submit_config(cluster, config)
    job.warm(2)
    node = job.active_nodes()[1]
    cluster.drain(node, "disk")
    job.note("event_drain", node=node)
    job.pass_gates(20)
    moved = job.note("moved")
    assert moved["pairs"][0]["leaver"] == node
    warm = [entry for entry in job.files.notes("warm") if entry["node"] == moved["pairs"][0]["joiner"]]
    assert all(entry["seconds"] == 0 for entry in warm), "nothing was done ahead"
    job.open_gate(40)
    assert job.finish() == undisturbed()
