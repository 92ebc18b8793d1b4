"""Which of this host's addresses the other nodes of the job can reach.

A host's own name is a poor answer: distributions let it resolve to 127.0.1.1 on the host itself, and a
listener there is invisible to everybody else. Slurm knows better: slurmctld reaches the node by its
NodeAddr.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence

from tm_slurm.slurm import environment
from tm_slurm.slurm.hostlist import HostlistError, expand
from tm_slurm.slurm.interface import Slurm, SlurmRefused, SlurmUnavailable

_ROUTE_PROBE_PORT = 9


class AddressUnknown(RuntimeError):
    """No address of this host is known to be reachable from the job's other nodes."""


def reachable_address(
    node: str | None = None,
    *,
    slurm: Slurm | None = None,
    job_nodes: Sequence[str] | None = None,
) -> str:
    """Return an address of this host, as text, that the job's other nodes can connect to.

    `node` is this node's name in Slurm (default: SLURMD_NODENAME), `job_nodes` the job's nodes (default:
    from SLURM_JOB_NODELIST). First choice is the node's NodeAddr, if it is an address of this host; then
    the local end of the route to another node of the job. A loopback address is only returned when every
    node of the job is on loopback (several slurmd on one host). Blocks for one question to Slurm and the
    resolver's time. Raises AddressUnknown, naming what was tried.
    """
    name = node or os.environ.get(environment.NODE_NAME) or socket.gethostname()
    if job_nodes is None:
        job_nodes = _nodes_from_environment()
    # Dictionary, not set: this node first, the others in the job's order.
    written = _addresses_in_slurm(list(dict.fromkeys([name, *job_nodes])), slurm)
    own = _resolve(written.get(name, name))
    others = {other: _resolve(written.get(other, other)) for other in job_nodes if other != name}
    all_on_loopback = all(_only_loopback(addresses) for addresses in others.values())
    for address in own:
        if _is_bindable(address) and (all_on_loopback or not _is_loopback(address)):
            return address
    for addresses in others.values():
        for target in addresses:
            local = _local_end_of_route(target)
            if local is not None and (all_on_loopback or not _is_loopback(local)):
                return local
    raise AddressUnknown(
        f"node {name}: expected an address of this host that the job's other nodes reach; "
        f"its name in Slurm stands for {', '.join(own) or 'nothing that resolves'}, "
        f"and no route leads to {', '.join(others) or 'another node'}; "
        f"set NodeAddr in slurm.conf or correct the name's entry in /etc/hosts"
    )


def _nodes_from_environment() -> list[str]:
    try:
        return expand(environment.read(environment.JOB_NODES) or "")
    except HostlistError:
        return []


def _addresses_in_slurm(names: list[str], slurm: Slurm | None) -> dict[str, str]:
    """Return NodeAddr for each node; nothing when Slurm does not answer (names then stand for themselves)."""
    if slurm is None:
        from tm_slurm.slurm.command_line import CommandLine

        slurm = CommandLine()
    try:
        return {name: info.address for name, info in slurm.nodes(names).items()}
    except (SlurmUnavailable, SlurmRefused):
        return {}


def _resolve(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    return sorted(addresses, key=lambda address: ":" in address)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _only_loopback(addresses: list[str]) -> bool:
    return bool(addresses) and all(_is_loopback(address) for address in addresses)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _is_bindable(address: str) -> bool:
    with socket.socket(_family(address), socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _local_end_of_route(target: str) -> str | None:
    """Return the address this host would send from; a connected datagram socket sends nothing."""
    with socket.socket(_family(target), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, _ROUTE_PROBE_PORT))
        except OSError:
            return None
        return str(probe.getsockname()[0])
