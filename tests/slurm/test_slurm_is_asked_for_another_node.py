"""Nodes that were given back are replaced: Slurm is asked for another one each time, it joins the job that
runs, and nothing is left in the queue when training ends, however it ends."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from training_jobs import TrainingJob, gates_of_a_move, until

from tm_slurm.coordinator.allocation import Allocation
from tm_slurm.localcluster import LocalCluster

pytestmark = pytest.mark.slurm


def queue(cluster: LocalCluster) -> list[str]:
    """Name and state of all jobs that are not over."""
    said = cluster.run(["squeue", "--noheader", "--format=%i %T %N %j"], timeout_s=10.0).stdout
    return [line for line in said.splitlines() if "COMPLETING" not in line]


def allocation_of(job: TrainingJob) -> int:
    """The job that holds the nodes."""
    known = Allocation.read(job.files.job_dir)
    return job.job_id if known is None else known.job_id


def standby_jobs(cluster: LocalCluster, job: TrainingJob) -> list[str]:
    return [line for line in queue(cluster) if f"tm-standby-{allocation_of(job)}." in line]


def nothing_is_left(cluster: LocalCluster) -> None:
    until("an empty queue", lambda: not queue(cluster), 20.0)


def test_three_nodes_drained_one_after_another_are_replaced_each_time(
    wide: LocalCluster, tmp_path: Path
) -> None:
    size = {"nodes": 3, "standbys": 1, "steps": 80}
    gates = [20, 35, 50]
    gated = [step for gate in gates for step in gates_of_a_move(gate)]
    job = TrainingJob.submit(wide, tmp_path, **size, gates=[*gated, 65], policy={"refill": True})
    job.warm(1)
    left = job.active_nodes()
    for number, (node, gate) in enumerate(zip(left, gates, strict=True), 1):
        called_at = time.time()
        wide.drain(node, "disk")
        job.note("event_drain", node=node)
        job.pass_gates(gate, moves=number)
        drained = job.note("drained", node=node)
        assert drained["at"] - called_at <= 6.0
        wide.wait_node(node, "IDLE+DRAIN", timeout_s=5.0)
        came = job.until("another node", lambda: job.files.notes("refilled")[number - 1 :])[0]  # noqa: B023
        assert came["node"] not in left
        job.note("warm", node=came["node"])
        print(f"drained_s={drained['at'] - called_at:.2f} refill_s={came['seconds']:.2f}")
    assert len(job.files.notes("asked")) == 3
    assert len(standby_jobs(wide, job)) == 3
    job.open_gate(65)
    digests = job.finish()
    nothing_is_left(wide)
    assert len(job.files.notes("leads")) == 1
    assert digests == TrainingJob.submit(wide, tmp_path, **{**size, "standbys": 0}).finish()


def is_free(cluster: LocalCluster, node: str) -> bool:
    state = cluster.node_state(node)
    return "IDLE" in state and "DRAIN" not in state


def leave_nothing_free(cluster: LocalCluster) -> None:
    """What is asked for now waits in the queue."""
    for name in (f"n{number}" for number in range(1, 9)):
        if is_free(cluster, name):
            cluster.drain(name, "not for this test")


def refilled(job: TrainingJob, count: int) -> str:
    """The node that has come as number `count`, when it is warm."""
    came = job.until(f"node {count}", lambda: job.files.notes("refilled")[count - 1 :])[0]
    node, at = str(came["node"]), came["at"]

    def warm() -> list[dict[str, Any]]:
        return [w for w in job.files.notes("warm") if w["node"] == node and w["at"] > at]

    job.until(f"{node} is warm", warm)
    return node


def that_waits_for_a_node(cluster: LocalCluster, folder: Path, **size: Any) -> TrainingJob:
    """A job on two nodes that has left one for its standby, and whose standby job is in the queue."""
    gates = [*gates_of_a_move(20), 40]
    job = TrainingJob.submit(
        cluster, folder, nodes=2, standbys=1, **size, gates=gates, policy={"refill": True}
    )
    job.warm(1)
    leave_nothing_free(cluster)
    node = job.active_nodes()[0]
    cluster.drain(node)
    job.note("event_drain", node=node)
    job.pass_gates(20)
    job.note("standby_job")
    return job


def test_a_new_leader_does_not_ask_again_for_what_is_in_the_queue(wide: LocalCluster, tmp_path: Path) -> None:
    job = that_waits_for_a_node(wide, tmp_path)
    assert len(standby_jobs(wide, job)) == 1 and "PENDING" in standby_jobs(wide, job)[0]
    leader = job.agent_pid(str(job.files.notes("leads")[0]["node"]))
    os.kill(leader, signal.SIGSTOP)
    try:
        job.until("another leader", lambda: len(job.files.notes("leads")) > 1)
    finally:
        os.kill(leader, signal.SIGCONT)
    wide.resume("n8")
    assert refilled(job, 1) == "n8"
    assert len(standby_jobs(wide, job)) == 1 and len(job.files.notes("asked")) == 1
    job.open_gate(40)
    digests = job.finish()
    nothing_is_left(wide)
    assert digests == TrainingJob.submit(wide, tmp_path, nodes=2, standbys=0).finish()


def test_a_node_of_a_standby_job_is_given_back_too_and_a_resumed_one_comes_again(
    wide: LocalCluster, tmp_path: Path
) -> None:
    gates = [15, 25, 35]
    gated = [step for gate in gates for step in gates_of_a_move(gate)]
    job = TrainingJob.submit(wide, tmp_path, nodes=2, standbys=1, gates=[*gated, 50], policy={"refill": True})
    job.warm(1)
    first, second = job.active_nodes()
    wide.drain(first)
    job.note("event_drain", node=first)
    job.pass_gates(15, moves=1)
    came = refilled(job, 1)
    leave_nothing_free(wide)
    wide.drain(second)
    job.note("event_drain", node=second)
    job.pass_gates(25, moves=2)
    job.until("a rank is there", lambda: came in job.seats())
    job.until("another is asked for", lambda: len(job.files.notes("standby_job")) == 2)
    wide.resume(first)
    assert refilled(job, 2) == first
    called_at = time.time()
    wide.drain(came)
    job.note("event_drain", node=came)
    job.pass_gates(35, moves=3)
    assert job.note("drained", node=came)["at"] - called_at <= 6.0
    wide.wait_node(came, "IDLE+DRAIN", timeout_s=5.0)
    assert first in job.seats()
    job.open_gate(50)
    digests = job.finish()
    nothing_is_left(wide)
    assert digests == TrainingJob.submit(wide, tmp_path, nodes=2, standbys=0).finish()


def test_when_the_user_cancels_the_job_the_nodes_it_asked_for_go_with_it(
    wide: LocalCluster, tmp_path: Path
) -> None:
    """One that has joined, and one that waits in the queue."""
    gated = [*gates_of_a_move(20), *gates_of_a_move(30), 40]
    job = TrainingJob.submit(wide, tmp_path, nodes=2, standbys=1, gates=gated, policy={"refill": True})
    job.warm(1)
    first, second = job.active_nodes()
    for number, (node, gate) in enumerate([(first, 20), (second, 30)], 1):
        wide.drain(node)
        job.note("event_drain", node=node)
        job.pass_gates(gate, moves=number)
        if number == 1:
            refilled(job, 1)
            leave_nothing_free(wide)
    job.until("another is asked for", lambda: len(job.files.notes("standby_job")) == 2)
    assert len(standby_jobs(wide, job)) == 2
    wide.run(["scancel", str(job.job_id)], timeout_s=10.0)
    nothing_is_left(wide)


def test_a_job_that_is_killed_leaves_no_node_that_it_asked_for(wide: LocalCluster, tmp_path: Path) -> None:
    """Nobody of the training job is left to cancel anything: the node that has joined does."""
    gated = [*gates_of_a_move(20), *gates_of_a_move(30), 40]
    job = TrainingJob.submit(wide, tmp_path, nodes=2, standbys=1, gates=gated, policy={"refill": True})
    job.warm(1)
    first, second = job.active_nodes()
    wide.drain(first)
    job.note("event_drain", node=first)
    job.pass_gates(20, moves=1)
    refilled(job, 1)
    leave_nothing_free(wide)
    wide.drain(second)
    job.note("event_drain", node=second)
    job.pass_gates(30, moves=2)
    job.until("another is asked for", lambda: len(job.files.notes("standby_job")) == 2)
    wide.run(["scancel", "--signal=KILL", str(job.job_id)], timeout_s=10.0)
    nothing_is_left(wide)


@pytest.mark.parametrize("launch", ["batch", "allocation"])
def test_a_job_that_is_killed_before_any_node_has_come_leaves_nothing_in_the_queue(
    wide: LocalCluster, tmp_path: Path, launch: str
) -> None:
    """Nobody at all is left to cancel what waits: Slurm itself starts the sweeper then."""
    job = that_waits_for_a_node(wide, tmp_path, launch=launch)
    until("a sweeper waits", lambda: any("tm-sweeper-" in line for line in queue(wide)), 30.0)
    assert ["PENDING" in line for line in standby_jobs(wide, job)] == [True]
    if launch == "allocation":  # and the controller is lost as well
        os.kill(job.agent_pid(job.info().nodes[0]), signal.SIGKILL)
        until("the controller's job is over", lambda: job.info().is_over)
    killed = str(allocation_of(job))
    wide.run(["scancel", "--signal=KILL", killed], timeout_s=10.0)
    nothing_is_left(wide)


def test_a_standby_job_that_is_cancelled_takes_only_its_node_along(
    wide: LocalCluster, tmp_path: Path
) -> None:
    gated = [*gates_of_a_move(20), *gates_of_a_move(30), 40]
    job = TrainingJob.submit(wide, tmp_path, nodes=2, standbys=1, gates=gated, policy={"refill": True})
    job.warm(1)
    for number, (node, gate) in enumerate(zip(job.active_nodes(), (20, 30), strict=True), 1):
        wide.drain(node)
        job.note("event_drain", node=node)
        job.pass_gates(gate, moves=number)
        refilled(job, number)
    came = job.files.notes("refilled")[0]
    assert came["node"] in job.seats()
    wide.run(["scancel", str(came["job"])], timeout_s=10.0)
    job.note("node_lost", node=came["node"])
    job.open_gate(40)  # a rank that waits there cannot be interrupted
    job.note("recovered")
    digests = job.finish()
    nothing_is_left(wide)
    assert digests == TrainingJob.submit(wide, tmp_path, nodes=2, standbys=0).finish()


def test_an_elastic_job_holds_no_standby_and_asks_when_one_is_needed(
    wide: LocalCluster, tmp_path: Path
) -> None:
    gated = [*gates_of_a_move(20), 40]
    job = TrainingJob.submit(wide, tmp_path, nodes=2, standbys=0, gates=gated, policy={"elastic": True})
    job.note("started")
    leave_nothing_free(wide)
    node = next(name for name in job.active_nodes() if name != job.info().batch_host)
    wide.drain(node)
    job.note("standby_job", ask=1)
    job.note("waiting", node=node)
    wide.resume(node)
    job.note("ask_withdrawn", ask=1)
    job.until("nothing is asked for", lambda: not standby_jobs(wide, job), 20.0)
    wide.drain(node)
    job.note("standby_job", ask=2)
    wide.resume("n8")
    job.note("refilled", node="n8")
    job.pass_gates(20)
    job.note("drained", node=node)
    assert "n8" in job.seats()
    job.open_gate(40)
    digests = job.finish()
    nothing_is_left(wide)
    assert digests == TrainingJob.submit(wide, tmp_path, nodes=2, standbys=0).finish()
