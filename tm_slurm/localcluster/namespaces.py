"""Mode namespaces: `ctl` and every node are hosts made of namespaces each held by one process. Root only."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from tm_slurm.localcluster import network, processes
from tm_slurm.localcluster.errors import LocalClusterError
from tm_slurm.localcluster.launch import daemon_environment, finish, host_process
from tm_slurm.localcluster.layout import Layout
from tm_slurm.localcluster.processes import ProcessId
from tm_slurm.localcluster.record import Record
from tm_slurm.localcluster.requirements import program
from tm_slurm.localcluster.slurm_conf import CONTROLLER

_NAMES = 'hostname "$1"; mount --bind "$2" /etc/hosts; ip link set lo up'
# Process numbers repeat from node to node, and with them the names that programs give to shared memory.
_MEMORY = (
    "mount -t tmpfs -o mode=1777,nosuid,nodev tmpfs /dev/shm; mount -t proc -o nosuid,nodev,noexec proc /proc"
)
_END_S = 10.0


class NamespaceHosts:
    """The hosts of one cluster. The record is kept up to date, saving it is the caller's part."""

    can_unplug = True

    def __init__(self, layout: Layout, record: Record) -> None:
        self.layout = layout
        self.record = record

    def start_controller(self) -> None:
        """Makes ctl with its bridge, on a subnet that nobody uses."""
        self.record.processes[CONTROLLER] = ctl = self._boot(
            CONTROLLER, ["--net", "--uts", "--mount"], _NAMES
        )
        network.build_bridge(ctl.pid, self.layout, self.subnet)

    @property
    def subnet(self) -> int:
        if self.record.subnet is None:
            raise LocalClusterError(
                f"{self.layout.record} names no subnet: `tm-slurm cluster down{self._options}` and `up` again"
            )
        return self.record.subnet

    def start_nodes(self, nodes: Iterable[str]) -> None:
        """Boots nodes that are off: host, cable, slurmd."""
        names = list(nodes)
        kinds = ["--net", "--uts", "--mount", "--ipc", "--pid"]
        with ThreadPoolExecutor(max_workers=4) as pool:
            booted = list(pool.map(lambda name: self._boot(name, kinds, f"{_NAMES}; {_MEMORY}"), names))
        self.record.processes.update(zip(names, booted, strict=True))
        for name in names:
            network.remove_link(self._ctl, name)
        network.connect(self._ctl, {n: p.pid for n, p in zip(names, booted, strict=True)}, self.subnet)
        with ThreadPoolExecutor(max_workers=4) as pool:
            list(pool.map(self._join_network, names))
            list(pool.map(self.start_slurmd, names))

    def start_slurmd(self, node: str) -> None:
        """Starts slurmd on a node that is on; fine if it runs."""
        if self._slurmd(node):
            return
        done = finish(
            [*self.node_prefix(node), program("slurmd"), "-N", node], daemon_environment(self.layout)
        )
        if done.returncode != 0:
            said = self.layout.last_words(f"slurmd.{node}", done.stderr)
            raise LocalClusterError(f"slurmd of {node} did not start: {said}")

    def controller_prefix(self) -> list[str]:
        """The words that run a command on ctl; its process numbers are this machine's."""
        ctl = self._ctl
        return [program("nsenter"), f"--target={ctl}", "--net", "--uts", "--mount"]

    def node_prefix(self, node: str) -> list[str]:
        """The words that run a command on a node."""
        holder = self._holder(node)
        return [program("nsenter"), f"--target={holder.pid}", "--net", "--uts", "--mount", "--ipc", "--pid"]

    def node_processes(self, node: str) -> set[ProcessId]:
        """Everything that lives on a node, its first process included; empty if the node is off."""
        holder = self.record.process(node)
        if holder is None or (home := processes.namespace(holder.pid, "pid")) is None:
            return set()
        return processes.identify(pid for pid in processes.every() if processes.namespace(pid, "pid") == home)

    def power_off(self, node: str, *, silent: bool) -> None:
        """Cuts the power: every process is gone. Its neighbours hear so from the kernel, or nothing."""
        holder = self._holder(node)
        if silent:
            network.plug(self._ctl, node, connected=False)
        processes.signal_all(lambda: {holder} if holder.alive() else set(), signal.SIGKILL, timeout_s=_END_S)
        network.remove_link(self._ctl, node)

    def plug(self, node: str, *, connected: bool) -> None:
        self._holder(node)
        network.plug(self._ctl, node, connected=connected)

    def unplugged(self) -> set[str]:
        """Nodes whose cable is pulled."""
        found = network.links(self._ctl)
        return {node for node in self.record.request.node_names if not found.get(node, False)}

    def slurmd(self, node: str) -> set[ProcessId]:
        return self._slurmd(node)

    @property
    def _options(self) -> str:
        return self.layout.options(self.record.request.name)

    def _slurmd(self, node: str) -> set[ProcessId]:
        return {p for p in self.node_processes(node) if processes.command_name(p.pid) == "slurmd"}

    @property
    def _ctl(self) -> int:
        return self._holder(CONTROLLER).pid

    def _holder(self, host: str) -> ProcessId:
        found = self.record.process(host)
        if found is None:
            raise LocalClusterError(
                f"host {host} is off: `tm-slurm cluster restore {host}{self._options}` or `up` starts it"
            )
        return found

    def _boot(self, host: str, kinds: list[str], script: str) -> ProcessId:
        command = [program("unshare"), *kinds, "--propagation", "slave"]
        return host_process(command, script, [f"tm-{host}", host, str(self.layout.hosts)], self.layout)

    def _join_network(self, node: str) -> None:
        own = f"10.77.{self.subnet}.{int(node[1:])}/24"
        network.configure(
            [f"addr add {own} dev eth0", "link set eth0 up"], network.inside(self._holder(node).pid)
        )


def members_of_namespaces(marked: set[int]) -> set[int]:
    """All processes in the network namespaces of some marked ones, but for our own namespace."""
    own = processes.namespace(os.getpid(), "net")
    homes = {processes.namespace(pid, "net") for pid in marked} - {own, None}
    if not homes:
        return set()
    return {pid for pid in processes.every() if processes.namespace(pid, "net") in homes}
