"""Everything that talks to slurmctld, behind one interface (`Slurm`), and the words that Slurm uses.

A leaf: imports nothing else of tm_slurm.
"""

from __future__ import annotations

from tm_slurm.slurm.address import AddressUnknown, reachable_address
from tm_slurm.slurm.command_line import CommandLine
from tm_slurm.slurm.hostlist import HostlistError, expand
from tm_slurm.slurm.interface import (
    JobInfo,
    NodeInfo,
    PartitionInfo,
    ReservationInfo,
    ResizeBlocked,
    Slurm,
    SlurmRefused,
    SlurmUnavailable,
)
from tm_slurm.slurm.node_state import LEAVING_KINDS, LeavingKind, NodeState

__all__ = [
    "LEAVING_KINDS",
    "AddressUnknown",
    "CommandLine",
    "HostlistError",
    "JobInfo",
    "LeavingKind",
    "NodeInfo",
    "NodeState",
    "PartitionInfo",
    "ReservationInfo",
    "ResizeBlocked",
    "Slurm",
    "SlurmRefused",
    "SlurmUnavailable",
    "connect",
    "expand",
    "reachable_address",
]


def connect(*, timeout_s: float = 10.0) -> Slurm:
    """Return the way to ask Slurm on this host: the command line. `timeout_s` bounds each question."""
    return CommandLine(timeout_s=timeout_s)
