"""Private states of lost ranks on their way from their buddies, through the leader, to their successors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tm_slurm.coordinator.actions import Tell

HELD_S = 2.0
"""So long an order waits for the private state that goes with it; if its connection broke on the way, it will
not come at all."""

Message = dict[str, Any]


def wards_of(order: Message) -> list[int]:
    """The ranks whose private states go with this order."""
    if order["kind"] == "replace" and "sources" in order:
        return [int(order["rank"])]
    return sorted(int(rank) for rank in order.get("adopt", ()))


class Wards:
    """What the buddies have handed in for the newest recovery. It is not journalled: a new leader asks for it
    again, because it begins the recovery again."""

    def __init__(self) -> None:
        self._epoch = 0
        self._told: dict[int, list[Message]] = {}
        self._held: list[tuple[Tell, float]] = []

    def take(self, message: Message) -> bool:
        """Keep a buddy's copy of a lost rank's private state. False when the message is none."""
        if message.get("kind") != "ward":
            return False
        epoch, rank = int(message["epoch"]), int(message["rank"])
        if epoch > self._epoch:
            self._epoch, self._told = epoch, {}
        if epoch == self._epoch:
            self._told.setdefault(rank, []).append(message)
        return True

    def with_ward(self, order: Message) -> Message | None:
        """A successor's order with the newest private state told up to the step at which all go on; None when
        there is none."""
        if not wards_of(order):
            return order
        if order["kind"] == "resolve":
            return self._with_adopted(order)
        told = self._told_of(order, int(order["rank"]))
        fitting = [known for known in told if int(known["step"]) <= int(order["target"])]
        fitting = [known for known in fitting if "common" not in known]
        if not fitting:
            return None
        newest = max(fitting, key=lambda known: (int(known["step"]), known.get("buffers") is not None))
        step, buffers = newest["step"], newest.get("buffers")
        return {**order, "private": newest["private"], "private_step": step, "private_buffers": buffers}

    def _with_adopted(self, order: Message) -> Message | None:
        """A survivor's order with the private states, at the boundary, of absent ranks whose share it is to
        do from now on."""
        adopt = {}
        for rank in order["adopt"]:
            told = self._told_of(order, int(rank))
            fitting = [known for known in told if int(known["step"]) == int(order["target"])]
            if not fitting:
                return None
            best = min(fitting, key=lambda known: "common" in known)
            adopt[rank] = {"private": best["private"], "common": best.get("common", [])}
        return {**order, "adopt": adopt}

    def _told_of(self, order: Message, rank: int) -> list[Message]:
        return self._told.get(rank, []) if int(order["epoch"]) == self._epoch else []

    def hold(self, order: Tell, now: float) -> None:
        """Keep an order until the private state that goes with it is there. `now`: seconds of one clock."""
        self._held.append((order, now))

    def complete(self) -> list[Tell]:
        """The orders that were held and have all that they need by now."""
        found = [(order, self.with_ward(order.message)) for order, _ in self._held]
        self._held = [held for held, (_, message) in zip(self._held, found, strict=True) if message is None]
        return [replace(order, message=message) for order, message in found if message is not None]

    def overdue(self, now: float) -> list[Tell]:
        """The orders that were held for too long; they are held no more."""
        late = [order for order, since in self._held if now - since > HELD_S]
        self._held = [(order, since) for order, since in self._held if now - since <= HELD_S]
        return late
