"""The example in each of its layouts on the real cluster: whichever rank is lost or moved, the end has the
same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
from training_jobs import TrainingJob

from tm_slurm.config import load
from tm_slurm.localcluster import LocalCluster

pytestmark = pytest.mark.slurm
LONG = pytest.mark.layouts
ROOT = Path(__file__).parents[2]
STEPS = 80
TINY = {
    "train__steps": STEPS,
    "train__options__eval_every": 0,
    "train__options__model__width": 16,
    "train__options__model__context": 8,
    "train__options__data__paths": f"[{ROOT / 'README.md'}]",
    # a starved machine must not be taken for a dead one
    "policy__keepalive_s": 10.0,
    "policy__heartbeat_s": 0.2,
}
_UNDISTURBED: dict[str, list[str]] = {}


def start(
    cluster: LocalCluster, directory: Path, name: str, standbys: int, **settings: object
) -> TrainingJob:
    config = ROOT / "configs" / f"{name}.yaml"
    job_dir = directory / f"{name}-{standbys}" / "%j"
    asked = {"job__directory": job_dir, "job__standbys": standbys, **TINY, **settings}
    return TrainingJob.submit_config(cluster, config, **asked)


def undisturbed(cluster: LocalCluster, directory: Path, name: str) -> list[str]:
    if name not in _UNDISTURBED:
        _UNDISTURBED[name] = start(cluster, directory, name, 0).finish(limit_s=200.0)
    return _UNDISTURBED[name]


def lose(job: TrainingJob, rank: int, per_node: int, times: int) -> dict[str, object]:
    """Kill the process that has `rank`, and wait until its place is taken; what was said of that."""
    job.warm(1)
    node = job.seats()[rank]
    job.kill_rank(node, rank % per_node)
    job.until("it is replaced", job.unless_failed(lambda: len(job.files.notes("recovered")) >= times), 150.0)
    recovered = job.files.notes("recovered")[-1]
    job.at_step(int(recovered["step"]) + 3)
    return recovered


@pytest.mark.parametrize(
    ("name", "ranks", "source"),
    [
        pytest.param("char_gpt_shard2", [0, 1], "snapshot", marks=LONG),
        pytest.param("char_gpt_tp2", [1, 0], "snapshot", marks=LONG),
        ("char_gpt_pp2", [0, 1], "snapshot"),
        pytest.param("char_gpt_dp2_shard2", [3], "replicas", marks=LONG),
        pytest.param("char_gpt_dp2_pp4", [0, 6, 3], "replicas", marks=LONG),
        pytest.param("char_gpt_dp2_pp4", [7, 4, 1], "replicas", marks=LONG),
        pytest.param("char_gpt_dp2_tp2_pp2", [0, 5, 3, 6], "replicas", marks=LONG),
        pytest.param("char_gpt_dp2_tp2_pp2", [1, 4, 2, 7], "replicas", marks=LONG),
    ],
)
def test_lost_ranks_change_no_bit(
    cluster: LocalCluster, tmp_path: Path, name: str, ranks: list[int], source: str
) -> None:
    per_node = load(ROOT / "configs" / f"{name}.yaml").job.ranks_per_node
    job = start(cluster, tmp_path, name, 1, policy__snapshot_every_steps=5)
    job.at_step(7)
    for times, rank in enumerate(ranks, 1):
        assert lose(job, rank, per_node, times)["source"] == source
    digests = job.finish(limit_s=200.0)
    assert digests == undisturbed(cluster, tmp_path, name)
    assert len(digests) == len(job.seats())


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        pytest.param("char_gpt_shard2", 1, marks=LONG),
        ("char_gpt_tp2", 0),
        pytest.param("char_gpt_pp2", 1, marks=LONG),
        pytest.param("char_gpt_dp2_pp4", 2, marks=LONG),
        pytest.param("char_gpt_dp2_tp2_pp2", 6, marks=LONG),
    ],
)
def test_a_move_changes_no_bit(cluster: LocalCluster, tmp_path: Path, name: str, rank: int) -> None:
    job = start(cluster, tmp_path, name, 1)
    job.warm(1)
    node = job.seats()[rank]
    asked = job.tm_slurm("migrate", str(job.files.job_dir), "--node", node)
    assert asked.returncode == 0, asked.stderr
    assert job.note("moved")["pairs"][0]["leaver"] == node
    assert job.finish(limit_s=200.0) == undisturbed(cluster, tmp_path, name)
