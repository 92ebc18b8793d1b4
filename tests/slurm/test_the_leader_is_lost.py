"""Whoever leads may be lost, in any way and at any moment, on real daemons: another agent leads, training
ends with the same bits, and stands still no longer than it must."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from training_jobs import TrainingJob, gates_of_a_move

from tm_slurm.coordinator.election import LeaderFile
from tm_slurm.localcluster import LocalCluster

pytestmark = pytest.mark.slurm
Digests = Callable[..., list[str]]

KEEPALIVE_S = 3.0
LEASE_S = 2.0
NOT_A_PAUSE_S = 1.5
"""Between two steps of a machine that has other things to do; far less than a lease."""

LAST_GATE = 200
STEPS = LAST_GATE + 10
PACE: dict[str, Any] = {"steps": STEPS, "pause_s": 0.05}
"""Training for 10 s or more, so that a leader can be lost and found in the midst of it; and until `LAST_GATE`
is opened."""


def submit(cluster: LocalCluster, directory: Path, **settings: Any) -> TrainingJob:
    policy = {"keepalive_s": KEEPALIVE_S, "lease_s": LEASE_S}
    job = TrainingJob.submit(cluster, directory, policy=policy, **settings)
    job.warm(2)
    return job


def leader(job: TrainingJob) -> LeaderFile:
    """Who leads now."""
    known = LeaderFile.read(job.files.job_dir)
    assert known is not None
    return known


def next_leader(job: TrainingJob, lost: LeaderFile) -> LeaderFile:
    """Wait until somebody else leads, and has said so."""
    job.until(
        "another leader", lambda: any(entry["term"] > lost.term for entry in job.files.notes("leads")), 30.0
    )
    found = leader(job)
    assert found.node != lost.node
    return found


def pauses(job: TrainingJob) -> list[float]:
    """Seconds between the steps that the job has committed, of rank 0, before the last gate."""
    at = [float(step["at"]) for step in job.files.steps() if step["step"] < LAST_GATE]
    return [later - earlier for earlier, later in itertools.pairwise(at)]


def no_step_is_missing(job: TrainingJob, steps: int = STEPS) -> None:
    assert [step["step"] for step in job.files.steps()] == list(range(steps))


def ended_without_its_batch_script(cluster: LocalCluster, job: TrainingJob, dead: str) -> None:
    """The leader has ended the Slurm job, which says how it ended, and every node that lives is free."""
    job.until("the job is over in Slurm", lambda: job.info().is_over, 30.0)
    info = job.info()
    assert info.state == "CANCELLED" and "completed" in info.comment and dead in info.comment
    for node in cluster.node_names:
        if node != dead:
            cluster.wait_node(node, lambda flags: "IDLE" in flags, timeout_s=20.0)


def digests_of(job: TrainingJob) -> list[str]:
    """Wait for a good end, whatever Slurm calls it; the digest of every rank."""
    job.open_gate(LAST_GATE)
    verdict = job.until("the job's verdict", job.files.verdict)
    assert verdict["state"] == "completed", f"{verdict}\n{job.story()}"
    return [str(digest) for digest in job.files.notes("trained")[-1]["digests"]]


def test_its_agent_is_killed(cluster: LocalCluster, tmp_path: Path, undisturbed: Digests) -> None:
    job = submit(cluster, tmp_path, gates=[LAST_GATE], **PACE)
    first = leader(job)
    assert first.node == job.info().batch_host and job.standing(first.node) == "standby"
    job.at_step(40)
    os.kill(job.agent_pid(first.node), signal.SIGKILL)
    next_leader(job, first)
    job.note("node_lost", node=first.node)
    job.open_gate(LAST_GATE)
    assert job.finish() == undisturbed(steps=STEPS)
    assert max(pauses(job)[2:]) < NOT_A_PAUSE_S and not job.files.notes("recover")
    no_step_is_missing(job)


@pytest.mark.parametrize("silent", [False, True])
def test_the_batch_host_is_powered_off(
    cluster: LocalCluster, tmp_path: Path, undisturbed: Digests, silent: bool
) -> None:
    job = submit(cluster, tmp_path, gates=[LAST_GATE], **PACE)
    first = leader(job)
    assert first.node == job.info().batch_host
    job.at_step(40)
    began = time.time()
    cluster.power_off(first.node, silent=silent)
    second = next_leader(job, first)
    print(f"another leader after {job.note('leads', term=second.term)['at'] - began:.2f} s")
    assert digests_of(job) == undisturbed(steps=STEPS)
    assert max(pauses(job)[2:]) < NOT_A_PAUSE_S and not job.files.notes("recover")
    no_step_is_missing(job)
    ended_without_its_batch_script(cluster, job, first.node)


def lead_with_a_rank(job: TrainingJob) -> LeaderFile:
    """Have the leader's node, the batch host, take over a rank: the other standby is drained first, so that
    it is the only one left. Expects the gates of a move at 20, and one at 25."""
    batch_host = leader(job).node
    others = [n["node"] for n in (job.files.status() or {})["nodes"] if n["standing"] == "standby"]
    (other,) = [node for node in others if node != batch_host]
    job.cluster.drain(other)
    job.note("released", node=other)
    asked = job.tm_slurm("migrate", str(job.files.job_dir), "--node", job.active_nodes()[1])
    assert asked.returncode == 0, asked.stderr
    job.pass_gates(20)
    assert job.note("moved")["pairs"][0]["joiner"] == batch_host
    left = job.active_nodes()[1]
    job.until("the node left is warm again", lambda: is_warm(job, left))
    assert job.standing(batch_host) == "active"
    job.open_gate(25)
    return leader(job)


def is_warm(job: TrainingJob, node: str) -> bool:
    nodes = (job.files.status() or {"nodes": []})["nodes"]
    return any(n["node"] == node and n["standing"] == "standby" and n["warm"] for n in nodes)


@pytest.mark.parametrize("how", ["powered off", "unplugged", "frozen"])
def test_its_node_has_a_rank(cluster: LocalCluster, tmp_path: Path, undisturbed: Digests, how: str) -> None:
    job = submit(cluster, tmp_path, gates=[*gates_of_a_move(20), 25, LAST_GATE], **PACE)
    first = lead_with_a_rank(job)
    job.at_step(60)
    rank = job.rank_pid(first.node)
    began = time.time()
    break_it, mend_it = {
        "powered off": (cluster.power_off, None),
        "unplugged": (cluster.unplug, cluster.plug_in),
        "frozen": (cluster.freeze, cluster.thaw),
    }[how]
    break_it(first.node)
    second = next_leader(job, first)
    job.note("recovered")
    print(f"{how}: another leader after {job.note('leads', term=second.term)['at'] - began:.2f} s")
    if mend_it is not None:
        mend_it(first.node)
        job.until("what ran there has been ended", lambda: not Path(f"/proc/{rank}").exists(), 20.0)
    assert digests_of(job) == undisturbed(steps=STEPS)
    print(f"{how}: training stood still for {max(pauses(job)[25:]):.2f} s")
    assert len(job.files.notes("recovered")) == 1
    no_step_is_missing(job)


def test_it_is_frozen_and_thawed(cluster: LocalCluster, tmp_path: Path, undisturbed: Digests) -> None:
    job = submit(cluster, tmp_path, gates=[LAST_GATE], **PACE)
    first = leader(job)
    agent = job.agent_pid(first.node)
    job.at_step(40)
    os.kill(agent, signal.SIGSTOP)
    try:
        next_leader(job, first)
        job.note("node_lost", node=first.node)
    finally:
        os.kill(agent, signal.SIGCONT)
    job.until("the one that was frozen stands by again", lambda: is_warm(job, first.node))
    job.open_gate(LAST_GATE)
    assert job.finish() == undisturbed(steps=STEPS)
    assert [entry["term"] for entry in job.files.notes("leads")] == [1, 2]
    assert "outcome=deposed" in (job.files.job_dir / "logs" / f"agent-{first.node}.log").read_text()
    assert max(pauses(job)[2:]) < NOT_A_PAUSE_S and not job.files.notes("recover")
    no_step_is_missing(job)


def test_its_node_is_unplugged(cluster: LocalCluster, tmp_path: Path, undisturbed: Digests) -> None:
    """It can still write the job's directory, and declares nobody lost."""
    job = submit(cluster, tmp_path, gates=[LAST_GATE], **PACE)
    first = leader(job)
    job.at_step(40)
    cluster.unplug(first.node)
    next_leader(job, first)
    job.note("node_lost", node=first.node)
    cluster.plug_in(first.node)
    job.until("the one that was cut off stands by again", lambda: is_warm(job, first.node))
    job.open_gate(LAST_GATE)
    assert job.finish() == undisturbed(steps=STEPS)
    assert [entry["node"] for entry in job.files.notes("cut_off")] == [first.node]
    assert [entry["node"] for entry in job.files.notes("node_lost")] == [first.node]
    assert max(pauses(job)[2:]) < NOT_A_PAUSE_S and not job.files.notes("recover")
    no_step_is_missing(job)


@pytest.mark.parametrize("phase", ["preparing", "armed"])
def test_a_move_is_under_way(cluster: LocalCluster, tmp_path: Path, undisturbed: Digests, phase: str) -> None:
    job = submit(cluster, tmp_path, gates=[*gates_of_a_move(20), 40])
    first = leader(job)
    left = job.active_nodes()[0]
    cluster.drain(left)
    job.note("prepare")
    if phase == "armed":
        job.let_prepare(20)
    os.kill(job.agent_pid(first.node), signal.SIGKILL)
    next_leader(job, first)
    job.pass_gates(20)
    moved = job.note("moved")
    assert moved["pairs"][0]["leaver"] == left != first.node and moved["epoch"] == 1
    job.note("released", node=left)
    job.open_gate(40)
    assert job.finish() == undisturbed()
    no_step_is_missing(job, 60)


def test_a_leader_that_took_over_leaves_its_node_when_it_is_drained(
    cluster: LocalCluster, tmp_path: Path, undisturbed: Digests
) -> None:
    job = submit(cluster, tmp_path, gates=[20])
    first = leader(job)
    os.kill(job.agent_pid(first.node), signal.SIGKILL)
    second = next_leader(job, first)
    cluster.drain(second.node)
    third = next_leader(job, second)
    job.note("drained", node=second.node)
    assert third.term == 3
    job.open_gate(20)
    assert job.finish() == undisturbed()
    no_step_is_missing(job, 60)


def test_a_node_is_back_before_anybody_has_given_it_back(
    cluster: LocalCluster, tmp_path: Path, undisturbed: Digests
) -> None:
    """Without power for a moment, while nobody leads: srun, if it were there, would find its task missing and
    end the step."""
    job = submit(cluster, tmp_path, gates=[LAST_GATE], **PACE)
    first = leader(job)
    node = job.active_nodes()[1]
    job.at_step(40)
    os.kill(job.agent_pid(first.node), signal.SIGKILL)
    cluster.power_off(node)
    cluster.restore(node)
    next_leader(job, first)
    job.note("recovered")
    job.open_gate(LAST_GATE)
    assert job.finish() == undisturbed(steps=STEPS)
    no_step_is_missing(job)
