"""A training with a DataLoader whose worker process reads ahead, a gradient scaler and mixed precision: moved
and recovered, it ends with the same bits, and its worker processes end with their rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from training_jobs import SCRIPT, TrainingJob, gates_of_a_move, until

from tm_slurm.localcluster import LocalCluster

pytestmark = pytest.mark.slurm
Digests = Callable[..., list[str]]

LOADER = {"script": SCRIPT.with_name("loader_training.py")}


def test_a_rank_with_a_data_loader_is_moved(
    cluster: LocalCluster, tmp_path: Path, undisturbed: Digests
) -> None:
    job = TrainingJob.submit(cluster, tmp_path, standbys=1, gates=gates_of_a_move(20), **LOADER)
    job.warm(1)
    node = job.active_nodes()[1]
    job.at_step(19)
    cluster.drain(node, "disk")
    job.note("event_drain", node=node)
    job.pass_gates(20)
    assert job.note("moved")["pairs"][0]["leaver"] == node
    cluster.wait_node(node, "IDLE+DRAIN", timeout_s=20.0)
    assert job.finish() == undisturbed(**LOADER)


def test_a_killed_rank_with_a_data_loader_is_replaced(
    cluster: LocalCluster, tmp_path: Path, undisturbed: Digests
) -> None:
    job = TrainingJob.submit(cluster, tmp_path, standbys=1, gates=[20, 40], **LOADER)
    job.warm(1)
    node = job.active_nodes()[1]
    job.at_step(19)
    before = job.rank_pids(node)
    assert len(before) > 1
    job.kill_rank(node)
    job.note("recover")
    job.open_gate(20)
    job.note("recovered")
    job.at_step(39)
    until("its worker processes end", lambda: not before & job.rank_pids(node), 20.0)
    job.open_gate(40)
    assert job.finish() == undisturbed(**LOADER)
