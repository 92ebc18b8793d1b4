"""Which reports speak of the same fact.

A fact has a beginning and an end: a node is drained, and later resumed. Every report in between, from
whatever source, is about the same fact and gets its id; the next drain of the same node is another fact
with another id.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from tm_slurm.events.event import Event, EventKind


class Episodes:
    """The facts that hold at present, by kind and node, and the ids given to them.

    One object serves every source of a coordinator, so that the poll and a trigger program that both report
    a drain agree. A new leader restores it from the journal's events.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[EventKind, str], str] = {}
        self._used: dict[str, int] = {}

    def begin(self, kind: EventKind, node: str, mark: float) -> str:
        """Return the id of the fact `kind` about `node`: the one that holds, else a new one.

        `mark` is when the fact began, in Unix seconds: Slurm's own time where there is one, so that two
        observers who know nothing of each other give the same id.
        """
        known = self._open.get((kind, node))
        if known is not None:
            return known
        stem = f"{kind}/{node}/{mark:.0f}"
        count = self._used.get(stem, 0) + 1
        self._used[stem] = count
        identity = stem if count == 1 else f"{stem}#{count}"
        self._open[kind, node] = identity
        return identity

    def end(self, kind: EventKind, node: str) -> str | None:
        """Note that the fact no longer holds; return its id, or None when it did not hold."""
        return self._open.pop((kind, node), None)

    def holding(self, node: str) -> set[EventKind]:
        """Return the kinds of the facts that hold about `node`."""
        return {kind for kind, holder in self._open if holder == node}

    def restore(self, events: Iterable[Event]) -> None:
        """Take over what an earlier leader knew, from its events in their order."""
        for event in events:
            if event.kind == "resume":
                for kind in self.holding(event.node):
                    self.end(kind, event.node)
                continue
            self._open[event.kind, event.node] = event.id
            stem, _, count = event.id.partition("#")
            self._used[stem] = max(self._used.get(stem, 0), int(count) if count.isdigit() else 1)


class Seen:
    """The ids that were handled already. Bounded: the oldest are forgotten beyond `limit`."""

    def __init__(self, limit: int = 10_000) -> None:
        if limit < 1:
            raise ValueError(f"limit: expected at least 1, found {limit}")
        self._limit = limit
        self._ids: OrderedDict[str, None] = OrderedDict()

    def first_time(self, event: Event) -> bool:
        """Note `event`; return True exactly once for each id."""
        if event.id in self._ids:
            self._ids.move_to_end(event.id)
            return False
        self._ids[event.id] = None
        if len(self._ids) > self._limit:
            self._ids.popitem(last=False)
        return True

    def __contains__(self, identity: object) -> bool:
        return identity in self._ids

    def __len__(self) -> int:
        return len(self._ids)
