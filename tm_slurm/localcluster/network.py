"""The network of a namespaces cluster: a bridge on host `ctl`, a cable to each node and one to this machine.

The bridge lives in ctl's own network namespace, so this machine sees one link a cluster (tmXXXXXXXX), its
firewall does not stand between the nodes, and all of it vanishes with the processes that hold the namespaces.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tm_slurm.localcluster.errors import LocalClusterError
from tm_slurm.localcluster.launch import finish
from tm_slurm.localcluster.layout import Layout
from tm_slurm.localcluster.requirements import program

_MUTEX = "\0tm_slurm.localcluster.subnet"
"""An abstract socket: held by one process of the machine at a time, gone with it, no file left."""
_BRIDGE = "tmbr0"
MACHINE = "machine"
"""ctl's end of the cable to this machine."""


@contextmanager
def picking_a_subnet(timeout_s: float = 20.0) -> Iterator[None]:
    """One cluster at a time looks for a free subnet and takes it.

    Raises:
        LocalClusterError: others were at it for the whole of `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        mutex = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            mutex.bind(_MUTEX)
            break
        except OSError:
            mutex.close()
            if time.monotonic() > deadline:
                raise LocalClusterError(
                    f"another cluster has been setting up its network for {timeout_s:g} s: try again"
                ) from None
            time.sleep(0.01)
    try:
        yield
    finally:
        mutex.close()


def free_subnet(first: int) -> int:
    """An x such that nothing on this machine goes to 10.77.x.0/24; looks from `first` on, round the circle.

    Raises:
        LocalClusterError: all 256 are taken.
    """
    done = finish([program("ip"), "-json", "-4", "route", "show", "table", "all"])
    if done.returncode != 0:
        raise LocalClusterError(f"`ip route` failed: {done.stderr.strip()}")
    taken = []
    for route in json.loads(done.stdout or "[]"):
        try:
            network = ipaddress.IPv4Network(route["dst"])
        except (KeyError, ValueError):  # default, or a route of another kind
            continue
        if network.prefixlen > 8:  # a wider one (a VPN to 10.0.0.0/8) is merely hidden for these addresses
            taken.append(network)
    for step in range(256):
        x = (first + step) % 256
        wanted = ipaddress.IPv4Network(f"10.77.{x}.0/24")
        if not any(network.overlaps(wanted) for network in taken):
            return x
    raise LocalClusterError(
        "no free subnet in 10.77.0.0/16: take down another cluster (tm-slurm cluster down)"
    )


def inside(pid: int) -> list[str]:
    """The words that run a command in the network of a process."""
    return [program("nsenter"), f"--net=/proc/{pid}/ns/net"]


def configure(commands: Iterable[str], prefix: Sequence[str] = ()) -> None:
    """Runs `ip` commands, all in one process.

    Raises:
        LocalClusterError: one failed; says which and why.
    """
    done = finish([*prefix, program("ip"), "-batch", "-"], stdin="\n".join(commands) + "\n")
    if done.returncode != 0:
        raise LocalClusterError(f"network set-up failed: {' '.join(done.stderr.split())}")


def machine_link(layout: Layout) -> str:
    """The one network link that this machine sees of a cluster."""
    return f"tm{layout.id}"


def build_bridge(ctl: int, layout: Layout, subnet: int) -> None:
    """Gives ctl its bridge and address (.254) and this machine its cable and address (.253)."""
    link = machine_link(layout)
    configure(
        [
            f"link add {_BRIDGE} type bridge mcast_snooping 0",
            f"link set {_BRIDGE} address {_mac(subnet, 254)} up",
            f"addr add 10.77.{subnet}.254/24 dev {_BRIDGE}",
            f"link add {MACHINE} type veth peer name {link} netns {os.getpid()}",
            f"link set {MACHINE} master {_BRIDGE} up",
        ],
        inside(ctl),
    )
    configure([f"addr add 10.77.{subnet}.253/24 dev {link}", f"link set {link} up"])


def remove_machine_link(layout: Layout) -> None:
    """Takes away what is left of a cluster's link on this machine; the kernel alone would take a while."""
    link = machine_link(layout)
    if Path("/sys/class/net", link).exists():
        finish([program("ip"), "link", "del", link])
    if Path("/sys/class/net", link).exists():
        raise LocalClusterError(f"network link {link} would not go: `ip link del {link}`")


def connect(ctl: int, hosts: dict[str, int], subnet: int) -> None:
    """Lays a cable from the bridge to each node (name to process); the nodes' ends are called eth0.

    Hardware addresses follow the number of the node: its neighbours know one that comes back.
    """
    commands = []
    for node, pid in hosts.items():
        mac = _mac(subnet, int(node[1:]))
        commands += [
            f"link add {node} type veth peer name eth0 address {mac} netns {pid}",
            f"link set {node} master {_BRIDGE} up",
        ]
    configure(commands, inside(ctl))


def plug(ctl: int, node: str, *, connected: bool) -> None:
    """Plugs a node's cable in or pulls it."""
    configure([f"link set {node} {'up' if connected else 'down'}"], inside(ctl))


def links(ctl: int) -> dict[str, bool]:
    """The cables at the bridge: name to whether it is plugged in."""
    done = finish([*inside(ctl), program("ip"), "-json", "link", "show"])
    if done.returncode != 0:
        raise LocalClusterError(f"`ip link` failed: {done.stderr.strip()}")
    return {item["ifname"]: "UP" in item["flags"] for item in json.loads(done.stdout or "[]")}


def remove_link(ctl: int, node: str) -> None:
    """Removes what is left of a cable, both ends; fine if nothing is: the kernel, too, removes it."""
    done = finish([*inside(ctl), program("ip"), "link", "del", node])
    if done.returncode != 0 and node in links(ctl):
        raise LocalClusterError(f"the cable of {node} would not go: {done.stderr.strip()}")


def _mac(subnet: int, last: int) -> str:
    return f"02:77:4d:00:{subnet:02x}:{last:02x}"
