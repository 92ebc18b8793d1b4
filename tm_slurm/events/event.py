"""An event: one fact about one node or rank that may make ranks move, whoever reported it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

EventKind = Literal[
    "drain",  # an administrator wants the node back
    "fail",  # Slurm's FAIL: applications should leave
    "down",  # the node is lost
    "maintenance",  # a maintenance reservation has begun on the node
    "reboot",  # a reboot is asked for, and waits for jobs to leave
    "task_exit",  # a rank process or an agent ended
    "step_end",  # a step of the job ended on the node
    "node_join",  # the job has come to the node (prolog)
    "node_leave",  # the job has left the node (epilog)
    "node_stop",  # slurmd stopped in an orderly way
    "unhealthy",  # a health check failed
    "straggler",  # the node is slower than the others
    "resume",  # what was said of the node before no longer holds
    "request",  # somebody asked for this move
    "time_limit",  # the job's time is nearly over
    "preempt",  # Slurm wants the resources for another job
]
EventSource = Literal["poll", "spank", "prolog", "epilog", "strigger", "health", "agent", "link", "user"]

KINDS: frozenset[str] = frozenset(get_args(EventKind))
SOURCES: frozenset[str] = frozenset(get_args(EventSource))


class EventError(ValueError):
    """Something that was to be an event is none; the message names the field, what was expected and found."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """One fact. Two reports of the same fact, from any source, have the same `id`: it is acted on once.

    `node` is Slurm's name of the node, empty for what concerns the whole job; `rank` is a rank of the default
    group where the fact concerns one. `at` and `deadline` are seconds of the wall clock (Unix time): when it
    was seen, and when the node will be gone where that is known. `reason` is for people.
    """

    id: str
    kind: EventKind
    node: str
    source: EventSource
    reason: str
    at: float
    rank: int | None = None
    deadline: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the event as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Event:
        """Read what `to_json` wrote, unknown fields ignored; raises EventError for anything else amiss."""
        known = {field.name for field in fields(cls)}
        given = {name: content for name, content in value.items() if name in known}
        for name in ("id", "kind", "node", "source", "reason"):
            if not isinstance(given.get(name), str):
                raise EventError(f"event: expected text in {name!r}, found {given.get(name)!r}")
        for name in ("at", "deadline"):
            number = given.get(name)
            if not _is_number(number) and not (name == "deadline" and number is None):
                raise EventError(f"event: expected Unix seconds in {name!r}, found {number!r}")
        rank = given.get("rank")
        if rank is not None and (not isinstance(rank, int) or isinstance(rank, bool) or rank < 0):
            raise EventError(f"event: expected a rank in 'rank', found {rank!r}")
        if given["kind"] not in KINDS:
            raise EventError(
                f"event: expected one of {', '.join(sorted(KINDS))} in 'kind', found {given['kind']!r}"
            )
        if given["source"] not in SOURCES:
            raise EventError(
                f"event: expected one of {', '.join(sorted(SOURCES))} in 'source', found {given['source']!r}"
            )
        return cls(**given)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
