"""When training is done the job ends by itself, whole, and nothing of it is left on any node."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from training_jobs import TrainingJob, config_text, gates_of_a_move, until

from tm_slurm.cli.jobs import ask_leader
from tm_slurm.localcluster import LocalCluster

pytestmark = pytest.mark.slurm
TEMPLATE = Path(__file__).parents[2] / "sbatch_templates" / "train.sbatch"


def processes_of(job_dir: Path) -> list[str]:
    """Command lines of this machine's processes that name the job's directory, or have it in their
    environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            except OSError:
                continue
            if str(job_dir).encode() in text:
                found.append(f"{entry.name}: {text[:200]!r}")
    return found


def test_no_idle_spare_keeps_the_job_alive(
    cluster: LocalCluster, tmp_path: Path, undisturbed: Callable[..., list[str]]
) -> None:
    job = TrainingJob.submit(cluster, tmp_path)
    assert job.finish() == undisturbed()
    until("no process of the job is left", lambda: not processes_of(job.files.job_dir), 10.0)
    cluster.wait_idle(timeout_s=20.0)
    left = {path.name for path in job.files.job_dir.iterdir() if path.name.startswith(".")}
    assert not left, f"temporary files were left: {left}"
    assert (job.files.job_dir / "secret").stat().st_mode & 0o777 == 0o600


def test_the_sbatch_template_gives_the_same_run(
    cluster: LocalCluster, tmp_path: Path, undisturbed: Callable[..., list[str]]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(config_text(tmp_path))
    words = ["sbatch", "--parsable", "--nodes=4", str(TEMPLATE), str(config)]
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}  # an activated environment
    submitted = cluster.run(words, cwd=tmp_path, env=environment, timeout_s=30.0)
    job_id = int(submitted.stdout.split(";")[0])
    job = TrainingJob(cluster, job_id, tmp_path / str(job_id))
    assert job.finish() == undisturbed()


def test_a_plain_cluster_runs_the_job_too(
    plain_cluster: LocalCluster, tmp_path: Path, undisturbed: Callable[..., list[str]]
) -> None:
    job = TrainingJob.submit(plain_cluster, tmp_path, gates=[*gates_of_a_move(20), 40])
    job.warm(2)
    node = job.active_nodes()[0]
    plain_cluster.drain(node)
    job.note("event_drain", node=node)
    job.pass_gates(20)
    job.note("drained", node=node)
    job.open_gate(40)
    assert job.finish() == undisturbed()


def test_a_crash_in_the_script_ends_the_job_with_its_traceback(cluster: LocalCluster, tmp_path: Path) -> None:
    job = TrainingJob.submit(cluster, tmp_path, crash_at=15)
    verdict = until("the job's verdict", job.files.verdict)
    assert verdict["state"] == "failed" and "rank" in verdict["reason"]
    assert "this batch is broken" in verdict["reason"]
    first = re.search(r"first rank [01] on .* its log: (\S+)\)", verdict["reason"])
    assert first and "this batch is broken" in Path(first[1]).read_text()
    until("Slurm calls the job FAILED", lambda: job.info().state == "FAILED", 20.0)


def test_a_script_that_ends_before_it_trains_frees_the_nodes(cluster: LocalCluster, tmp_path: Path) -> None:
    script = tmp_path / "boom.py"
    script.write_text('raise SystemExit("nothing to do")\n')
    for number in range(3):  # whether an agent comes after the end is a race
        (tmp_path / str(number)).mkdir()
        job = TrainingJob.submit(cluster, tmp_path / str(number), script=script, nodes=4)
        job.until("the job has ended", lambda: job.info().state == "FAILED", 30.0)  # noqa: B023
        verdict = job.files.verdict()
        assert verdict is not None and "before it called tm_slurm.run" in verdict["reason"]
    cluster.wait_idle(timeout_s=20.0)


def test_a_dead_node_that_was_given_back_does_not_keep_the_job_alive(
    cluster: LocalCluster, tmp_path: Path, undisturbed: Callable[..., list[str]]
) -> None:
    """Nobody tells srun any more that its task has ended; Slurm has not noticed the death yet."""
    config = tmp_path / "config.yaml"
    config.write_text(config_text(tmp_path, gates=[20, 40]))
    words = ["sbatch", "--parsable", "--nodes=4", str(TEMPLATE), str(config)]
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    submitted = cluster.run(words, cwd=tmp_path, env=environment, timeout_s=30.0)
    job_id = int(submitted.stdout.split(";")[0])
    job = TrainingJob(cluster, job_id, tmp_path / str(job_id))
    job.warm(2)
    node = job.active_nodes()[1]
    job.at_step(19)
    cluster.power_off(node)
    told = {"kind": "down", "source": "strigger", "node": node, "reason": "test", "at": time.time()}
    answer = ask_leader(job.files.job_dir, {"kind": "event", "event": {"id": f"down/{node}", **told}})
    assert "error" not in answer, answer
    job.open_gate(20)
    job.note("released", node=node)
    assert node not in job.info().nodes
    job.open_gate(40)
    assert job.finish() == undisturbed()
    until("no process of the job is left", lambda: not processes_of(job.files.job_dir), 10.0)
