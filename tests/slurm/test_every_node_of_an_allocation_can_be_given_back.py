"""Launch mode `allocation`: no node is special. Each can be drained, the first and the controller's included,
and nothing stays allocated when training ends or is cancelled, whichever job the user cancels."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from training_jobs import TrainingJob, config_text, gates_of_a_move, until

from tm_slurm.localcluster import LocalCluster
from tm_slurm.observe.follow import JobFiles

pytestmark = pytest.mark.slurm
TEMPLATE = Path(__file__).parents[2] / "sbatch_templates" / "controller.sbatch"


def submit(cluster: LocalCluster, directory: Path, **settings: Any) -> TrainingJob:
    return TrainingJob.submit(cluster, directory, launch="allocation", **settings)


def allocation(job: TrainingJob) -> dict[str, Any]:
    path = job.files.job_dir / "allocation.json"
    return job.until("an allocation", lambda: path.exists() and json.loads(path.read_text()))


def nothing_is_left(cluster: LocalCluster) -> None:
    until("an empty queue", lambda: not cluster.run(["squeue", "--noheader"]).stdout.strip(), 20.0)


def refilled(job: TrainingJob, count: int) -> tuple[str, float]:
    """The node that has come as number `count`, when it is warm, and how long that took from when it was
    asked for."""
    came = job.until(f"node {count}", lambda: job.files.notes("refilled")[count - 1 :])[0]
    node, at = str(came["node"]), came["at"]

    def warm() -> list[dict[str, Any]]:
        return [w for w in job.files.notes("warm") if w["node"] == node and w["at"] > at]

    return node, job.until(f"{node} is warm", warm)[0]["at"] - at + came["seconds"]


def launched(job: TrainingJob) -> dict[str, Any]:
    """What the controller has noted, when training does not need it any more."""
    job.until("the controller has let go", lambda: allocation(job)["launched"])
    return allocation(job)


def test_all_six_nodes_are_drained_one_after_another(wide: LocalCluster, tmp_path: Path) -> None:
    gates = [15 + 10 * number for number in range(6)]
    gated = [step for gate in gates for step in gates_of_a_move(gate)]
    size = {"nodes": 4, "standbys": 2, "steps": 100}
    job = submit(wide, tmp_path, **size, gates=[*gated, 90], policy={"refill": True})
    job.warm(2)
    nodes = [str(entry["node"]) for entry in (job.files.status() or {})["nodes"]]
    controller = job.info().nodes[0]
    assert len(nodes) == 6 and controller in nodes and launched(job)
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
        assert noted["at"] - called_at <= 6.0
        came, refill_s = refilled(job, number)
        print(f"{came} refill_s={refill_s:.2f}")
        wide.resume(node)
    assert allocation(job)["given_back"]
    job.open_gate(90)
    digests = job.finish(limit_s=150.0)
    nothing_is_left(wide)
    assert len(job.files.notes("started")) == 1
    undisturbed = TrainingJob.submit(wide, tmp_path, **{**size, "standbys": 0})
    assert digests == undisturbed.finish()


@pytest.mark.parametrize("which", ["controller", "job_id"])
def test_whichever_job_the_user_cancels_nothing_is_left(
    wide: LocalCluster, tmp_path: Path, which: str
) -> None:
    job = submit(wide, tmp_path, nodes=2, standbys=1, gates=[20])
    job.warm(1)
    wide.run(["scancel", str(launched(job)[which])], timeout_s=10.0)
    nothing_is_left(wide)
    verdict = job.until("a verdict", job.files.verdict)
    assert verdict["state"] == "failed" and "cancelled" in verdict["reason"]


def test_a_requeued_controller_takes_the_same_allocation_up(wide: LocalCluster, tmp_path: Path) -> None:
    job = submit(wide, tmp_path, nodes=2, standbys=1, gates=[20])
    job.warm(1)
    known = launched(job)
    wide.run(["scontrol", "requeue", str(job.job_id)], timeout_s=10.0)
    log = job.files.job_dir / "logs" / "job.log"
    job.until("it goes on", lambda: f"going on with allocation {known['job_id']}" in log.read_text())
    assert allocation(job) == known
    job.open_gate(20)
    assert job.finish() == TrainingJob.submit(wide, tmp_path, nodes=2, standbys=0).finish()
    assert len(job.files.notes("started")) == 1
    nothing_is_left(wide)


def test_a_controller_that_is_lost_is_missed_by_nobody(wide: LocalCluster, tmp_path: Path) -> None:
    job = submit(wide, tmp_path, nodes=2, standbys=1, gates=[20])
    job.warm(1)
    launched(job)
    os.kill(job.agent_pid(job.info().nodes[0]), signal.SIGKILL)  # submitit's process, as an agent's is
    job.until("the controller's job is over", lambda: job.info().is_over)
    assert job.info().state == "FAILED"
    job.open_gate(20)
    job.until("training ends", job.files.verdict)
    nothing_is_left(wide)
    digests = [str(digest) for digest in job.files.notes("trained")[-1]["digests"]]
    assert digests == TrainingJob.submit(wide, tmp_path, nodes=2, standbys=0).finish()


def test_a_job_whose_time_is_over_begins_again_on_another_allocation(
    wide: LocalCluster, tmp_path: Path
) -> None:
    job = submit(wide, tmp_path, nodes=2, standbys=1, gates=[20, 40])
    job.warm(1)
    first = launched(job)
    wide.run(["scancel", "--signal=USR2", str(first["job_id"])], timeout_s=10.0)
    job.note("event_time_limit")
    job.open_gate(20)
    job.until("another allocation", lambda: allocation(job)["job_id"] != first["job_id"])
    assert launched(job)["attempt"] == 1
    job.open_gate(40)
    assert job.finish() == TrainingJob.submit(wide, tmp_path, nodes=2, standbys=0).finish()
    nothing_is_left(wide)


def test_the_template_and_a_shell_control_a_job_as_well(wide: LocalCluster, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(config_text(tmp_path, nodes=2, standbys=1))
    command = ["sbatch", "--parsable", f"--output={tmp_path}/%j.out", str(TEMPLATE), str(config)]
    submitted = wide.run(command, env={"TM_SLURM_PYTHON": sys.executable}, timeout_s=20.0)
    job = TrainingJob(wide, int(submitted.stdout), tmp_path / submitted.stdout.strip())
    digests = job.finish()
    nothing_is_left(wide)
    command = [sys.executable, "-m", "tm_slurm.submit.controller", str(config), "train.steps=60"]
    done = wide.run(command, timeout_s=90.0)
    assert "tm_slurm: completed" in done.stdout
    nothing_is_left(wide)
    (directory,) = tmp_path.glob("shell-*")
    assert [str(d) for d in JobFiles(directory).notes("trained")[-1]["digests"]] == digests
