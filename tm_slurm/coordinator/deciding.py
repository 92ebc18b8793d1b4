"""What every part of the decisions shares: the state, the time of the input, and the actions it leads to."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tm_slurm.coordinator.actions import Action, End, Note, Tell
from tm_slurm.coordinator.model import JobState, Move, Process

Input = dict[str, Any]


class Deciding:
    """`actions` collects, in order, what the input being handled leads to; `now` is that input's time."""

    def __init__(self, state: JobState) -> None:
        self.state = state
        self.now = 0.0
        self.actions: list[Action] = []

    def _note(self, what: str, **fields: Any) -> None:
        self.actions.append(Note(what, fields))

    def _tell(self, node: str, slot: int | None, message: dict[str, Any]) -> None:
        self.actions.append(Tell(node, slot, message))

    def _tell_rank(self, rank: int, message: dict[str, Any]) -> None:
        node, slot = self.state.seats[rank]
        if slot in self.state.nodes[node].processes:
            self._tell(node, slot, message)

    def _end(self, verdict: str, exit_code: int, reason: str, failure: dict[str, Any] | None = None) -> None:
        """`failure`: of the rank that failed first, if that is the cause."""
        if verdict == "requeue" and self.state.plan.requeues_left <= 0:
            verdict, reason = "failed", f"{reason}; not requeued again: job.max_requeues"
        self.state.ended = True
        begins = self.state.begins if verdict == "requeue" else None
        end = End(verdict, exit_code, reason, failure, begins)
        self.state.verdict = asdict(end)
        self._note("ended", state=verdict, reason=reason, **({"failure": failure} if failure else {}))
        self.actions.append(end)

    def _move_of(self, given: Input) -> Move | None:
        """The move in flight, if the input speaks of it."""
        move = self.state.move
        return move if move is not None and move.epoch == given["epoch"] else None

    def _known(self, given: Input) -> Process | None:
        """The process an input speaks of; None when that incarnation is no longer there."""
        process = self.state.nodes[given["node"]].processes.get(int(given["slot"]))
        if process is None or process.incarnation != given["incarnation"]:
            return None
        return process
