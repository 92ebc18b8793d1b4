"""What the nodes have been told, and perhaps have not heard: kept until they say that they have.

Decisions are a function of the journal, so a new leader that replays it finds every order of the leaders
before, in the same order. Each has a place: the term of the input that it came from, and how many orders that
node had been given in that term. An agent says up to which place it has obeyed; what comes after is sent to
it (again), and it passes over what it has obeyed already.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from tm_slurm.coordinator.actions import Tell

KEPT = 4096
"""Orders kept for a node that does not say what it has heard."""

Place = tuple[int, int]
Message = dict[str, Any]


class Orders:
    """For every node of the job."""

    def __init__(self) -> None:
        self._given: dict[str, Place] = {}
        self._waiting: dict[str, deque[tuple[Place, Message]]] = {}

    def add(self, order: Tell, term: int, *, whole: bool = True) -> Message:
        """Keep an order that an input of this term has led to; returns the frame to send. `whole`: it is all
        there; else it only has its place, and is not sent again."""
        last_term, count = self._given.get(order.node, (0, 0))
        place = (term, count + 1 if last_term == term else 1)
        self._given[order.node] = place
        frame = {"slot": order.slot, "message": order.message, "place": place}
        if whole:
            self._waiting.setdefault(order.node, deque(maxlen=KEPT)).append((place, frame))
        return frame

    def heard(self, node: str, place: Place) -> None:
        """A node has obeyed what it was told up to there."""
        waiting = self._waiting.get(node)
        while waiting and waiting[0][0] <= place:
            waiting.popleft()

    def waiting(self, node: str) -> list[Message]:
        """What a node has not said to have heard, in order."""
        return [frame for _, frame in self._waiting.get(node, ())]

    def drop(self, node: str) -> None:
        """A node is lost: what it was to do before is past."""
        self._waiting.pop(node, None)
