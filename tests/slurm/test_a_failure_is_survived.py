"""Unplanned failures on the real cluster: a rank or a node dies, a standby takes over, the end has the same
bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from training_jobs import TrainingJob

from tm_slurm.localcluster import LocalCluster

pytestmark = pytest.mark.slurm
Digests = Callable[..., list[str]]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_replaced(
    cluster: LocalCluster, tmp_path: Path, undisturbed: Digests, rank: int
) -> None:
    job = TrainingJob.submit(cluster, tmp_path, gates=[20])
    job.warm(2)
    node = job.active_nodes()[rank]
    job.at_step(19)
    job.kill_rank(node)
    job.note("recover")
    job.open_gate(20)
    assert job.note("recovered")["pairs"][0]["leaver"] == node
    assert job.finish() == undisturbed()
    assert [step["step"] for step in job.files.steps()] == list(range(60))


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_rank_killed_in_the_first_steps_changes_no_bit(
    cluster: LocalCluster, tmp_path: Path, undisturbed: Digests, step: int, where: str
) -> None:
    """In them a DistributedDataParallel is not yet what it is later; a standby's is already."""
    job = TrainingJob.submit(cluster, tmp_path, nodes=3, standbys=1, die_at=[1, step, where], pause_s=0.02)
    job.note("recovered")
    assert job.finish() == undisturbed(nodes=3)
    assert [done["step"] for done in job.files.steps()] == list(range(60))


def test_ranks_killed_at_any_moment_change_no_bit(
    cluster: LocalCluster, tmp_path: Path, undisturbed: Digests
) -> None:
    shape = {"nodes": 3, "steps": 800, "busy": 200}
    job = TrainingJob.submit(cluster, tmp_path, standbys=3, **shape)
    job.warm(3)
    for number in range(3):
        job.kill_rank(job.seats()[number])
        job.until("it is replaced", lambda: len(job.files.notes("recovered")) > number)  # noqa: B023
        after = job.files.notes("recovered")[-1]["step"]
        job.at_step(after + 7 * (number + 1))
    assert job.finish() == undisturbed(**shape)
    assert [step["step"] for step in job.files.steps()] == list(range(800))


def test_a_node_without_power_is_replaced(
    cluster: LocalCluster, tmp_path: Path, undisturbed: Digests
) -> None:
    job = TrainingJob.submit(cluster, tmp_path, gates=[20])
    job.warm(2)
    node = job.active_nodes()[1]
    job.at_step(19)
    cluster.power_off(node)
    job.note("node_lost", node=node)
    job.open_gate(20)
    job.note("recovered")
    assert job.finish() == undisturbed()
