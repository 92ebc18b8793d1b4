"""Every way in which a rank, an agent or a node can fail is noticed, on real daemons, and is one event: one
recovery, and the same bits at the end."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from training_jobs import TrainingJob, config_text, gates_of_a_move, until

from tm_slurm.cli.jobs import ask_leader
from tm_slurm.localcluster import LocalCluster
from tm_slurm.localcluster.processes import ProcessId, command_name
from tm_slurm.observe.follow import JsonLines

pytestmark = pytest.mark.slurm
Digests = Callable[..., list[str]]

KEEPALIVE_S = 3.0
NOTICED_S = KEEPALIVE_S + 4.0
"""Silence is noticed after the keepalive; the rest is for a machine that has other things to do."""

LOUD_S = 2.0
"""A death that closes connections is noticed by ranks that wait in a collective, whatever the keepalive."""

GATE = 20


def submit(cluster: LocalCluster, directory: Path, **settings: Any) -> TrainingJob:
    """A job that halts before step `GATE`, with two warm standbys; `policy__…` settings are the policy's."""
    policy = {key: settings.pop(key) for key in list(settings) if key.startswith("policy__")}
    config = directory / "config.yaml"
    config.write_text(config_text(directory, **{"gates": [GATE], **settings}))
    job = TrainingJob.submit_config(cluster, config, **{"policy__keepalive_s": KEEPALIVE_S, **policy})
    job.warm(2)
    return job


def ends_as_if_nothing_had_happened(job: TrainingJob, digests: list[str], *, recoveries: int = 1) -> None:
    assert job.finish() == digests
    assert [step["step"] for step in job.files.steps()] == list(range(60))
    assert len(job.files.notes("recovered")) == recoveries, job.story()


def ended(process: ProcessId, limit_s: float = 20.0) -> None:
    until(f"process {process.pid} has ended", lambda: not process.alive(), limit_s)


def identified(pid: int) -> ProcessId:
    process = ProcessId.of(pid)
    assert process is not None
    return process


# ---- what happens at one instant to a node that has a rank ----


def rank_killed(job: TrainingJob, node: str) -> None:
    os.kill(job.rank_pid(node), signal.SIGKILL)


def rank_frozen(job: TrainingJob, node: str) -> None:
    os.kill(job.rank_pid(node), signal.SIGSTOP)


def agent_killed(job: TrainingJob, node: str) -> None:
    os.kill(job.agent_pid(node), signal.SIGKILL)


def agent_frozen(job: TrainingJob, node: str) -> None:
    os.kill(job.agent_pid(node), signal.SIGSTOP)


def slurmd_and_its_tasks_killed(job: TrainingJob, node: str) -> None:
    """The daemon, the step daemons and the tasks; the node's kernel lives."""
    ours = {
        pid
        for pid in job.cluster.node_pids(node)
        if command_name(pid).startswith(("slurm", "python", "srun")) or "submitit" in command_name(pid)
    }
    assert {"slurmd", "slurmstepd"} <= {command_name(pid) for pid in ours} and job.rank_pid(node) in ours
    for pid in ours:
        os.kill(pid, signal.SIGKILL)


def powered_off(job: TrainingJob, node: str) -> None:
    job.cluster.power_off(node)


def powered_off_silently(job: TrainingJob, node: str) -> None:
    job.cluster.power_off(node, silent=True)


def unplugged(job: TrainingJob, node: str) -> None:
    job.cluster.unplug(node)


def frozen(job: TrainingJob, node: str) -> None:
    job.cluster.freeze(node)


def set_down(job: TrainingJob, node: str) -> None:
    """By the administrator: Slurm cuts the node out of the job and kills its tasks at once."""
    job.cluster.set_down(node)


FAULTS: list[Callable[[TrainingJob, str], None]] = [
    rank_killed,
    rank_frozen,
    agent_killed,
    agent_frozen,
    slurmd_and_its_tasks_killed,
    powered_off,
    powered_off_silently,
    unplugged,
    frozen,
    set_down,
]


LOUD = (rank_killed, agent_killed, slurmd_and_its_tasks_killed, powered_off)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_it_is_noticed_and_is_one_failure(
    cluster: LocalCluster, tmp_path: Path, undisturbed: Digests, fault: Callable[[TrainingJob, str], None]
) -> None:
    job = submit(cluster, tmp_path)
    node = job.active_nodes()[1]
    job.at_step(GATE - 1)
    rank = identified(job.rank_pid(node))
    began = time.time()
    fault(job, node)
    if fault in LOUD:
        job.open_gate(GATE)
    noticed_s = job.note("recover")["at"] - began
    print(f"{fault.__name__} noticed after {noticed_s:.2f} s")
    assert noticed_s < (LOUD_S if fault in LOUD else NOTICED_S)
    job.open_gate(GATE)
    (pair,) = job.note("recovered")["pairs"]
    assert pair["leaver"] == node != pair["joiner"]
    if fault not in (unplugged, frozen, agent_frozen):
        ended(rank)  # the others end when they are back, or when they have had no answer for long
    ends_as_if_nothing_had_happened(job, undisturbed())


@pytest.mark.parametrize("fault", [agent_killed, powered_off], ids=lambda fault: fault.__name__)
def test_a_death_that_closes_connections_is_noticed_while_all_ranks_compute(
    cluster: LocalCluster, tmp_path: Path, undisturbed: Digests, fault: Callable[[TrainingJob, str], None]
) -> None:
    """No collective waits for the dead rank: all others stand at a gate."""
    job = submit(cluster, tmp_path)
    node = job.active_nodes()[1]
    job.at_step(GATE - 1)
    began = time.time()
    fault(job, node)
    noticed_s = job.note("recover")["at"] - began
    print(f"{fault.__name__} noticed after {noticed_s:.2f} s")
    assert noticed_s < LOUD_S
    job.open_gate(GATE)
    ends_as_if_nothing_had_happened(job, undisturbed())


# ---- slurmd alone ----


def test_a_node_whose_slurmd_has_died_is_left_by_a_planned_move(
    cluster: LocalCluster, tmp_path: Path, undisturbed: Digests
) -> None:
    """Its tasks go on. Slurm calls the node DOWN after SlurmdTimeout and cuts it out of the job; the ranks
    leave it before anybody ends them."""
    job = submit(cluster, tmp_path, gates=gates_of_a_move(GATE))
    node = job.active_nodes()[1]
    job.at_step(GATE - 1)
    cluster.kill_slurmd(node)
    job.note("event_down", node=node)
    assert node not in job.info().nodes and ProcessId.of(job.rank_pid(node))
    job.pass_gates(GATE)
    assert job.note("moved")["pairs"][0]["leaver"] == node
    ends_as_if_nothing_had_happened(job, undisturbed(), recoveries=0)


def test_tasks_that_a_new_slurmd_kills_in_the_middle_of_that_move_are_recovered(
    cluster: LocalCluster, tmp_path: Path, undisturbed: Digests
) -> None:
    job = submit(cluster, tmp_path)
    node = job.active_nodes()[1]
    job.at_step(GATE - 1)
    rank = identified(job.rank_pid(node))
    cluster.kill_slurmd(node)
    job.note("event_down", node=node)
    job.note("prepare")
    cluster.restore(node)
    ended(rank)
    job.note("recover")
    job.open_gate(GATE)
    job.note("recovered")
    ends_as_if_nothing_had_happened(job, undisturbed())


# ---- whoever was given up and is not dead ----


def comes_back_frozen(cluster: LocalCluster, node: str) -> None:
    cluster.thaw(node)


def comes_back_unplugged(cluster: LocalCluster, node: str) -> None:
    cluster.restore(node)


@pytest.mark.parametrize(
    ("fault", "back"),
    [(frozen, comes_back_frozen), (unplugged, comes_back_unplugged)],
    ids=["frozen", "unplugged"],
)
def test_a_node_that_was_given_up_and_comes_back_ends_its_ranks(
    cluster: LocalCluster,
    tmp_path: Path,
    undisturbed: Digests,
    fault: Callable[[TrainingJob, str], None],
    back: Callable[[LocalCluster, str], None],
) -> None:
    job = submit(cluster, tmp_path, gates=[GATE, GATE + 10])
    node = job.active_nodes()[1]
    job.at_step(GATE - 1)
    rank = identified(job.rank_pid(node))
    fault(job, node)
    job.note("recover")
    job.open_gate(GATE)
    job.note("recovered")
    job.until("its seat is somebody else's", lambda: node not in job.seats())
    seats = job.seats()
    back(cluster, node)
    ended(rank)
    job.open_gate(GATE + 10)
    ends_as_if_nothing_had_happened(job, undisturbed())
    assert job.seats() == seats


def test_an_agent_that_was_given_up_and_goes_on_is_refused(
    cluster: LocalCluster, tmp_path: Path, undisturbed: Digests
) -> None:
    job = submit(cluster, tmp_path, gates=[GATE, GATE + 10])
    node = job.active_nodes()[1]
    job.at_step(GATE - 1)
    rank, agent = identified(job.rank_pid(node)), job.agent_pid(node)
    os.kill(agent, signal.SIGSTOP)
    job.note("node_lost", node=node)
    job.open_gate(GATE)
    job.note("recovered")
    os.kill(agent, signal.SIGCONT)
    ended(rank)
    job.open_gate(GATE + 10)
    ends_as_if_nothing_had_happened(job, undisturbed())


# ---- one link ----


@contextmanager
def link_blocked(job: TrainingJob, node: str, other: str) -> Iterator[None]:
    """No packet of a link between the two nodes' ranks leaves `node` any more; all else goes on, the control
    connections among it."""
    there = job.cluster.address(other)
    rules = [
        ["to", there, "ipproto", "tcp", "dport", str(data_port(job, other)), "blackhole"],
        ["to", there, "ipproto", "tcp", "sport", str(data_port(job, node)), "blackhole"],
    ]
    for rule in rules:
        job.cluster.run(["ip", "rule", "add", *rule], node=node, cwd="/")
    try:
        yield
    finally:
        for rule in rules:
            job.cluster.run(["ip", "rule", "del", *rule], node=node, cwd="/")


def data_port(job: TrainingJob, node: str) -> int:
    """Where a node's rank process takes links, as it has told the coordinator."""
    for path in job.files.job_dir.glob("journal.*.jsonl"):
        for given in JsonLines(path).new():
            if given["kind"] == "process_ready" and given["node"] == node:
                return int(given["port"])
    raise AssertionError(f"no process of {node} has reported")


def test_a_link_that_carries_nothing_while_the_control_channel_is_fine(
    cluster: LocalCluster, tmp_path: Path, undisturbed: Digests
) -> None:
    job = submit(cluster, tmp_path)
    first, second = job.active_nodes()
    job.at_step(GATE - 1)
    began = time.time()
    with link_blocked(job, first, second):
        job.open_gate(GATE)
        broken, recover = job.note("broken"), job.note("recover")
        assert broken["lost"] is not None and recover["at"] - began < NOTICED_S
        (pair,) = job.note("recovered")["pairs"]
        assert pair["leaver"] in (first, second)
        ends_as_if_nothing_had_happened(job, undisturbed())
    assert not job.files.notes("node_lost"), "both agents were there all the time"


# ---- a step that hangs ----


def test_a_rank_that_stays_in_its_step_while_others_wait_is_found_and_replaced(
    cluster: LocalCluster, tmp_path: Path, undisturbed: Digests
) -> None:
    """Nothing is broken, nobody is dead: only the watchdog on the vote can tell."""
    job = submit(cluster, tmp_path, hang_at=[1, 40], policy__watchdog_floor_s=3.0)
    node = job.active_nodes()[1]
    job.open_gate(GATE)
    stuck = job.note("stuck")
    assert stuck["step"] == 40 and stuck["ranks"] == [1]
    (pair,) = job.note("recovered")["pairs"]
    assert pair["leaver"] == node
    ends_as_if_nothing_had_happened(job, undisturbed())
    assert all(entry["lost"] is None for entry in job.files.notes("broken")), "no link was"


def test_ranks_that_all_work_for_long_are_left_alone(
    cluster: LocalCluster, tmp_path: Path, undisturbed: Digests
) -> None:
    """They stand at a gate: asked, all say that they wait for nobody."""
    job = submit(cluster, tmp_path, policy__watchdog_floor_s=1.0)
    job.note("stuck", step=GATE, ranks=[])
    job.open_gate(GATE)
    ends_as_if_nothing_had_happened(job, undisturbed(), recoveries=0)


# ---- many witnesses ----


def test_one_failure_that_five_sources_report_is_one_recovery(
    cluster: LocalCluster, tmp_path: Path, undisturbed: Digests
) -> None:
    """Links, the agent's connection, programs on the node, the administrator's, and Slurm's own states."""
    shape = {"nodes": 3}
    job = submit(cluster, tmp_path, gates=[GATE, GATE + 10], **shape)
    node = job.active_nodes()[1]
    job.at_step(GATE - 1)
    cluster.power_off(node)
    told = {"node": node, "reason": "test", "at": time.time()}
    for source, kind in (("spank", "node_stop"), ("epilog", "unhealthy"), ("strigger", "down")):
        event = {"id": f"{kind}/{node}", "kind": kind, "source": source, **told}
        answer = ask_leader(job.files.job_dir, {"kind": "event", "event": event})
        assert "error" not in answer, answer
    job.open_gate(GATE)
    job.note("recovered")
    job.note("event_down", node=node, source="poll")
    job.open_gate(GATE + 10)
    ends_as_if_nothing_had_happened(job, undisturbed(**shape))
    assert len(job.files.notes("failed")) == 1 and not job.files.notes("moved")
    reports = {entry["source"] for entry in job.files.timeline() if entry["what"].startswith("event_")}
    assert {"spank", "epilog", "strigger", "poll"} <= reports, json.dumps(job.files.timeline(), indent=1)
