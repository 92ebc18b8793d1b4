"""State: captures, moves and restores everything that makes a rank what it is, bit for bit (paper section 7).

    snapshot = capture(state, step)                  leaver                         joiner
    sender = Sender(sockets)                         receiver = Receiver(sockets, state)
    sender.prepare(snapshot, timeout_s=30)           receiver.prepare(timeout_s=30)             while training
    goes on sender.send(capture(state, step), timeout_s=5)   receiver.receive(timeout_s=5).step         in the
    pause

State is: every module (parameters, all buffers), optimizer, generator, and object with state_dict() and
load_state_dict() in the mapping that build() returned; the step number; Python's, NumPy's, torch's
generators. Not state: gradients (set to None), and Python attributes that no state_dict() shows.

Nothing here imports torch until one of these is asked for: the agent uses the directory of checkpoints.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tm_slurm.state import tree
    from tm_slurm.state.capturing import NamedTensor, Snapshot, capture
    from tm_slurm.state.digesting import digest
    from tm_slurm.state.entries import drop_gradients, state_entries
    from tm_slurm.state.errors import StateError, StateRefused
    from tm_slurm.state.marking import Mark, mark
    from tm_slurm.state.private import (
        common_objects,
        give_buffers,
        give_private,
        global_generators,
        private_buffers,
        take_buffers,
        take_private,
    )
    from tm_slurm.state.rate import raw_rate, receive_raw, send_raw
    from tm_slurm.state.receiving import Receiver, ReceiveReport, receive
    from tm_slurm.state.restoring import restore
    from tm_slurm.state.stored import Stored, pack, read_head, replica_key, unpack
    from tm_slurm.state.transfer import Sender, SendReport, send

__all__ = [
    "Mark",
    "NamedTensor",
    "ReceiveReport",
    "Receiver",
    "SendReport",
    "Sender",
    "Snapshot",
    "StateError",
    "StateRefused",
    "Stored",
    "capture",
    "common_objects",
    "digest",
    "drop_gradients",
    "give_buffers",
    "give_private",
    "global_generators",
    "mark",
    "pack",
    "private_buffers",
    "raw_rate",
    "read_head",
    "receive",
    "receive_raw",
    "replica_key",
    "restore",
    "send",
    "send_raw",
    "state_entries",
    "take_buffers",
    "take_private",
    "tree",
    "unpack",
]

_HOMES = {
    "capturing": ("NamedTensor", "Snapshot", "capture"),
    "digesting": ("digest",),
    "entries": ("drop_gradients", "state_entries"),
    "errors": ("StateError", "StateRefused"),
    "marking": ("Mark", "mark"),
    "private": (
        "common_objects",
        "give_buffers",
        "give_private",
        "global_generators",
        "private_buffers",
        "take_buffers",
        "take_private",
    ),
    "rate": ("raw_rate", "receive_raw", "send_raw"),
    "receiving": ("Receiver", "ReceiveReport", "receive"),
    "restoring": ("restore",),
    "stored": ("Stored", "pack", "read_head", "replica_key", "unpack"),
    "transfer": ("Sender", "SendReport", "send"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(importlib.import_module(f"tm_slurm.state.{_HOME_OF[name]}"), name)
    raise AttributeError(f"module 'tm_slurm.state' has no attribute {name!r}")
