"""Mode plain: several slurmd on loopback, started by any user."""

from __future__ import annotations

import random
import signal
import socket
from collections.abc import Iterable
from pathlib import Path

from tm_slurm.localcluster import processes
from tm_slurm.localcluster.errors import LocalClusterError
from tm_slurm.localcluster.launch import MARK, detach
from tm_slurm.localcluster.layout import Layout
from tm_slurm.localcluster.processes import ProcessId
from tm_slurm.localcluster.record import Record
from tm_slurm.localcluster.requirements import program

_LOWEST_PORT = 20000
_END_S = 10.0


class PlainHosts:
    """The slurmd of one cluster. A node is its slurmd, the step daemons of that slurmd, and their tasks."""

    can_unplug = False

    def __init__(self, layout: Layout, record: Record) -> None:
        self.layout = layout
        self.record = record

    def start_controller(self) -> None:
        """Nothing to make: the controller lives on this machine itself."""

    def start_nodes(self, nodes: Iterable[str]) -> None:
        for node in nodes:
            self.start_slurmd(node)

    def start_slurmd(self, node: str) -> None:
        """Starts a node's slurmd; fine if it runs."""
        if not self.slurmd(node):
            require_port(self.record, node)
            command = [program("slurmd"), "-D", "-N", node]
            self.record.processes[node] = detach(
                command, layout=self.layout, log=self.layout.log(f"slurmd.{node}.out")
            )

    def controller_prefix(self) -> list[str]:
        return []

    def node_prefix(self, node: str) -> list[str]:
        return []

    def slurmd(self, node: str) -> set[ProcessId]:
        found = self.record.process(node)
        return {found} if found else set()

    def node_processes(self, node: str) -> set[ProcessId]:
        """slurmd, its step daemons and everything they started."""
        log = str(self.layout.log(f"slurmd.{node}"))
        steps = {
            pid
            for pid in processes.every()
            if processes.command_name(pid) == "slurmstepd" and log in processes.open_files(pid)
        }
        tasks = {pid for pid in processes.every() if _is_task(pid, self.layout, node)}
        return self.slurmd(node) | processes.identify(steps | processes.descendants(steps) | tasks)

    def power_off(self, node: str, *, silent: bool) -> None:
        """Ends slurmd, its steps and tasks. On loopback the neighbours see their connections reset."""
        if silent:
            raise LocalClusterError(
                f"node {node} has no cable in mode plain: a silent power cut needs --mode namespaces (root)"
            )
        processes.signal_all(
            lambda: {p for p in self.node_processes(node) if not p.stopped()},
            signal.SIGSTOP,
            timeout_s=_END_S,
        )
        processes.signal_all(lambda: self.node_processes(node), signal.SIGKILL, timeout_s=_END_S)

    def plug(self, node: str, *, connected: bool) -> None:
        if not connected:
            raise LocalClusterError(
                f"node {node} has no cable in mode plain: unplug needs --mode namespaces (root)"
            )

    def unplugged(self) -> set[str]:
        return set()


def pick_ports(names: Iterable[str]) -> dict[str, int]:
    """A free port for each name, below the range that the kernel gives to outgoing connections.

    Raises:
        LocalClusterError: none found.
    """
    try:
        lowest_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        lowest_ephemeral = 32768
    if lowest_ephemeral < _LOWEST_PORT + 1000:
        lowest_ephemeral = 65536
    wanted = list(names)
    found: dict[str, int] = {}
    for port in random.sample(range(_LOWEST_PORT, lowest_ephemeral), 1000):
        if len(found) == len(wanted):
            break
        if port_is_free(port):
            found[wanted[len(found)]] = port
    if len(found) < len(wanted):
        raise LocalClusterError(
            f"found {len(found)} free ports, need {len(wanted)}: too much listens on this machine"
        )
    return found


def require_port(record: Record, name: str) -> None:
    """Checks that the port of a daemon that is to start is still free; fine if it has none of its own.

    Raises:
        LocalClusterError: another program took it.
    """
    port = record.ports.get(name)
    if port is not None and not port_is_free(port, strictly=False):
        raise LocalClusterError(
            f"port {port} of {name} was taken by another program: take the cluster down, then up"
        )


def port_is_free(port: int, *, strictly: bool = True) -> bool:
    """Whether a daemon could listen on a port of any address of this machine now.

    Strictly: not even a closed connection lingers on it.
    """
    with socket.socket() as probe:
        if not strictly:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True


def strays(layout: Layout) -> set[int]:
    """Processes of a cluster without its mark: Slurm's daemons with a log of ours open, and tasks."""
    logs = str(layout.directory / "log") + "/"
    daemons = {
        pid
        for pid in processes.every()
        if processes.command_name(pid).startswith(("slurm", "munged"))
        and any(path.startswith(logs) for path in processes.open_files(pid))
    }
    steps = {pid for pid in daemons if processes.command_name(pid) == "slurmstepd"}
    tasks = {pid for pid in processes.every() if _is_task(pid, layout)}
    return daemons | tasks | processes.descendants(steps)


def marked(layout: Layout) -> set[int]:
    """Processes that carry the cluster's mark in their environment."""
    mark = f"{MARK}={layout.directory}"
    return {pid for pid in processes.every() if mark in processes.environment_of(pid)}


def _is_task(pid: int, layout: Layout, node: str | None = None) -> bool:
    environment = processes.environment_of(pid)
    if f"SLURM_CONF={layout.slurm_conf}" not in environment:
        return False
    if node is not None:
        return f"SLURMD_NODENAME={node}" in environment
    return any(item.startswith("SLURMD_NODENAME=") for item in environment)
