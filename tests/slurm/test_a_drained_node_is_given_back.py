"""The main promise, against real daemons: scontrol drain → ranks moved → node DRAINED → the same bits at the
end."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from training_jobs import TrainingJob, gates_of_a_move, until

from tm_slurm.localcluster import LocalCluster

pytestmark = pytest.mark.slurm
Digests = Callable[..., list[str]]


def drained(cluster: LocalCluster, node: str) -> None:
    cluster.wait_node(node, "IDLE+DRAIN", timeout_s=15.0)


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_a_drained_node_is_left_and_given_back(
    cluster: LocalCluster, tmp_path: Path, undisturbed: Digests, ranks_per_node: int
) -> None:
    job = TrainingJob.submit(
        cluster, tmp_path, ranks_per_node=ranks_per_node, gates=[*gates_of_a_move(20), 40]
    )
    job.warm(2)
    node = job.active_nodes()[1]
    called_at = time.time()
    cluster.drain(node, "disk")
    job.note("event_drain", node=node)
    job.pass_gates(20)
    moved = job.note("moved")
    assert moved["pairs"][0]["leaver"] == node
    assert job.note("drained", node=node)["at"] - called_at <= 6.0
    drained(cluster, node)
    assert job.info().state == "RUNNING"
    job.open_gate(40)
    assert job.finish() == undisturbed(ranks_per_node=ranks_per_node)
    assert node not in job.info().nodes


def test_a_drained_standby_is_given_back_and_training_does_not_stop(
    cluster: LocalCluster, tmp_path: Path, undisturbed: Digests
) -> None:
    job = TrainingJob.submit(cluster, tmp_path, gates=[20])
    job.warm(2)
    batch_host = job.info().batch_host
    standby = next(
        n["node"]
        for n in (job.files.status() or {})["nodes"]
        if n["standing"] == "standby" and n["node"] != batch_host
    )
    cluster.drain(standby)
    job.note("drained", node=standby)
    job.open_gate(20)
    assert job.finish() == undisturbed()
    assert not job.files.notes("moved") and not job.files.notes("switching")


def test_two_nodes_drained_at_once_move_in_one_epoch(
    cluster: LocalCluster, tmp_path: Path, undisturbed: Digests
) -> None:
    job = TrainingJob.submit(cluster, tmp_path, gates=[*gates_of_a_move(20), 40])
    job.warm(2)
    nodes = job.active_nodes()
    cluster.run(["scontrol", "update", f"nodename={','.join(nodes)}", "state=drain", "reason=rack"])
    for node in nodes:
        job.note("event_drain", node=node)
    job.pass_gates(20)
    assert job.note("moved")["epoch"] == 1
    for node in nodes:
        job.note("released", node=node)
    job.open_gate(40)
    assert job.finish() == undisturbed()
    assert len(job.files.notes("moved")) == 1
    for node in nodes:
        drained(cluster, node)


def test_resume_before_the_switch_cancels_the_move(
    cluster: LocalCluster, tmp_path: Path, undisturbed: Digests
) -> None:
    job = TrainingJob.submit(cluster, tmp_path, gates=gates_of_a_move(20))
    job.warm(2)
    node = job.active_nodes()[0]
    job.at_step(19)  # sooner, the move might be done before the first gate
    cluster.drain(node)
    job.note("event_drain", node=node)
    job.let_prepare(20)
    cluster.resume(node)
    job.note("cancelled")
    for step in gates_of_a_move(20):
        job.open_gate(step)
    assert job.finish() == undisturbed()
    assert not job.files.notes("moved") and node in job.info().nodes


def test_more_drains_than_standbys_go_on_and_say_so(
    cluster: LocalCluster, tmp_path: Path, undisturbed: Digests
) -> None:
    job = TrainingJob.submit(cluster, tmp_path, standbys=1, gates=[*gates_of_a_move(20), 40])
    job.warm(1)
    first, second = job.active_nodes()
    cluster.drain(first)
    job.note("event_drain", node=first)
    job.pass_gates(20)
    job.note("moved")
    cluster.drain(second)
    job.note("waiting", node=second)
    until("the job comment says it", lambda: second in (job.info().comment or ""))
    shown = job.tm_slurm("status", str(job.files.job_dir))
    assert "no standby" in shown.stdout and second in shown.stdout
    job.open_gate(40)
    assert job.finish() == undisturbed()


def test_a_drained_batch_host_is_left_but_kept_and_says_why(
    cluster: LocalCluster, tmp_path: Path, undisturbed: Digests
) -> None:
    job = TrainingJob.submit(
        cluster, tmp_path, standbys=1, gates=[*gates_of_a_move(20), *gates_of_a_move(30), 40]
    )
    job.warm(1)
    batch_host = str(job.info().batch_host)
    first = job.active_nodes()[0]
    assert job.standing(batch_host) == "standby"
    asked = job.tm_slurm("migrate", str(job.files.job_dir), "--node", first)
    assert asked.returncode == 0, asked.stderr
    job.pass_gates(20)
    job.note("moved")
    until(
        "the node left is warm again", lambda: len([w for w in job.files.notes("warm") if w["node"] == first])
    )
    cluster.drain(batch_host)
    job.note("event_drain", node=batch_host)
    job.pass_gates(30, moves=2)
    job.note("kept", node=batch_host)
    until("the job comment says it", lambda: "batch host" in (job.info().comment or ""))
    assert "batch host" in job.tm_slurm("status", str(job.files.job_dir)).stdout
    assert "DRAIN" in cluster.node_state(batch_host) and batch_host in job.info().nodes
    job.open_gate(40)
    assert job.finish() == undisturbed()
    drained(cluster, batch_host)
