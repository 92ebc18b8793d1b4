"""Who is where, found without looking at everybody: a job may have 16,384 nodes, and each input of the
decisions is to cost what it is about.

`Seats` and `Nodes` are mappings that also know, of what has been put into them, which ranks a node has, which
nodes are not simply training, and what has changed since somebody last asked.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import ItemsView, Iterable, Mapping, ValuesView
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tm_slurm.coordinator.model import Node

Place = tuple[str, int]
"""A node and a slot on it."""

SHARED_FROM = 1024
"""A table of peers with more ranks is not sent to each of them: it is in the job directory, once."""


class Seats(UserDict[int, Place]):
    """rank → place. Slots from `own_slots` on are those of guests: ranks that a node hosts beyond its own."""

    def __init__(self, seats: Mapping[int, Place], own_slots: int) -> None:
        super().__init__()
        self._own_slots = own_slots
        self._on: dict[str, dict[int, int]] = {}
        self._guests: dict[str, int] = {}
        self.moved: set[int] = set()
        """ranks that have been put somewhere since this was last emptied"""
        for rank, place in seats.items():
            self[rank] = place

    def items(self) -> ItemsView[int, Place]:
        return self.data.items()

    def values(self) -> ValuesView[Place]:
        return self.data.values()

    def __setitem__(self, rank: int, place: Place) -> None:
        self._leave(rank)
        super().__setitem__(rank, place)
        node, slot = place
        self._on.setdefault(node, {})[rank] = slot
        if slot >= self._own_slots:
            self._guests[node] = self._guests.get(node, 0) + 1
        self.moved.add(rank)

    def __delitem__(self, rank: int) -> None:
        self._leave(rank)
        super().__delitem__(rank)

    def take_out(self, rank: int) -> Place:
        """The place that a rank had; it has none any more."""
        place = self[rank]
        del self[rank]
        return place

    def _leave(self, rank: int) -> None:
        place = self.data.get(rank)
        if place is None:
            return
        node, slot = place
        on = self._on[node]
        on.pop(rank, None)
        if not on:
            del self._on[node]
        if slot >= self._own_slots:
            self._guests[node] -= 1
            if not self._guests[node]:
                del self._guests[node]

    def on(self, node: str) -> dict[int, int]:
        """rank → slot, by rank, of those on a node."""
        return dict(sorted(self._on.get(node, {}).items()))

    def hosts(self) -> Iterable[str]:
        """The nodes that have guests."""
        return self._guests


class Nodes(UserDict[str, "Node"]):
    """name → node, in the order in which they came into the job. A node that is put here tells when it
    changes."""

    def __init__(self, nodes: Mapping[str, Node]) -> None:
        super().__init__()
        self._places: dict[str, int] = {}
        self.ring: list[str] = []
        """the names, in order"""
        self._special: set[str] = set()
        self._sorted: list[Node] | None = None
        self.version = 0
        """grows with every change of where a node stands"""
        self.touched: set[str] = set()
        """nodes of which something has changed since this was last emptied"""
        for name, node in nodes.items():
            self[name] = node

    def items(self) -> ItemsView[str, Node]:
        return self.data.items()

    def values(self) -> ValuesView[Node]:
        return self.data.values()

    def __setitem__(self, name: str, node: Node) -> None:
        if name not in self:
            self._places[name] = len(self.ring)
            self.ring.append(name)
        super().__setitem__(name, node)
        self._sorted = None
        node.tell(self)
        self.changed(node)

    def place_of(self, name: str) -> int:
        """Where a node is in `ring`."""
        return self._places[name]

    def changed(self, node: Node, *, standing: bool = True) -> None:
        """Called by a node whose agent or vault has changed, or, `standing`, whether it is to be left."""
        name = node.name
        self.touched.add(name)
        if not standing:
            return
        self.version += 1
        if node.is_plain() != (name not in self._special):
            self._special ^= {name}
            self._sorted = None

    def special(self) -> list[Node]:
        """In order: the nodes that do not simply train (or are to, or have left for good): standbys, those
        that should be left or are leaving, those that are lost or dead."""
        if self._sorted is None:
            self._sorted = [self[name] for name in sorted(self._special, key=self._places.__getitem__)]
        return self._sorted


class PeerTable(dict[str, list[Any]]):
    """Who is at which address: rank (as JSON has it) → [host, port, incarnation]. In a large job it is the
    `base`, which everybody can read in the job directory, with `changes`."""

    def __init__(self, base: Mapping[str, list[Any]], changes: Mapping[str, list[Any]]) -> None:
        super().__init__(base)
        self.update(changes)
        self.base = base
        self.changes = dict(changes)

    def with_changes(self, changes: Mapping[str, list[Any]]) -> PeerTable:
        """The same with some peers at other addresses."""
        return PeerTable(self.base, {**self.changes, **changes})
