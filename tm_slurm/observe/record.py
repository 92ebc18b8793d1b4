"""Keeps what the ranks report (steps, commit times, loss) and derives from it what an interruption cost.

Downtime of a planned move: commit time of the first step after the switch, minus
that of the last step before it, minus the median steady step; at the slowest rank. Of an unplanned failure:
the same between the last step that anybody had committed before it and the first new step; the job itself
does not know the instant of the fault. Times are wall clock, since the two commits of a moved rank happen on
two machines.
"""

from __future__ import annotations

import contextlib
import json
import statistics
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from tm_slurm.observe.follow import tail_of
from tm_slurm.observe.spans import SpanBook
from tm_slurm.observe.step_log import StepLog, append_to, put
from tm_slurm.observe.tally import Tally

T = TypeVar("T")

STEADY_WINDOW = 200
"""Steps whose median is the steady step time."""

KEPT_STEPS = 2000
"""Commit times kept in memory for each rank, in a small job."""

KEPT_TIMES = 500_000
"""Commit times kept of all ranks together, in a large one."""

LEAST_STEPS = 20
"""Steps whose times are kept at least: an interruption is judged by those around it."""

ALL_LOOKED_AT = 256
"""With more ranks, what an interruption has cost is looked for once in as many heartbeats as there are
ranks."""

TIMELINE_TAIL_BYTES = 4 << 20
"""How much of the timeline of earlier leaders is read, for what they have counted and left open."""


class Record:
    """Fed by heartbeats and notes; appends to steps.jsonl and timeline.jsonl in the job directory."""

    def __init__(self, job_dir: Path, world_size: int) -> None:
        self._steps = StepLog(job_dir / "steps.jsonl", world_size)
        self._timeline_file = append_to(job_dir / "timeline.jsonl")
        self._spans = SpanBook()
        self.tally = Tally()
        for entry in tail_of(job_dir / "timeline.jsonl", TIMELINE_TAIL_BYTES):
            self._spans.take(entry)
            self.tally.take(entry)
        self.world_size = world_size
        self.commits: dict[int, dict[int, float]] = {}
        """rank → step → when it was committed, the last time that it was"""
        self._firsts: dict[int, dict[int, float]] = {}
        self.latest: dict[int, dict[str, Any]] = {}
        self.last_loss = self._steps.last_loss
        self.last_step_at: float | None = None
        self.last_move: dict[str, Any] | None = None
        self._durations: deque[float] = deque(self._steps.durations(STEADY_WINDOW), maxlen=STEADY_WINDOW)
        self._disturbed = False
        self._open_moves: list[dict[str, Any]] = []
        self._together: dict[tuple[Any, ...], Any] = {}
        """what has been found out for the moves that are being closed"""
        self._kept_steps = max(LEAST_STEPS, min(KEPT_STEPS, KEPT_TIMES // world_size))
        self._beats = 0

    def note(self, what: str, at: float, **fields: Any) -> None:
        """One line of the timeline, and one for each span that ends with it (see tm_slurm.observe.spans)."""
        entry = {"at": at, "what": what, **fields}
        ended = [{"what": "span", **span} for span in self._spans.take(entry)]
        for line in (entry, *ended):
            self.tally.take(line)
        put(self._timeline_file, "".join(json.dumps(line) + "\n" for line in (entry, *ended)))
        if what in ("prepare", "failed", "recover"):
            self._disturbed = True
        if what in ("moved", "cancelled", "recovered"):
            self._disturbed = False

    def beat(self, node: str, report: dict[str, Any]) -> None:
        """A rank's heartbeat: its new steps as [step, committed_at, seconds, loss or null].

        What was reported before may come again: a step that was rolled back and is done a second time, or a
        heartbeat that a lost leader may not have heard."""
        rank = int(report["rank"])
        if report["epoch"] >= self.latest.get(rank, report)["epoch"]:
            self.latest[rank] = {"node": node, "epoch": report["epoch"], "step": report["step"]}
        commits, firsts = self.commits.setdefault(rank, {}), self._firsts.setdefault(rank, {})
        for step, committed_at, seconds, loss in report["steps"]:
            if rank == 0 and step not in commits and not self._disturbed and step > 1 and seconds > 0:
                self._durations.append(seconds)
            if rank == 0:
                self.last_step_at = committed_at
            if rank == 0 and loss is not None:
                self.last_loss = loss
            commits[step] = max(committed_at, commits.get(step, 0.0))
            firsts[step] = min(committed_at, firsts.get(step, committed_at))
            for kept in (commits, firsts):
                kept.pop(step - self._kept_steps, None)
            self._steps.take(rank, step, {"at": committed_at, "seconds": seconds, "loss": loss, "rank": rank})
        self._beats += 1
        if self.world_size <= ALL_LOOKED_AT or self._beats % self.world_size == 0:
            self._close_moves()

    def steady_step_s(self) -> float | None:
        """Median seconds of the last undisturbed steps."""
        return statistics.median(self._durations) if self._durations else None

    def moved(self, fields: dict[str, Any]) -> None:
        """A move, or a recovery (it has `agreed_at`), has committed; its downtime follows when every rank has
        reported a step after it."""
        self.last_move = dict(fields)
        self._open_moves.append(self.last_move)
        if self.world_size <= ALL_LOOKED_AT:
            self._close_moves()

    def _close_moves(self) -> None:
        """Moves that are over by what ranks have told; those of a rack come to the same step together, and
        its times are put together once."""
        steady = self.steady_step_s()
        if steady is None or not self._open_moves or len(self.latest) < self.world_size:
            return
        reached = min(told["step"] for told in self.latest.values())
        for move in [move for move in self._open_moves if int(move["step"]) <= reached]:
            cost_of = self._cost_of_recovery if "agreed_at" in move else self._cost_of_move
            cost = cost_of(move, steady)
            if cost is None:
                continue
            self._open_moves.remove(move)
            at = cost.pop("at")
            move.update(cost, steady_step_s=steady)
            went_on = self._went_on(move, at)
            self.note("downtime", at, **move, went_on=went_on)
        self._together.clear()

    def _once(self, what: tuple[Any, ...], work: Callable[[], T]) -> T:
        """What `work` returns, found out once for all moves that are being closed."""
        if what not in self._together:
            self._together[what] = work()
        return cast(T, self._together[what])

    def _went_on(self, move: dict[str, Any], end: float) -> list[dict[str, Any]]:
        """How the ranks that have moved, and the slowest of all, came to their first new step: from when,
        when the last step that they did again was done, and when that one was. Not all: there may be
        thousands."""
        first = int(move.get("first_new_step", move["step"]))
        redone = first > int(move["step"])
        told_after = [float(told.get("told_after_s", 0.0)) for told in move.get("resumed", {}).values()]
        since = float(move.get("agreed_at", move.get("switched_at", end))) + max(told_after, default=0.0)
        moved = {int(rank) for pair in move.get("pairs", ()) for rank in pair["ranks"]}
        slowest = self._once(
            ("slowest", first),
            lambda: max(self.commits, key=lambda rank: self.commits[rank].get(first, 0.0), default=0),
        )
        return [
            {
                "rank": rank,
                "node": self.latest[rank]["node"],
                "from": since,
                "redone_at": self.commits[rank].get(first - 1) if redone else None,
                "at": self.commits[rank][first],
            }
            for rank in sorted(moved | {slowest})
            if first in self.commits.get(rank, ())
        ]

    def _cost_of_move(self, move: dict[str, Any], steady: float) -> dict[str, Any] | None:
        first = int(move["step"])
        gap = self._once(("gap", first), lambda: self._longest_gap(first))
        return {"at": gap[0], "downtime_s": gap[1] - steady} if gap is not None else None

    def _longest_gap(self, first: int) -> tuple[float, float] | None:
        """When the last rank committed step `first`, and the longest that one took for it; None while a rank
        has not come so far."""
        ends = self._committed(first, after=0.0)
        if ends is None:
            return None
        gaps = [at - self.commits[r][first - 1] for r, at in ends.items() if first - 1 in self.commits[r]]
        return (max(ends.values()), max(gaps)) if gaps else None

    def _committed(self, step: int, *, after: float) -> dict[int, float] | None:
        """rank → when it committed `step`, later than `after`; of a rank that died with that untold, nothing.
        None while a rank has not come so far."""
        come = {
            rank
            for rank, commits in self.commits.items()
            if any(commits.get(n, 0.0) > after for n in range(step, self.latest[rank]["step"] + 1))
        }
        if len(come) < self.world_size:
            return None
        times = {rank: self.commits[rank].get(step, 0.0) for rank in come}
        return {rank: at for rank, at in times.items() if at > after} or None

    def _cost_of_recovery(self, move: dict[str, Any], steady: float) -> dict[str, Any] | None:
        """The downtime, and its parts from `started_at` (when the failure was heard of) on: until the
        survivors had stopped and agreed (decide), until the last successor had built its role, its links and
        its private state (switch), its transfer (state), the steps that were done a second time (redo), and
        the rest of the first new step (other). With the time from the fault to `started_at` (detect) they add
        up to the downtime that is counted from the fault."""
        agreed_at, target = float(move["agreed_at"]), int(move["step"])
        if self._committed(target, after=agreed_at) is None:
            return None
        before = [
            (step, at) for firsts in self._firsts.values() for step, at in firsts.items() if at <= agreed_at
        ]
        first = max(target, max((step for step, _ in before), default=-1) + 1)
        ends = self._committed(first, after=agreed_at)
        if ends is None:
            return None
        redone = self._committed(first - 1, after=agreed_at) if first > target else None
        resumed = max(move["resumed"].values(), key=lambda told: told["told_after_s"], default=None)
        ready_s = resumed["told_after_s"] if resumed is not None else 0.0
        state_s = min(resumed.get("state_s", 0.0), ready_s) if resumed is not None else 0.0
        going_at = agreed_at + ready_s
        redo_s = max(redone.values()) - going_at if redone is not None else 0.0
        end = max(ends.values())
        last = max((at for step, at in before if step == first - 1), default=float(move["started_at"]))
        return {
            "at": end,
            "downtime_s": end - last - steady,
            "first_new_step": first,
            "parts": {
                "decide_s": agreed_at - float(move["started_at"]),
                "switch_s": ready_s - state_s,
                "state_s": state_s,
                "redo_s": redo_s,
                "other_s": end - going_at - redo_s - steady,
            },
        }

    def close(self, *, job_ended: bool = True) -> None:
        """`job_ended`: nobody will lead after this, so what is known of the steps has to be written now."""
        self._close_moves()
        self._steps.close(job_ended=job_ended)
        with contextlib.suppress(OSError):
            self._timeline_file.close()
