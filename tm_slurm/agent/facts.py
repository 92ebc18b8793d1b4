"""What a rank process has said that is still true: a leader that is new to it must hear it again.

Three rules say what is true no longer:

1. A message stays true until the next of its kind (`APART`: of its kind that is about the same).
2. What is said of an epoch stays true until the process speaks of a newer epoch, or runs at one: epochs are
   begun one after the other, so the older one was committed or given up.
3. Some messages end others (`ENDS`): a rank that has stopped for a recovery is no longer done, say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OF_THE_PROCESS = frozenset(
    {
        "process_ready",
        "process_warm",
        "process_stopped",
        "process_unwell",
        "replica_key",
        "rank_done",
        "snapshot_stored",
        "checkpoint_written",
    }
)
"""True whatever the epoch is."""

OF_AN_EPOCH = frozenset(
    {
        "leaver_prepared",
        "joined",
        "not_joined",
        "join_failed",
        "switching",
        "resumed",
        "stopped",
        "too_late",
        "broken",
        "survivor",
        "source_ready",
        "adopted",
    }
)
"""True for one epoch, the message's `epoch`."""

LASTING = OF_THE_PROCESS | OF_AN_EPOCH

APART: Mapping[str, str] = {"source_ready": "rank", "replica_key": "step", "checkpoint_written": "rank"}
"""kind → the field by which several of this kind are true at a time."""

ENDS: Mapping[str, frozenset[str]] = {
    "joined": frozenset({"join_failed", "not_joined"}),
    "join_failed": frozenset({"joined"}),
    "not_joined": frozenset({"joined"}),
    "stopped": frozenset({"too_late"}),
    "too_late": frozenset({"stopped"}),
    "survivor": frozenset({"broken", "rank_done"}),
    "resumed": frozenset({"broken"}),
}
"""kind → the kinds that are true no longer once it was said."""


class Facts:
    """Of one process, in the order in which they were said."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, Any], dict[str, Any]] = {}
        self._epoch = 0
        """the newest that the process speaks of"""
        self._runs_at = 0
        """the newest that it is known to be at: it may speak of the next one before"""

    def take(self, message: dict[str, Any]) -> None:
        """The process, or the agent about it, has said this."""
        kind = message["kind"]
        if kind not in LASTING:
            return
        if kind in OF_AN_EPOCH and "epoch" in message:
            epoch = int(message["epoch"])
            if kind in ("survivor", "resumed"):
                self.runs_at(epoch)
            if epoch < (self._runs_at if kind == "broken" else self._epoch):
                return
            if kind != "broken":
                self._drop_before(epoch)
        for other in ENDS.get(kind, ()):
            self.end(other)
        key = (kind, message.get(APART[kind]) if kind in APART else None)
        self._told.pop(key, None)  # said again, it is said last
        self._told[key] = message

    def runs_at(self, epoch: int) -> None:
        """The process is at this epoch: what it said of older ones is past."""
        self._runs_at = max(self._runs_at, epoch)
        self._drop_before(epoch)

    def _drop_before(self, epoch: int) -> None:
        """The process speaks of this epoch: what it said of older ones is past; a collective that broke is
        not, as long as the process is still where it broke."""
        self._epoch = max(self._epoch, epoch)
        for key, message in list(self._told.items()):
            limit = self._runs_at if key[0] == "broken" else self._epoch
            if key[0] in OF_AN_EPOCH and int(message.get("epoch", limit)) < limit:
                del self._told[key]

    def end(self, kind: str) -> None:
        """What was said under this kind is true no longer."""
        for key in [key for key in self._told if key[0] == kind]:
            del self._told[key]

    def told(self) -> list[dict[str, Any]]:
        """Everything that is still true."""
        return list(self._told.values())
