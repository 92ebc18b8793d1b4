"""Everything that talks to slurmctld, behind one interface (`Slurm`), and the words that Slurm uses.

A leaf: imports nothing else of tm_slurm.
"""

from __future__ import annotations

from typing import Literal

from tm_slurm.slurm.address import AddressUnknown, reachable_address
from tm_slurm.slurm.command_line import CommandLine, is_no_answer
from tm_slurm.slurm.hostlist import HostlistError, expand
from tm_slurm.slurm.interface import (
    JobInfo,
    NodeInfo,
    PartitionInfo,
    QueuedJob,
    ReservationInfo,
    ResizeBlocked,
    Slurm,
    SlurmRefused,
    SlurmUnavailable,
)
from tm_slurm.slurm.node_state import LEAVING_KINDS, LeavingKind, NodeState
from tm_slurm.slurm.pyslurm_client import PySlurm, is_installed

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
    "PySlurm",
    "QueuedJob",
    "ReservationInfo",
    "ResizeBlocked",
    "Slurm",
    "SlurmRefused",
    "SlurmUnavailable",
    "connect",
    "expand",
    "is_no_answer",
    "reachable_address",
]


Way = Literal["command_line", "pyslurm", "best"]
"""best: pyslurm where it is installed and its libslurm is of the controller's release, else the commands."""


def connect(*, timeout_s: float = 10.0, by: Way = "command_line") -> Slurm:
    """Return a way to ask Slurm on this host; nothing is asked yet. `timeout_s` bounds each question."""
    if by == "command_line" or (by == "best" and not is_installed()):
        return CommandLine(timeout_s=timeout_s)
    return PySlurm(timeout_s=timeout_s, strict=by == "pyslurm")
