"""No standby is left and the config says `shrink`: the survivors do the lost rank's share as well, with the
data and the random numbers that it would have had; when its node is there again, it gets its rank back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from training_jobs import TrainingJob

from tm_slurm.localcluster import LocalCluster
from tm_slurm.runtime.checkpoint import read

pytestmark = pytest.mark.slurm

SHAPE = {"nodes": 3, "standbys": 0, "steps": 700, "pause_s": 0.02, "keep": True}
SHRINKS = {"on_no_standby": ["shrink", "fail"], "checkpoint_every_steps": 25}
CLOSE = 1e-9
"""Sums of float64 in another order, over all steps. A share that is left out, or done with other random
numbers, makes a far larger difference in a single step."""


def parameters(job: TrainingJob, rank: int) -> list[torch.Tensor]:
    found: list[torch.Tensor] = torch.load(job.files.job_dir / f"parameters-{rank}.pt")
    return found


@pytest.fixture(scope="module")
def undisturbed(session_cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> TrainingJob:
    """The same training in which nothing is lost, without the pauses."""
    session_cluster.up()
    directory = tmp_path_factory.mktemp("undisturbed")
    job = TrainingJob.submit(session_cluster, directory, **{**SHAPE, "pause_s": 0.0})
    job.finish()
    return job


def go_on(job: TrainingJob, steps: int) -> None:
    """So many steps more."""
    job.at_step(job.files.steps()[-1]["step"] + steps)


def checkpoint_after(job: TrainingJob, step: int) -> dict[str, Any] | None:
    return next((note for note in job.files.notes("checkpoint") if note["step"] > step), None)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_lost_ranks_share_is_done_by_the_others_until_its_node_comes_back(
    cluster: LocalCluster, tmp_path: Path, undisturbed: TrainingJob, rank: int
) -> None:
    job = TrainingJob.submit(cluster, tmp_path, **SHAPE, policy=SHRINKS)
    job.at_step(30)
    node = job.active_nodes()[rank]
    cluster.unplug(node)
    try:
        shrunk = job.note("shrunk")
        kept = job.until("a checkpoint of fewer", lambda: checkpoint_after(job, shrunk["step"]))
        assert read(Path(kept["path"]), rank).step == kept["step"]
    finally:
        cluster.restore(node)
    assert (shrunk["ranks"], shrunk["nodes"]) == ([rank], [node])
    assert set(shrunk["adopters"]) == {str(rank)}
    grown = job.note("grown")
    assert (grown["ranks"], grown["nodes"]) == ([rank], [node])
    go_on(job, 10)
    job.until("the rank on its node again", lambda: job.seats()[rank] == node)
    digests = job.finish()
    assert len(digests) == 3
    steps = [step["step"] for step in job.files.steps()]
    assert steps == list(range(SHAPE["steps"]))
    for ended in range(3):
        pairs = zip(parameters(job, ended), parameters(undisturbed, ended), strict=True)
        assert max(float((found - expected).abs().max()) for found, expected in pairs) < CLOSE
