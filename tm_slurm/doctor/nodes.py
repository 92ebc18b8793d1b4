"""What the answers of the nodes mean (see `tm_slurm.doctor.probe`)."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Any

from tm_slurm.doctor.finding import Finding, failed, passed, warned

Answers = Mapping[str, dict[str, Any]]

FEW_FILES, TOO_FEW_FILES = 4096, 512
SKEW_WARN_S, SKEW_FAIL_S = 1.0, 60.0
"""Munge refuses from 300 s on; from a second on the timeline's downtimes are wrong."""


def same_package(who: Answers, version: str) -> Finding:
    """tm_slurm on the nodes, against `version` here."""
    check = "tm_slurm"
    other = {node: answer["version"] for node, answer in who.items() if answer["version"] != version}
    if other:
        found = f"{version} here, {_listed(other)}"
        return failed(
            check, found, "agents of two versions do not understand each other", "pip install it there"
        )
    return passed(check, f"{version} here and on {','.join(who)}")


def shared_directory(directory: str, wrote: Answers, saw: Answers) -> Finding:
    check = "job directory"
    mend = "job.directory: a path on a file system that all nodes mount read-write; doctor --directory DIR"
    errors = {node: answer["error"] for node, answer in wrote.items() if "error" in answer}
    if errors:
        return failed(check, _listed(errors), "agents cannot keep their files there", mend)
    blind = {
        node: f"nothing of {','.join(answer['missing'])}" for node, answer in saw.items() if answer["missing"]
    }
    if blind:
        meaning = "every node would have a job directory of its own: agents would not find each other"
        return failed(check, f"{directory} is not shared: {_listed(blind)}", meaning, mend)
    return passed(check, f"{directory} is shared by {','.join(saw)}")


def locks(kept: Answers, tried: Answers, freed: Answers, *, holder: str, other: str) -> Finding:
    """`holder` took the lock and kept it, `other` tried; then, when it was free, tried again."""
    check = "locks"
    mend = "mount it with locks (NFS: without nolock; Lustre: -o flock), or choose another job.directory"
    errors = {
        node: answers[node]["error"]
        for node, answers in ((holder, kept), (other, tried), (other, freed))
        if "error" in answers[node]
    }
    if errors or not kept[holder]["taken"]:
        found = _listed(errors) or f"{holder} did not get a lock that was free"
        return failed(check, found, "no agent can become leader", mend)
    if tried[other]["taken"]:
        meaning = "two agents would lead the job at the same time, until the lease tells them"
        return failed(check, f"{other} got the lock that {holder} held", meaning, mend)
    if not freed[other]["taken"]:
        meaning = "when a leader is gone, others wait for its lease instead of its lock"
        return failed(check, f"{other} did not get the lock that {holder} had let go", meaning, mend)
    return passed(check, f"{holder} and {other} exclude each other")


def addresses(who: Answers) -> Finding:
    check = "addresses"
    lost = {node: answer["problem"] for node, answer in who.items() if answer["address"] is None}
    mend = "slurm.conf: NodeAddr=, or correct the node's line in /etc/hosts"
    if lost:
        return failed(check, "; ".join(lost.values()), "others cannot connect to it", mend)
    return passed(check, _listed({node: answer["address"] for node, answer in who.items()}))


def names(reach: Answers, who: Answers) -> Finding:
    """Do nodes resolve each other's host names, and not to loopback?"""
    check = "names"
    several = len({answer["host"] for answer in who.values()}) > 1
    wrong = []
    for node, answer in reach.items():
        for other, found in answer["names"].items():
            if not found:
                wrong.append(f"{node} cannot resolve {other}")
            elif other != node and several and all(_is_loopback(address) for address in found):
                wrong.append(f"{node} takes {other} for {found[0]}")
    if wrong:
        meaning = "tm_slurm uses Slurm's NodeAddr, but torch's stores, gloo and NCCL go by names"
        return warned(
            check, "; ".join(wrong), meaning, "DNS, or a line for each node in /etc/hosts of all nodes"
        )
    return passed(check, f"{','.join(reach)} resolve each other")


def ports(reach: Answers) -> Finding:
    check = "ports"
    wrong = [
        f"{node} → {other} {why}"
        for node, answer in reach.items()
        for other, why in answer["refused"].items()
    ]
    if wrong:
        meaning = "ranks and agents connect to each other on ephemeral TCP ports"
        mend = "let nodes reach each other there: `sysctl net.ipv4.ip_local_port_range` is the range to open"
        return failed(check, "; ".join(wrong), meaning, mend)
    return passed(check, f"{','.join(reach)} connect to each other on ephemeral ports")


def clocks(skews: Mapping[str, tuple[float, float]]) -> Finding:
    """`skews`: node to seconds ahead of here, and how uncertain that is."""
    check = "clocks"
    shown = _listed({node: f"{ahead:+.3f} s (± {about:.3f})" for node, (ahead, about) in skews.items()})
    worst = max((max(0.0, abs(ahead) - about) for ahead, about in skews.values()), default=0.0)
    mend = "chronyc makestep on that node, and let chronyd run"
    if worst > SKEW_FAIL_S:
        return failed(check, shown, "munge refuses what is 300 s old, and so does the coordinator", mend)
    if worst > SKEW_WARN_S:
        return warned(check, shown, "downtimes in the timeline are wrong by so much", mend)
    return passed(check, shown)


def open_files(who: Answers) -> Finding:
    check = "open files"
    limits = {node: int(answer["open_files"][0]) for node, answer in who.items()}
    found = _listed({node: str(limit) if limit >= 0 else "unlimited" for node, limit in limits.items()})
    least = min((limit for limit in limits.values() if limit >= 0), default=FEW_FILES)
    mend = "slurmd.service: LimitNOFILE=1048576; slurm.conf: PropagateResourceLimitsExcept=NOFILE"
    if least < TOO_FEW_FILES:
        return failed(check, found, "links between ranks, data loaders and checkpoints need more", mend)
    if least < FEW_FILES:
        return warned(check, found, "many data loader workers, or large jobs, need more", mend)
    return passed(check, found)


def interface_choice(who: Answers) -> Finding:
    """Where NCCL and gloo, if they are used beside tm_slurm's own links, go by default."""
    check = "interfaces"
    missing = []
    several = {}
    for node, answer in who.items():
        usable = {
            name: address for name, address in answer["interfaces"].items() if not _is_loopback(address)
        }
        named = answer["named_interfaces"]
        for variable, value in named.items():
            wanted = [name.lstrip("^=") for name in value.split(",")]
            excluded = value.startswith("^")
            if not excluded and not any(
                name.startswith(one) for name in answer["interfaces"] for one in wanted
            ):
                missing.append(f"{node} has no interface {value} ({variable})")
        if len(usable) > 1 and len(named) < 2:
            several[node] = ",".join(sorted(usable))
    own = sorted(
        {
            name
            for answer in who.values()
            for name, address in answer["interfaces"].items()
            if address == answer["address"]
        }
    )
    choice = own[0] if own else "eth0"
    mend = f"job.setup: [export NCCL_SOCKET_IFNAME={choice} GLOO_SOCKET_IFNAME={choice}]"
    if missing:
        return failed(check, "; ".join(missing), "groups of NCCL or gloo do not come up", mend)
    if several:
        meaning = (
            f"NCCL and gloo choose by themselves; Slurm's own addresses are on {','.join(own) or 'none'}"
        )
        return warned(check, _listed(several), meaning, mend)
    return passed(check, _listed({node: ",".join(answer["interfaces"]) for node, answer in who.items()}))


def same_files(who: Answers) -> Finding:
    """The administrators' files, the same on every node?"""
    check = "installed files"
    files = sorted({name for answer in who.values() for name in answer["files"]})
    wrong = []
    for name in files:
        sums = {node: answer["files"].get(name) for node, answer in who.items()}
        if None in sums.values():
            wrong.append(f"{name} is not on {','.join(node for node, sum_ in sums.items() if sum_ is None)}")
        elif len(set(sums.values())) > 1:
            wrong.append(f"{name} differs between {','.join(sums)}")
    if wrong:
        meaning = "a node without its prolog is drained by Slurm; without the plugin it tells nothing"
        return failed(check, "; ".join(wrong), meaning, "copy the whole prefix to every node")
    return passed(check, f"{len(files)} the same on {','.join(who)}" if files else "none to compare")


def not_asked(why: str, count: int) -> Finding:
    """No node was to be had."""
    meaning = f"shared directory, locks, names, ports, clocks and limits were not looked at on {count} nodes"
    mend = f"when nodes are idle: tm-slurm doctor; or inside a job: salloc --nodes={count} tm-slurm doctor"
    return warned("nodes", why, meaning, mend)


def did_not_run(why: str, python: str) -> Finding:
    """Slurm gave nodes, and the tasks did not do there what they should."""
    meaning = "the agents of a job would not run on the nodes either"
    mend = (
        f"have {python} and its packages on all nodes (a shared file system), or: doctor --python; job.python"
    )
    return failed("nodes", why, meaning, mend)


def _listed(values: Mapping[str, str]) -> str:
    return ", ".join(f"{node}: {value}" for node, value in values.items())


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
