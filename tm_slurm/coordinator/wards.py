"""Private states of lost ranks on their way from their buddies, through the leader, to their successors."""

from __future__ import annotations

from typing import Any

Message = dict[str, Any]


def needs_ward(order: Message) -> bool:
    """Whether a private state goes with this order."""
    return order["kind"] == "replace" and "sources" in order


class Wards:
    """What the buddies have handed in for the newest recovery. It is not journalled: a new leader asks for it
    again, because it begins the recovery again."""

    def __init__(self) -> None:
        self._epoch = 0
        self._told: dict[int, list[Message]] = {}

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
        if not needs_ward(order):
            return order
        told = self._told.get(int(order["rank"]), ()) if int(order["epoch"]) == self._epoch else ()
        fitting = [known for known in told if int(known["step"]) <= int(order["target"])]
        if not fitting:
            return None
        newest = max(fitting, key=lambda known: (int(known["step"]), known.get("buffers") is not None))
        step, buffers = newest["step"], newest.get("buffers")
        return {**order, "private": newest["private"], "private_step": step, "private_buffers": buffers}
