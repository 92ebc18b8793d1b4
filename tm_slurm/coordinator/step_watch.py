"""Whether the ranks get on with their steps, from what they tell with their heartbeats: that they are stuck
(tm_slurm.coordinator.watchdog), or that one is slow (tm_slurm.coordinator.stragglers)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from tm_slurm.coordinator.actions import Note
from tm_slurm.coordinator.clock import elapsed_s
from tm_slurm.coordinator.decide import Decisions
from tm_slurm.coordinator.deciding import Input
from tm_slurm.coordinator.shrinking import reports_of_all
from tm_slurm.coordinator.stragglers import Stragglers
from tm_slurm.coordinator.watchdog import Blame, Hang, Watchdog

Message = dict[str, Any]


class Policy(Protocol):
    """What of the job's policy it goes by."""

    watchdog_floor_s: float
    watchdog_factor: float
    straggler_slower: float | None
    straggler_steps: int


class StepWatch:
    """`say` sends a question to all ranks, `noted` writes a note down."""

    def __init__(
        self,
        decisions: Decisions,
        policy: Policy,
        *,
        say: Callable[[Message], None],
        noted: Callable[[Note], None],
    ) -> None:
        self._decisions = decisions
        self._say = say
        self._noted = noted
        self._watchdog = Watchdog(
            decisions.state.plan.world_size, floor_s=policy.watchdog_floor_s, factor=policy.watchdog_factor
        )
        self._stragglers: Stragglers | None = None
        if policy.straggler_slower is not None:
            self._stragglers = Stragglers(
                slower=policy.straggler_slower, steps=policy.straggler_steps, replicas=decisions.same_work
            )

    def committed(self, told: Message) -> None:
        """A rank's heartbeat, with its new steps."""
        for step, _, seconds, _ in told["steps"]:
            self._watchdog.committed(int(told["rank"]), int(step), float(seconds), elapsed_s())

    def whereabouts(self, message: Message) -> None:
        """A rank says where it is in a step that hangs."""
        waiting, since_s = bool(message["waiting"]), float(message["since_s"])
        for told in reports_of_all(self._decisions.state, message):
            self._watchdog.whereabouts(int(told["rank"]), waiting=waiting, since_s=since_s)

    def compared(self, node: str, report: Message) -> Input | None:
        """Whether a heartbeat from `node` shows that its rank is slower than others: what the decisions are
        to hear then. Its own word: nobody's share of an absent rank is compared."""
        slow: Input | None = None
        for step, seconds in report.get("worked", ()) if self._stragglers is not None else ():
            assert self._stragglers is not None
            found = self._stragglers.worked(int(report["rank"]), int(step), float(seconds))
            if found is None:
                continue
            self._stragglers.disturbed()
            state = self._decisions.state
            known = len(state.slow_on.get(found.rank, ())) > 1
            if not known and state.nodes[node].notice is None:
                slow = {"kind": "straggler", "rank": found.rank, "step": found.step, "ratio": found.ratio}
        return slow

    def look(self, now: float) -> Input | None:
        """Whether the ranks are stuck in a step, and because of whom: what the decisions are to hear then.
        Not while something else explains it."""
        state = self._decisions.state
        switching = state.move is not None and state.move.phase == "switching"
        calm = state.started and state.recovery is None and not (switching or state.finishing or state.ended)
        unlike = state.move is not None or state.absent or state.seats.hosts()  # ranks that share a node
        if self._stragglers is not None and (not calm or unlike):
            self._stragglers.disturbed()
        found = self._watchdog.look(now, calm=calm)
        if isinstance(found, Hang):
            fields = {"step": found.step, "seconds": found.seconds, "limit_s": found.limit_s}
            self._noted(Note("hangs", fields))
            self._say({"kind": "where"})
        elif isinstance(found, Blame):
            return {"kind": "step_stuck", "ranks": list(found.ranks), "step": found.step, "how": found.how}
        return None
