"""What happens to the job's nodes, as facts with an identity (`Event`), and how node states become events;
the windows that Slurm's reservations open over its nodes.

A leaf beside `tm_slurm.slurm`: no torch, no sockets.
"""

from __future__ import annotations

from tm_slurm.events.event import KINDS, SOURCES, Event, EventError, EventKind, EventSource
from tm_slurm.events.identity import Episodes, Seen
from tm_slurm.events.poll import NodeWatch
from tm_slurm.events.windows import Window, windows_of

__all__ = [
    "KINDS",
    "SOURCES",
    "Episodes",
    "Event",
    "EventError",
    "EventKind",
    "EventSource",
    "NodeWatch",
    "Seen",
    "Window",
    "windows_of",
]
