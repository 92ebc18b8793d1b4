"""Keeps what the ranks report (steps, commit times, loss) and derives from it what an interruption cost.

Downtime of a planned move (design "How we measure"): commit time of the first step after the switch, minus
that of the last step before it, minus the median steady step; at the slowest rank. Times are wall clock,
since the two commits of a moved rank happen on two machines.
"""

from __future__ import annotations

import json
import statistics
from collections import deque
from pathlib import Path
from typing import Any

STEADY_WINDOW = 200
"""Steps whose median is the steady step time."""

KEPT_STEPS = 2000
"""Commit times kept in memory for each rank."""


class Record:
    """Fed by heartbeats and notes; appends to steps.jsonl and timeline.jsonl in the job directory."""

    def __init__(self, job_dir: Path, world_size: int) -> None:
        self._steps_file = (job_dir / "steps.jsonl").open("a")
        self._timeline_file = (job_dir / "timeline.jsonl").open("a")
        self.world_size = world_size
        self.commits: dict[int, dict[int, float]] = {}
        self.latest: dict[int, dict[str, Any]] = {}
        self.last_loss: float | None = None
        self.first_loss: float | None = None
        self.last_move: dict[str, Any] | None = None
        self._durations: deque[float] = deque(maxlen=STEADY_WINDOW)
        self._disturbed = False
        self._next_step = 0
        self._heard_of_others: dict[int, dict[str, Any]] = {}
        self._open_moves: list[dict[str, Any]] = []

    def note(self, what: str, at: float, **fields: Any) -> None:
        """One line of the timeline."""
        self._timeline_file.write(json.dumps({"at": at, "what": what, **fields}) + "\n")
        self._timeline_file.flush()
        if what == "prepare":
            self._disturbed = True
        if what in ("moved", "cancelled"):
            self._disturbed = False

    def beat(self, node: str, report: dict[str, Any]) -> None:
        """A rank's heartbeat: its new steps as [step, committed_at, seconds, loss or null]."""
        rank = int(report["rank"])
        self.latest[rank] = {"node": node, "epoch": report["epoch"], "step": report["step"]}
        commits = self.commits.setdefault(rank, {})
        for step, committed_at, seconds, loss in report["steps"]:
            commits[step] = committed_at
            commits.pop(step - KEPT_STEPS, None)
            if rank == 0:
                self._step_of_rank_0(step, committed_at, seconds, loss)
            elif step >= self._next_step:
                self._heard_of_others[step] = {
                    "at": committed_at,
                    "seconds": seconds,
                    "loss": loss,
                    "rank": rank,
                }
        self._close_moves()

    def _step_of_rank_0(self, step: int, committed_at: float, seconds: float, loss: float | None) -> None:
        for missed in range(
            self._next_step, step
        ):  # rank 0 died with these untold; others have done them too
            if missed in self._heard_of_others:
                self._write_step(missed, self._heard_of_others[missed])
        self._next_step = step + 1
        for old in [told for told in self._heard_of_others if told <= step]:
            del self._heard_of_others[old]
        if not self._disturbed and step > 1:
            self._durations.append(seconds)
        if loss is not None:
            self.last_loss = loss
            if self.first_loss is None:
                self.first_loss = loss
        self._write_step(step, {"at": committed_at, "seconds": seconds, "loss": loss, "rank": 0})

    def _write_step(self, step: int, told: dict[str, Any]) -> None:
        self._steps_file.write(json.dumps({"step": step, **told}) + "\n")
        self._steps_file.flush()

    def steady_step_s(self) -> float | None:
        """Median seconds of the last undisturbed steps."""
        return statistics.median(self._durations) if self._durations else None

    def moved(self, fields: dict[str, Any]) -> None:
        """A move has committed; its downtime follows when every rank has reported the first step after it."""
        self.last_move = dict(fields)
        self._open_moves.append(self.last_move)
        self._close_moves()

    def _close_moves(self) -> None:
        for move in list(self._open_moves):
            first = int(move["step"])
            gaps = [
                commits[first] - commits[first - 1]
                for commits in self.commits.values()
                if first in commits and first - 1 in commits
            ]
            steady = self.steady_step_s()
            if len(gaps) == self.world_size and steady is not None:
                move["downtime_s"] = max(gaps) - steady
                move["steady_step_s"] = steady
                self._open_moves.remove(move)
                at = max(commits[first] for commits in self.commits.values())
                self.note("downtime", at, **{k: v for k, v in move.items() if k != "what"})

    def close(self) -> None:
        self._steps_file.close()
        self._timeline_file.close()
