"""How a cluster stands: what `tm-slurm cluster status` shows."""

from __future__ import annotations

from dataclasses import dataclass

from tm_slurm.localcluster.lifecycle import Hosts


@dataclass(frozen=True)
class NodeStatus:
    """One node: `slurm` is Slurm's word for it, `host` is on, off, unplugged, frozen, no-slurmd or ?."""

    name: str
    address: str
    slurm: str
    host: str


@dataclass(frozen=True)
class ClusterStatus:
    """A cluster: `state` is up, broken (some of it runs: `up` mends it, `down` removes it) or down."""

    name: str
    directory: str
    state: str
    mode: str | None
    nodes: tuple[NodeStatus, ...]


def host_state(hosts: Hosts, node: str, *, unplugged: bool) -> str:
    """A node's machine, whatever Slurm thinks of it: on, off, unplugged, frozen or no-slurmd."""
    living = hosts.node_processes(node)
    if not living:
        return "off"
    if all(process.stopped() for process in living):
        return "frozen"
    if unplugged:
        return "unplugged"
    return "on" if hosts.slurmd(node) else "no-slurmd"
