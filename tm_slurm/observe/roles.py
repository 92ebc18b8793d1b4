"""Who was what and when: the roles of a job's nodes over time, from its timeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Entry = dict[str, Any]

ACTIVE, STANDBY, LEFT = "active", "standby", "left"
"""has ranks; is in reserve; is in the job no more, or has no use for it"""


@dataclass(frozen=True)
class Stretch:
    """A node in one role, from `begin` to `end` (Unix seconds)."""

    node: str
    role: str
    begin: float
    end: float


def stretches(timeline: list[Entry], nodes: list[str], end: float) -> list[Stretch]:
    """In order of the nodes and of time. `nodes`: all of the job."""
    now: dict[str, tuple[str, float]] = {}
    found: list[Stretch] = []

    def becomes(node: str, role: str, at: float) -> None:
        before = now.get(node)
        if before is not None and before[0] != role:
            found.append(Stretch(node, before[0], before[1], at))
        if before is None or before[0] != role:
            now[node] = (role, at)

    for entry in timeline:
        what, at = entry["what"], float(entry["at"])
        if what == "started":
            for node in nodes:
                becomes(node, ACTIVE if node in entry["nodes"] else STANDBY, at)
        elif what in ("moved", "recovered"):
            joiners = {pair["joiner"] for pair in entry["pairs"]}
            for pair in entry["pairs"]:
                becomes(pair["joiner"], ACTIVE, at)
                if pair["leaver"] not in joiners:
                    becomes(pair["leaver"], LEFT, at)
        elif what == "warm":
            if now.get(entry["node"], ("", 0.0))[0] == LEFT:
                becomes(entry["node"], STANDBY, at)
        elif what in ("released", "node_lost", "kept", "standby_leaves"):
            becomes(entry["node"], LEFT, at)
    found += [Stretch(node, role, begin, end) for node, (role, begin) in now.items() if begin < end]
    order = {node: number for number, node in enumerate(nodes)}
    return sorted(found, key=lambda s: (order.get(s.node, len(order)), s.begin))
