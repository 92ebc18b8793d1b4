"""Nodes of the local cluster can be powered off, unplugged, frozen and restored, and Slurm sees it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from cluster_names import own_name
from waiting import until

from tm_slurm.localcluster import LocalCluster, LocalClusterError
from tm_slurm.localcluster.processes import ProcessId, command_name

pytestmark = pytest.mark.slurm

LISTEN = """
import socket, time
s = socket.create_server(("", 7000)); print("listening", flush=True); kept = s.accept(); time.sleep(60)
"""
TALK = """
import socket, sys
s = socket.create_connection((sys.argv[1], 7000), timeout=5); print("connected", flush=True)
sys.stdin.readline(); s.settimeout(1.0)
try: print("heard", s.recv(1))
except TimeoutError: print("silence")
except OSError as e: print("heard", e)
"""


def start(cluster: LocalCluster, node: str, script: str, *arguments: str) -> subprocess.Popen[str]:
    words, environment = cluster.command([sys.executable, "-c", script, *arguments], node=node, cwd="/")
    return subprocess.Popen(
        words,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def host(cluster: LocalCluster, node: str) -> str:
    return next(found.host for found in cluster.status().nodes if found.name == node)


@pytest.fixture
def impatient() -> Iterator[LocalCluster]:
    """A cluster that calls silent nodes DOWN soon."""
    with LocalCluster(nodes=4, mode="namespaces", name=own_name("soon"), slurmd_timeout_s=2) as cluster:
        yield cluster


def test_dead_unplugged_and_frozen_nodes_go_down_and_come_back(impatient: LocalCluster) -> None:
    impatient.power_off("n2", silent=True)
    impatient.unplug("n3")
    impatient.freeze("n4")
    assert [host(impatient, node) for node in impatient.node_names] == ["on", "off", "unplugged", "frozen"]
    for node in ("n2", "n3", "n4"):
        impatient.wait_node(node, "DOWN", timeout_s=40.0)
    assert impatient.node_state("n1") == "IDLE"
    for node in ("n2", "n3", "n4"):
        impatient.restore(node, timeout_s=15.0)
        assert host(impatient, node) == "on"
    impatient.wait_idle(timeout_s=5.0)
    assert len(set(impatient.run(["srun", "-N4", "hostname"]).stdout.split())) == 4


FAULTS: dict[str, tuple[Callable[[LocalCluster], None], set[str]]] = {
    "power off": (lambda cluster: cluster.power_off("n2"), {"heard b''", "heard [Errno 104]"}),
    "silently off": (lambda cluster: cluster.power_off("n2", silent=True), {"silence"}),
    "unplugged": (lambda cluster: cluster.unplug("n2"), {"silence"}),
    "frozen": (lambda cluster: cluster.freeze("n2"), {"silence"}),
}
"""What is done to n2, and what a neighbour with a connection may hear of it."""


@pytest.mark.parametrize("fault", FAULTS)
def test_neighbours_of_a_broken_node_hear_its_kernel_or_nothing(cluster: LocalCluster, fault: str) -> None:
    break_it, heard = FAULTS[fault]
    listener = start(cluster, "n2", LISTEN)
    assert line(listener) == "listening"
    talker = start(cluster, "n1", TALK, "n2")
    assert line(talker) == "connected"
    break_it(cluster)
    print("", file=talker.stdin, flush=True)
    said = line(talker)
    assert any(said.startswith(word) for word in heard), said
    for process in (talker, listener):
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=5)


def test_power_off_ends_every_process_of_the_node_and_of_no_other(cluster: LocalCluster) -> None:
    before = {ProcessId.of(pid) for pid in cluster.node_pids("n2")}
    neighbours = {ProcessId.of(pid) for pid in cluster.node_pids("n1")}
    assert "slurmd" in {command_name(process.pid) for process in before if process}
    cluster.power_off("n2")
    assert not any(process and process.alive() for process in before)
    assert cluster.node_pids("n2") == set()
    assert all(process and process.alive() for process in neighbours)
    cluster.restore("n2", timeout_s=10.0)
    assert cluster.run(["srun", "-w", "n2", "hostname"]).stdout == "n2\n"


def test_a_restored_node_is_reached_by_its_neighbours_at_once(cluster: LocalCluster) -> None:
    ping = ["ping", "-c1", "-W1", "n2"]
    if cluster.run(["sh", "-c", "command -v ping"], check=False).returncode != 0:
        connect = "import socket; socket.create_connection(('n2', 6818), timeout=1)"
        ping = [sys.executable, "-c", connect]
    cluster.run(ping, node="n1", cwd="/")
    for fault in ("unplug", "power_off"):
        getattr(cluster, fault)("n2")
        assert cluster.run(ping, node="n1", cwd="/", check=False).returncode != 0
        cluster.restore("n2", timeout_s=10.0)
        cluster.run(ping, node="n1", cwd="/")


def test_a_connection_outlives_a_cable_that_is_plugged_in_again(cluster: LocalCluster) -> None:
    listener = start(cluster, "n2", LISTEN)
    assert line(listener) == "listening"
    talker = start(cluster, "n1", TALK, "n2")
    assert line(talker) == "connected"
    cluster.unplug("n2")
    cluster.plug_in("n2")
    assert host(cluster, "n2") == "on"
    os.killpg(listener.pid, signal.SIGKILL)
    listener.communicate(timeout=5)
    print("", file=talker.stdin, flush=True)
    assert line(talker).startswith("heard")
    talker.communicate(timeout=5)


def test_without_slurmd_the_tasks_go_on(cluster: LocalCluster) -> None:
    cluster.run(["sbatch", "-w", "n2", "--output=/dev/null", "--wrap=exec sleep 600"])
    tasks = until(lambda: {pid for pid in cluster.node_pids("n2") if command_name(pid) == "sleep"})
    cluster.kill_slurmd("n2")
    assert host(cluster, "n2") == "no-slurmd"
    assert tasks <= cluster.node_pids("n2")
    cluster.restore("n2", timeout_s=10.0)
    assert tasks <= cluster.node_pids("n2")
    assert "slurmd" in {command_name(pid) for pid in cluster.node_pids("n2")}


def test_a_frozen_node_goes_on_where_it_was(cluster: LocalCluster) -> None:
    cluster.freeze("n2")
    words, environment = cluster.command(["srun", "-w", "n2", "hostname"])
    waiting = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.communicate(timeout=0.5)
    cluster.thaw("n2")
    assert host(cluster, "n2") == "on"
    assert waiting.communicate(timeout=15.0)[0] == "n2\n"


def test_drain_resume_and_down_are_slurms(cluster: LocalCluster) -> None:
    cluster.drain("n1", "test disk")
    assert cluster.wait_node("n1", "IDLE+DRAIN", timeout_s=5.0) == "IDLE+DRAIN"
    assert "Reason=test disk" in cluster.run(["scontrol", "show", "node", "n1"]).stdout
    cluster.resume("n1")
    cluster.wait_idle(timeout_s=5.0)
    cluster.set_down("n1")
    cluster.wait_node("n1", lambda flags: "DOWN" in flags, timeout_s=5.0)
    cluster.restore("n1", timeout_s=10.0)
    assert cluster.node_state("n1") == "IDLE"


def test_a_plain_node_can_be_powered_off_frozen_and_restored(plain_cluster: LocalCluster) -> None:
    plain_cluster.run(["sbatch", "-w", "n2", "--output=/dev/null", "--wrap=env -i sleep 600"])
    until(
        lambda: {"slurmd", "slurmstepd", "sleep"} <= {command_name(p) for p in plain_cluster.node_pids("n2")}
    )
    before = {ProcessId.of(pid) for pid in plain_cluster.node_pids("n2")}
    neighbours = plain_cluster.node_pids("n1")
    plain_cluster.power_off("n2")
    assert not any(process and process.alive() for process in before)
    assert host(plain_cluster, "n2") == "off" and plain_cluster.node_pids("n1") == neighbours
    plain_cluster.restore("n2", timeout_s=15.0)
    plain_cluster.freeze("n3")
    assert host(plain_cluster, "n3") == "frozen"
    plain_cluster.restore("n3", timeout_s=15.0)
    with pytest.raises(LocalClusterError, match="no cable in mode plain"):
        plain_cluster.unplug("n3")
    with pytest.raises(LocalClusterError, match="no cable in mode plain"):
        plain_cluster.power_off("n3", silent=True)
