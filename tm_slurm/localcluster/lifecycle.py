"""Bringing a local cluster up, mending it, and taking it down; the caller holds the cluster's lock."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterable
from typing import Protocol

from tm_slurm.localcluster import accounting, processes
from tm_slurm.localcluster.errors import LocalClusterError
from tm_slurm.localcluster.launch import detach
from tm_slurm.localcluster.layout import Layout
from tm_slurm.localcluster.namespaces import NamespaceHosts, members_of_namespaces
from tm_slurm.localcluster.network import free_subnet, picking_a_subnet, remove_machine_link
from tm_slurm.localcluster.plain import PlainHosts, marked, pick_ports, require_port, strays
from tm_slurm.localcluster.processes import ProcessId, boot_id
from tm_slurm.localcluster.record import Record, Request
from tm_slurm.localcluster.requirements import program, slurm_version
from tm_slurm.localcluster.slurm_conf import (
    CONTROLLER,
    address,
    cgroup_text,
    controller_port,
    hosts_text,
    slurm_text,
)

_DAEMON_S = 10.0


class Hosts(Protocol):
    """What both modes can do with the machines of a cluster."""

    can_unplug: bool

    def start_controller(self) -> None: ...
    def start_nodes(self, nodes: Iterable[str]) -> None: ...
    def start_slurmd(self, node: str) -> None: ...
    def controller_prefix(self) -> list[str]: ...
    def node_prefix(self, node: str) -> list[str]: ...
    def node_processes(self, node: str) -> set[ProcessId]: ...
    def slurmd(self, node: str) -> set[ProcessId]: ...
    def power_off(self, node: str, *, silent: bool) -> None: ...
    def plug(self, node: str, *, connected: bool) -> None: ...
    def unplugged(self) -> set[str]: ...


def hosts_of(layout: Layout, record: Record) -> Hosts:
    """The machines of a cluster in the mode it was started in."""
    kind = NamespaceHosts if record.request.mode == "namespaces" else PlainHosts
    return kind(layout, record)


def start(layout: Layout, request: Request) -> Record:
    """Starts a cluster from nothing, on a network or ports that nobody uses, in a directory claimed already.

    Raises:
        LocalClusterError: something did not start; says what and its last word. The rest is left to `stop`.
    """
    layout.prepare()
    record = Record(request=request)
    hosts = hosts_of(layout, record)
    if request.mode == "namespaces":
        with picking_a_subnet():
            record.subnet = free_subnet(int(layout.id, 16) % 256)
            _write_files(layout, record)
            hosts.start_controller()
    else:
        record.ports = pick_ports([CONTROLLER, *request.node_names])
        _write_files(layout, record)
    record.save(layout)
    start_daemons(layout, record, hosts)
    hosts.start_nodes(request.node_names)
    record.save(layout)
    return record


def foundation_stands(record: Record) -> bool:
    """Whether enough of a cluster runs to be mended in place, its queue and jobs kept."""
    if record.boot != boot_id():
        return False
    if record.request.mode == "namespaces":
        return record.process(CONTROLLER) is not None
    return any(record.process(name) is not None for name in record.processes)


def was_started(record: Record) -> bool:
    """Whether its start came to its end: one that was killed may have daemons that no record knows."""
    return record.request.mode != "plain" or set(record.request.node_names) <= set(record.processes)


def start_daemons(layout: Layout, record: Record, hosts: Hosts) -> list[str]:
    """Starts munged and slurmctld where they are missing; returns which were.

    Raises:
        LocalClusterError: one does not answer within 10 s; says its last word.
    """
    prefix = hosts.controller_prefix()
    started = []
    if record.process("munged") is None:
        command = [
            program("munged"),
            "--foreground",
            "--force",
            f"--key-file={layout.munge_key}",
            f"--socket={layout.munge_socket}",
            f"--pid-file={layout.directory}/munge/pid",
            f"--seed-file={layout.directory}/munge/seed",
            f"--log-file={layout.log('munged')}",
        ]
        layout.munge_socket.unlink(missing_ok=True)
        record.processes["munged"] = detach(command, layout=layout, log=layout.log("munged"), prefix=prefix)
        started.append("munged")
    if record.process("slurmctld") is None:
        require_port(record, CONTROLLER)
        command = [program("slurmctld"), "-D"]
        log = layout.log("slurmctld.out")
        record.processes["slurmctld"] = detach(command, layout=layout, log=log, prefix=prefix)
        started.append("slurmctld")
    record.save(layout)
    _wait_listening(layout, record, "munged", socket.AF_UNIX, str(layout.munge_socket))
    _wait_listening(
        layout, record, "slurmctld", socket.AF_INET, (address(record, CONTROLLER), controller_port(record))
    )
    return started


def stop_processes(layout: Layout) -> None:
    """Ends everything that belongs to a cluster, found by what it is and not by what a file says.

    We ourselves, and whoever started us, are spared.

    Raises:
        LocalClusterError: something would not end.
    """
    spared = processes.ancestors(os.getpid())

    def members() -> set[ProcessId]:
        ours = marked(layout)
        return processes.identify((ours | members_of_namespaces(ours) | strays(layout)) - spared)

    processes.signal_all(members, signal.SIGKILL, timeout_s=_DAEMON_S)
    remove_machine_link(layout)


def stop(layout: Layout) -> None:
    """Ends a cluster and removes its files."""
    stop_processes(layout)
    layout.remove()


def _write_files(layout: Layout, record: Record) -> None:
    layout.hosts.write_text(hosts_text(record))
    layout.cgroup_conf.write_text(cgroup_text(slurm_version()))
    plugins = accounting.build(layout) if accounting.is_needed() else None
    layout.slurm_conf.write_text(slurm_text(layout, record, plugins))


def _wait_listening(
    layout: Layout, record: Record, name: str, family: socket.AddressFamily, where: str | tuple[str, int]
) -> None:
    deadline = time.monotonic() + _DAEMON_S
    while True:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(where)
                return
            except OSError as error:
                reason = error.strerror
        if record.process(name) is None:
            raise LocalClusterError(f"{name} ended at once: {layout.last_words(name)}")
        if time.monotonic() > deadline:
            raise LocalClusterError(f"{name} does not answer at {where} within {_DAEMON_S:g} s ({reason})")
        time.sleep(0.005)
