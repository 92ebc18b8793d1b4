"""Events out of node states: the difference between what Slurm said last and what it says now."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from tm_slurm.events.event import Event
from tm_slurm.events.identity import Episodes
from tm_slurm.slurm.interface import NodeInfo
from tm_slurm.slurm.node_state import LEAVING_KINDS, LeavingKind

# States that slurmctld gives a node it knows nothing of (just after its own restart, say): nothing ends by
# them.
_SAYS_NOTHING = {"UNKNOWN", "FUTURE"}


class NodeWatch:
    """Turns node states into events. Pure: asks nobody, keeps no clock, never blocks.

    A node that is draining already at the first look is an event like any other. A poll that failed, and a
    node that an answer leaves out, change nothing: silence is never read as "healthy again".
    """

    def __init__(self, episodes: Episodes | None = None) -> None:
        """`episodes`: shared with the other sources, so that the same fact has the same id from all of
        them.
        """
        self.episodes = episodes if episodes is not None else Episodes()

    def observe(
        self, nodes: Mapping[str, NodeInfo] | None, now: float, *, at_home: Collection[str] = ()
    ) -> list[Event]:
        """Return what is new in `nodes` (None: the poll failed) since the last look, in the order of `nodes`.

        `now` is the wall clock, Unix seconds. `at_home`: nodes whose reservation is the job's own, so that
        their maintenance is no reason to leave.
        """
        events: list[Event] = []
        for info in (nodes or {}).values():
            event = self._observe_one(_at_home(info) if info.name in at_home else info, now)
            if event is not None:
                events.append(event)
        return events

    def _observe_one(self, info: NodeInfo, now: float) -> Event | None:
        held = [kind for kind in LEAVING_KINDS if kind in self.episodes.holding(info.name)]
        holds = info.state.leaving_kinds
        ended = [self.episodes.end(kind, info.name) for kind in held if _has_ended(kind, info)]
        begun = [kind for kind in holds if kind not in held]
        mark = info.reason_at if info.reason_at is not None else now
        ids = {kind: self.episodes.begin(kind, info.name, mark) for kind in begun}
        if begun and (not held or _urgency(begun[0]) < _urgency(held[0])):
            reason = info.reason or f"node state {info.state}"
            return Event(
                id=ids[begun[0]], kind=begun[0], node=info.name, source="poll", reason=reason, at=now
            )
        if ended and not self.episodes.holding(info.name).intersection(LEAVING_KINDS):
            reason = f"node state {info.state}"
            return Event(
                id=f"resume/{ended[0]}", kind="resume", node=info.name, source="poll", reason=reason, at=now
            )
        return None


def _at_home(info: NodeInfo) -> NodeInfo:
    return replace(info, state=replace(info.state, flags=info.state.flags - {"MAINTENANCE"}))


def _has_ended(kind: LeavingKind, info: NodeInfo) -> bool:
    if kind in info.state.leaving_kinds or info.state.base in _SAYS_NOTHING:
        return False
    # RESUME takes a node out of DOWN at once; it is back when its slurmd has answered.
    return not (kind == "down" and "NOT_RESPONDING" in info.state.flags)


def _urgency(kind: LeavingKind) -> int:
    return LEAVING_KINDS.index(kind)
