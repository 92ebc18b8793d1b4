"""What the coordinator can decide to do. The leader carries these out; decisions only name them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Tell:
    """Send a message to a node's agent (slot None) or to one of its rank processes."""

    node: str
    slot: int | None
    message: dict[str, Any]


@dataclass(frozen=True)
class Spread:
    """Tell every rank, with the next sign of life to its agent: nobody waits for it."""

    message: dict[str, Any]


@dataclass(frozen=True)
class Release:
    """Give a node back to Slurm by shrinking the job."""

    node: str


@dataclass(frozen=True)
class Comment:
    """Put one line into the Slurm job's comment."""

    text: str


@dataclass(frozen=True)
class Note:
    """Something that people and the timeline should know."""

    what: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Resign:
    """Hand leadership to another node's agent: this one is about to leave."""

    to: str


@dataclass(frozen=True)
class End:
    """Write the verdict and end every agent. `failure`: rank, node, step, data position, traceback and log of
    the rank that failed first, if that is the cause."""

    state: str
    exit_code: int
    reason: str
    failure: dict[str, Any] | None = None
    begins: float | None = None
    """Unix seconds before which a job that goes back into the queue is not to start"""


Action = Tell | Spread | Release | Comment | Note | Resign | End
