"""The configuration files of a local cluster, as text."""

from __future__ import annotations

import os
import pwd
import socket
from pathlib import Path

from tm_slurm.install import Installed
from tm_slurm.localcluster import accounting
from tm_slurm.localcluster.layout import Layout
from tm_slurm.localcluster.record import Record

CONTROLLER = "ctl"
"""The controller's host name in mode namespaces."""
CONTROLLER_PORT = 6817
SLURMD_PORT = 6818


def address(record: Record, host: str) -> str:
    """The IPv4 address of `ctl` or of a node; loopback for all of them in plain mode."""
    if record.subnet is None:
        return "127.0.0.1"
    last = 254 if host == CONTROLLER else int(host[1:])
    return f"10.77.{record.subnet}.{last}"


def controller_port(record: Record) -> int:
    return record.ports.get(CONTROLLER, CONTROLLER_PORT)


def hosts_text(record: Record) -> str:
    """/etc/hosts as every host of a namespaces cluster sees it."""
    names = [CONTROLLER, *record.request.node_names]
    lines = [
        "127.0.0.1 localhost",
        "::1 localhost ip6-localhost",
        *(f"{address(record, n)} {n}" for n in names),
    ]
    return "\n".join(lines) + "\n"


def cgroup_text(version: tuple[int, int, int]) -> str:
    """cgroup.conf: no plugin here needs cgroups, and slurmd must start where they are absent or another's."""
    return "CgroupPlugin=disabled\n" if version >= (23, 11) else "CgroupPlugin=cgroup/v1\n"


def slurm_text(layout: Layout, record: Record, plugins: str | None) -> str:
    """slurm.conf: a small machine plays many nodes, jobs start at once, a dead node is soon DOWN.

    `plugins` is the PluginDir with our accounting plugin, None where Slurm does without.
    """
    request = record.request
    user = pwd.getpwuid(os.geteuid()).pw_name
    directory = layout.directory
    plain = request.mode == "plain"
    controller = (
        f"localhost({address(record, CONTROLLER)})"
        if plain
        else f"{CONTROLLER}({address(record, CONTROLLER)})"
    )
    memory_mb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
    lines = [
        f"ClusterName={request.name}",
        f"SlurmctldHost={controller}",
        f"SlurmctldPort={controller_port(record)}",
        f"SlurmdPort={SLURMD_PORT}",
        "AuthType=auth/munge",
        f"AuthInfo=socket={layout.munge_socket}",
        "CredType=cred/munge",
        f"SlurmUser={user}",
        f"SlurmdUser={user}",
        f"StateSaveLocation={directory}/state",
        f"SlurmdSpoolDir={directory}/spool/%n",
        f"SlurmctldPidFile={directory}/slurmctld.pid",
        f"SlurmdPidFile={directory}/slurmd.%n.pid",
        f"SlurmctldLogFile={layout.log('slurmctld')}",
        f"SlurmdLogFile={layout.log('slurmd.%n')}",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core",
        "MpiDefault=none",
        "ReturnToService=2",
        "SlurmctldTimeout=10",
        f"SlurmdTimeout={request.slurmd_timeout_s}",
        # A silent node is DOWN after SlurmdTimeout and one or two pings, each of which waits this long.
        f"MessageTimeout={max(2, request.slurmd_timeout_s // 2)}",
        "InactiveLimit=0",
        "KillWait=5",
        "MailProg=/bin/true",
        "SlurmdParameters=config_overrides",
        "SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1",
    ]
    if plugins is not None:
        lines += [f"PluginDir={plugins}", f"AccountingStorageType={accounting.NAME}"]
    if plain and _own_name_is_loopback():
        lines.append("CommunicationParameters=NoInAddrAny,NoCtldInAddrAny")
    if request.administration:
        installed = Installed(Path(request.administration))
        lines += [*installed.slurm_conf(), f"PlugStackConfig={installed.plugstack}"]
    for node in request.node_names:
        words = [f"NodeName={node}", f"NodeAddr={address(record, node)}"]
        if plain:
            words += ["NodeHostname=localhost", f"Port={record.ports[node]}"]
        words += [f"CPUs={request.cpus}", f"RealMemory={memory_mb}"]
        if node in request.features:
            words.append(f"Feature={request.features[node]}")
        lines.append(" ".join([*words, "State=UNKNOWN"]))
    lines.append(
        f"PartitionName=batch Nodes={','.join(request.node_names)} Default=YES MaxTime=INFINITE State=UP"
    )
    extra = request.extra_conf.strip().splitlines()
    replaced = {line.partition("=")[0].strip().lower() for line in extra} - {"nodename", "partitionname"}
    lines = [line for line in lines if line.partition("=")[0].lower() not in replaced] + extra
    return "\n".join(lines) + "\n"


def _own_name_is_loopback() -> bool:
    """Whether Slurm, told to listen on the address of this machine's name only, would listen on 127.0.0.1."""
    try:
        return socket.gethostbyname(socket.gethostname()) == "127.0.0.1"
    except OSError:
        return False
