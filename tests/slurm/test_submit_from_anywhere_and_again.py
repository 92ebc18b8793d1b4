"""A job can be submitted from inside another one, and put back into the queue, however it was submitted."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from training_jobs import TM_SLURM, TrainingJob, config_text, until

from tm_slurm.localcluster import LocalCluster

pytestmark = pytest.mark.slurm
TEMPLATE = Path(__file__).parents[2] / "sbatch_templates" / "train.sbatch"


def submit_by_template(cluster: LocalCluster, directory: Path, **settings: object) -> TrainingJob:
    config = directory / "config.yaml"
    config.write_text(config_text(directory, **settings))
    submitted = cluster.run(
        ["sbatch", "--parsable", "--nodes=4", str(TEMPLATE), str(config)],
        cwd=directory,
        env={"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        timeout_s=30.0,
    )
    job_id = int(submitted.stdout.split(";")[0])
    return TrainingJob(cluster, job_id, directory / str(job_id))


@pytest.mark.parametrize("submit", [TrainingJob.submit, submit_by_template], ids=["submitit", "template"])
def test_a_requeued_job_starts_again_in_its_directory(
    cluster: LocalCluster,
    tmp_path: Path,
    undisturbed: Callable[..., list[str]],
    submit: Callable[..., TrainingJob],
) -> None:
    job = submit(cluster, tmp_path, gates=[20])
    job.note("started")
    secret = (job.files.job_dir / "secret").read_bytes()
    cluster.run(["scontrol", "requeue", str(job.job_id)])
    job.runs_again()
    until("its old verdict is set aside", lambda: not (job.files.job_dir / "verdict.json").exists())
    job.open_gate(20)
    assert job.finish() == undisturbed()
    assert job.info().restarts == 1
    assert (job.files.job_dir / "secret").read_bytes() == secret


def test_a_job_is_submitted_from_inside_another_one(
    cluster: LocalCluster, tmp_path: Path, undisturbed: Callable[..., list[str]]
) -> None:
    """The outer step has its own idea of nodes, tasks, CPUs and bindings: nothing of it may reach the new
    job.
    """
    config = tmp_path / "config.yaml"
    config.write_text(config_text(tmp_path))
    outer = ["srun", "--nodes=1", "--ntasks=1", "--cpus-per-task=3", "--cpu-bind=mask_cpu:0x1", "--wait=1"]
    done = cluster.run([*outer, TM_SLURM, "submit", str(config), "--json"], cwd=tmp_path, timeout_s=60.0)
    answer = json.loads(done.stdout)
    job = TrainingJob(cluster, int(answer["job_id"]), Path(answer["job_dir"]))
    assert job.finish() == undisturbed()


def test_a_template_job_submitted_from_inside_another_one(
    cluster: LocalCluster, tmp_path: Path, undisturbed: Callable[..., list[str]]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(config_text(tmp_path))
    outer = ["srun", "--nodes=1", "--ntasks=1", "--cpus-per-task=3", "--cpu-bind=mask_cpu:0x1", "--wait=1"]
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    words = [*outer, "sbatch", "--parsable", "--nodes=4", str(TEMPLATE), str(config)]
    job_id = int(cluster.run(words, cwd=tmp_path, env=path, timeout_s=60.0).stdout.split(";")[0])
    assert TrainingJob(cluster, job_id, tmp_path / str(job_id)).finish() == undisturbed()


def test_a_job_with_too_few_nodes_ends_at_once_and_says_why(cluster: LocalCluster, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(config_text(tmp_path))
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    words = ["sbatch", "--parsable", "--nodes=1", str(TEMPLATE), str(config)]
    job_id = int(cluster.run(words, cwd=tmp_path, env=path, timeout_s=30.0).stdout.split(";")[0])
    job = TrainingJob(cluster, job_id, tmp_path / str(job_id))
    until("the job has ended", lambda: job.info().is_over, 30.0)
    assert (job.info().state, job.info().exit_code) == ("FAILED", 2)
    assert (tmp_path / f"slurm-{job_id}.out").read_text() == (
        "tm_slurm: the job has 1 nodes, the configuration needs job.nodes 2: use sbatch --nodes=4\n"
    )
