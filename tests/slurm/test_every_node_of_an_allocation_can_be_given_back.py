"""Launch mode `allocation`: no node is special. Each can be drained, the first and the controller's included,
and nothing stays allocated when training ends or is cancelled, whichever job the user cancels."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_names import own_name
from training_jobs import TrainingJob, gates_of_a_move, until

from tm_slurm.localcluster import LocalCluster

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def module_wide_cluster() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=8, mode="namespaces", name=own_name("whole")) as cluster:
        yield cluster


@pytest.fixture
def wide(module_wide_cluster: LocalCluster) -> Iterator[LocalCluster]:
    """Eight nodes, each a host of its own, put back in order after each test."""
    module_wide_cluster.up()
    yield module_wide_cluster
    module_wide_cluster.reset()


def submit(cluster: LocalCluster, directory: Path, **settings: Any) -> TrainingJob:
    return TrainingJob.submit(cluster, directory, launch="allocation", **settings)


def allocation(job: TrainingJob) -> dict[str, Any]:
    path = job.files.job_dir / "allocation.json"
    return job.until("an allocation", lambda: path.exists() and json.loads(path.read_text()))


def nothing_is_left(cluster: LocalCluster) -> None:
    until("an empty queue", lambda: not cluster.run(["squeue", "--noheader"]).stdout.strip(), 20.0)


def test_all_six_nodes_are_drained_one_after_another(wide: LocalCluster, tmp_path: Path) -> None:
    gates = [15 + 10 * number for number in range(6)]
    gated = [step for gate in gates for step in gates_of_a_move(gate)]
    size = {"nodes": 4, "standbys": 2, "steps": 100}
    job = submit(wide, tmp_path, **size, gates=[*gated, 90], policy={"refill": True})
    job.warm(2)
    nodes = [str(entry["node"]) for entry in (job.files.status() or {})["nodes"]]
    controller = job.info().nodes[0]
    assert len(nodes) == 6 and job.until("launched", lambda: allocation(job)["launched"])
    moves = 0
    for number, (node, gate) in enumerate(zip(nodes, gates, strict=True), 1):
        moves += node in job.seats()
        called_at = time.time()
        wide.drain(node, "disk")
        job.note("event_drain", node=node)
        job.pass_gates(gate, moves=moves)
        noted = job.note("drained", node=node)
        wide.wait_node(node, "IDLE+DRAIN", timeout_s=5.0)
        print(f"{node} drained_s={noted['at'] - called_at:.2f} controller={node == controller}")
        assert noted["at"] - called_at < 15.0
        came = job.until("another node", lambda: job.files.notes("refilled")[number - 1 :])[0]  # noqa: B023
        print(f"{came['node']} refill_s={came['seconds']:.2f}")
        wide.resume(node)
    assert allocation(job)["given_back"]
    job.open_gate(90)
    digests = job.finish(limit_s=150.0)
    nothing_is_left(wide)
    assert len(job.files.notes("started")) == 1
    undisturbed = TrainingJob.submit(wide, tmp_path, **{**size, "standbys": 0})
    assert digests == undisturbed.finish()
