"""Reservations, FAIL and reboots, against real daemons: the job is out of the way before they come, and the
end has the same bits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster_names import own_name
from training_jobs import TrainingJob, gates_of_a_move, until

from tm_slurm.localcluster import LocalCluster
from tm_slurm.slurm.scontrol_text import parse_jobs

pytestmark = pytest.mark.slurm
Digests = Callable[..., list[str]]

LEAD_S = 60.0
STOP_LEAD_S = 5


def reserve(
    cluster: LocalCluster, nodes: str, starts_in_s: float, *flags: str, name: str = "window"
) -> float:
    """Create a reservation of an hour; when it begins, in Unix seconds."""
    starts = f"starttime=now+{starts_in_s:.0f}seconds"
    words = ["scontrol", "create", "reservation", f"reservationname={name}", f"nodes={nodes}", starts]
    cluster.run([*words, "duration=60", "users=root", f"flags={','.join(flags)}"], timeout_s=20.0)
    return time.time() + starts_in_s


def delete(cluster: LocalCluster, name: str = "window") -> None:
    cluster.run(["scontrol", "delete", f"reservationname={name}"], timeout_s=20.0)


def begins_at(job: TrainingJob) -> float:
    """When a job in the queue is to start, in Unix seconds."""
    show = ["scontrol", "-o", "show", "job", str(job.job_id)]
    (info,) = parse_jobs(job.cluster.run(show, env={"SLURM_TIME_FORMAT": "%s"}, timeout_s=20.0).stdout)
    assert info.start_time is not None
    return info.start_time


def is_free(cluster: LocalCluster, node: str) -> bool:
    return not {"ALLOCATED", "MIXED", "COMPLETING"} & set(cluster.node_state(node).split("+"))


def test_a_node_is_free_before_its_window_opens(
    cluster: LocalCluster, tmp_path: Path, undisturbed: Digests
) -> None:
    job = TrainingJob.submit(
        cluster, tmp_path, gates=[*gates_of_a_move(20), 40], policy={"window_lead_s": LEAD_S}
    )
    job.warm(2)
    node = job.active_nodes()[1]
    opens = reserve(cluster, node, LEAD_S, "maint", "ignore_jobs")
    noticed = job.note("event_maintenance", node=node)
    assert noticed["source"] == "poll" and "window" in noticed["reason"]
    job.pass_gates(20)
    moved = job.note("moved")
    assert [pair["leaver"] for pair in moved["pairs"]] == [node]
    job.note("released", node=node)
    job.note("drained", node=node)
    assert is_free(cluster, node) and time.time() < opens
    assert job.info().state == "RUNNING" and node not in job.info().nodes
    job.open_gate(40)
    assert job.finish() == undisturbed()


def test_a_window_that_is_deleted_cancels_the_move(
    cluster: LocalCluster, tmp_path: Path, undisturbed: Digests
) -> None:
    job = TrainingJob.submit(cluster, tmp_path, gates=gates_of_a_move(20), policy={"window_lead_s": LEAD_S})
    job.warm(2)
    node = job.active_nodes()[0]
    job.at_step(19)  # sooner, the move might be done before the first gate
    reserve(cluster, node, LEAD_S - 10, "maint", "ignore_jobs")
    job.note("event_maintenance", node=node)
    job.let_prepare(20)
    delete(cluster)
    job.note("cancelled")
    for step in gates_of_a_move(20):
        job.open_gate(step)
    assert job.finish() == undisturbed()
    assert not job.files.notes("moved") and node in job.info().nodes


def test_the_whole_job_in_a_window_goes_back_into_the_queue_until_it_has_closed(
    cluster: LocalCluster, tmp_path: Path, undisturbed: Digests
) -> None:
    policy = {"window_lead_s": LEAD_S}
    job = TrainingJob.submit(
        cluster, tmp_path, gates=[20], signal_delay_s=STOP_LEAD_S, policy=policy, time_limit=600
    )
    job.warm(2)
    reserve(cluster, ",".join(cluster.node_names), 3600.0, "maint", "ignore_jobs")
    job.note("window")
    assert not job.files.notes("event_maintenance"), "there is time until the checkpoint has to be begun"
    cluster.run(["scontrol", "update", "reservationname=window", f"starttime=now+{STOP_LEAD_S}seconds"])
    opens = time.time() + STOP_LEAD_S
    job.note("event_maintenance")
    job.open_gate(20)  # the boundary at which the checkpoint is taken
    job.note("ended", state="requeue")
    assert not job.files.notes("moved")
    job.until("all nodes are free", lambda: all(is_free(cluster, n) for n in cluster.node_names))
    job.until("the job waits", lambda: job.info().state == "PENDING")
    assert begins_at(job) >= opens + 3600 - 5
    checkpoint = int(job.files.notes("checkpoint")[-1]["step"])
    assert 0 < checkpoint <= 60
    delete(cluster)  # the work was done early
    job.runs_again()
    assert job.finish() == undisturbed()
    assert job.note("checkpoint_found")["step"] == checkpoint


def test_a_node_in_fail_is_left_like_a_drained_one(
    cluster: LocalCluster, tmp_path: Path, undisturbed: Digests
) -> None:
    job = TrainingJob.submit(cluster, tmp_path, gates=[*gates_of_a_move(20), 40])
    job.warm(2)
    node = job.active_nodes()[0]
    cluster.run(["scontrol", "update", f"nodename={node}", "state=fail", "reason=disk"])
    job.note("event_fail", node=node)
    job.pass_gates(20)
    job.note("drained", node=node)
    assert is_free(cluster, node) and "FAIL" in cluster.node_state(node)
    job.open_gate(40)
    assert job.finish() == undisturbed()


@pytest.fixture
def rebooting_cluster() -> Iterator[LocalCluster]:
    """A cluster whose nodes can be asked to reboot. Its program does nothing: nothing is to be rebooted."""
    conf = "RebootProgram=/bin/true\nResumeTimeout=600"
    with LocalCluster(nodes=4, mode="namespaces", name=own_name("reboot"), extra_conf=conf) as cluster:
        yield cluster


def test_a_node_that_is_asked_to_reboot_is_left_and_given_back(
    rebooting_cluster: LocalCluster, tmp_path: Path
) -> None:
    cluster = rebooting_cluster
    job = TrainingJob.submit(cluster, tmp_path, gates=[*gates_of_a_move(20), 40])
    job.warm(2)
    node = job.active_nodes()[1]
    cluster.run(["scontrol", "reboot", "ASAP", "reason=kernel", node])
    job.note("event_reboot", node=node)
    job.pass_gates(20)
    job.note("released", node=node)
    until("the node is free", lambda: is_free(cluster, node))
    job.open_gate(40)
    job.finish()
