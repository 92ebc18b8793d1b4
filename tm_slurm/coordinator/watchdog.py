"""The watchdog on the vote: notices that no step ends any more, and finds out whose fault it is.

A rank that hangs in its own code (a data loader, a lock, a kernel that never ends) breaks no link and does
not die: the others wait for it in a collective. So when no rank has committed a step for much longer than
this job's long steps take, every rank is asked whether it waits for others, and for how long. Whoever does
not wait while all others have waited for half of the limit is to blame. If all wait, nobody knows (the
collective's own timeout ends that); if most work, the step is merely long.

    limit    while steps are few, or the first ones after an interruption (they may compile): factor × floor
             else max(floor, factor × upper), upper being the second-longest of the last steps: what has come
             twice (an evaluation every hundred steps) is normal for this job
    asked    answers are awaited for ANSWER_S; who has not answered by then does not wait: its process cannot
             even say so
    again    a question that blamed nobody is asked again after another half of the limit

Pure: the caller brings the time, in seconds of any one monotonic clock, and does the asking.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

LEARNED_STEPS = 10
"""Steps to learn from before any of them is judged by what the others took."""

WINDOW_STEPS = 500
"""What steps take is learned from so many."""

UNSETTLED_STEPS = 2
"""Steps after a start or an interruption that are not learned from: they compile, or contain the pause."""

ANSWER_S = 2.0


@dataclass(frozen=True)
class Hang:
    """No rank has committed anything for `seconds`: ask all ranks where they are. `step`: the one that hangs,
    the first that nobody has committed."""

    step: int
    seconds: float
    limit_s: float


@dataclass(frozen=True)
class Blame:
    """What came of the question. No `ranks`: nobody in particular; `how` says why, for people."""

    ranks: tuple[int, ...]
    step: int
    how: str


@dataclass(frozen=True)
class _Answer:
    waiting: bool
    since_s: float


class Watchdog:
    """Of one job. `floor_s`: never called stuck before; `factor`: times the job's long steps."""

    def __init__(self, world_size: int, *, floor_s: float, factor: float) -> None:
        self._world_size = world_size
        self._floor_s = floor_s
        self._factor = factor
        self._durations: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._committed: dict[int, tuple[int, float]] = {}
        """rank → the last step that it has committed, and when that was heard"""
        self._newest = -1
        self._unsettled_through: int | None = None
        self._since: float | None = None
        """since when nothing has gone on, as far as the watchdog has seen; None: it has not looked yet"""
        self._ask_at = 0.0
        self._asked_at: float | None = None
        self._answers: dict[int, _Answer] = {}

    # ---- what is known ----

    def committed(self, rank: int, step: int, seconds: float, now: float) -> None:
        """A heartbeat says that a rank has committed a step, which took it `seconds` (0: not known)."""
        before = self._committed.get(rank)
        self._committed[rank] = (step, now)
        self._moved(now)
        if before is not None and step < before[0]:  # everybody has been rolled back
            self._newest, self._unsettled_through = step - 1, None
        if step <= self._newest:
            return
        self._newest = step
        if self._unsettled_through is None:
            self._unsettled_through = step + UNSETTLED_STEPS
        if step > self._unsettled_through and seconds > 0:
            self._durations.append(seconds)

    def last_committed(self, rank: int) -> tuple[int, float] | None:
        """A rank's last step, and when it was heard of; None before its first."""
        return self._committed.get(rank)

    def whereabouts(self, rank: int, *, waiting: bool, since_s: float) -> None:
        """A rank's answer: whether it is inside a collective, and for how long."""
        if self._asked_at is not None and 0 <= rank < self._world_size:
            self._answers[rank] = _Answer(waiting, since_s)

    def upper_s(self) -> float | None:
        """What a long step of this job takes; None while too little is known."""
        if len(self._durations) < LEARNED_STEPS:
            return None
        return sorted(self._durations)[-2]

    def limit_s(self) -> float:
        """How long nobody may commit before that is a hang."""
        upper = self.upper_s()
        if upper is None or self._unsettled_through is None or self._newest < self._unsettled_through:
            return self._factor * self._floor_s
        return max(self._floor_s, self._factor * upper)

    # ---- what follows ----

    def look(self, now: float, *, calm: bool) -> Hang | Blame | None:
        """What is to be done at `now`. `calm`: no recovery, switch, start or end is under way: those have
        their own limits, and what steps take meanwhile is not learned."""
        if not calm:
            self._moved(None)
            self._unsettled_through = None if self._newest < 0 else self._newest + UNSETTLED_STEPS
            return None
        if self._since is None:
            self._since = now
        if self._asked_at is not None:
            return self._conclusion(now, self._asked_at - self._since)
        limit = self.limit_s()
        if now - self._since <= limit or now < self._ask_at:
            return None
        self._asked_at = now
        self._answers = {}
        return Hang(self._newest + 1, now - self._since, limit)

    def _moved(self, now: float | None) -> None:
        """Something has gone on: questions asked before are of no use."""
        self._since = now
        self._ask_at = 0.0
        self._asked_at = None

    def _conclusion(self, now: float, silence_s: float) -> Blame | None:
        assert self._asked_at is not None
        if len(self._answers) < self._world_size and now - self._asked_at < ANSWER_S:
            return None
        self._ask_at = now + self.limit_s() / 2
        self._asked_at = None
        return self._blame(silence_s)

    def _blame(self, silence_s: float) -> Blame:
        step = self._newest + 1
        waits = {rank: answer.since_s for rank, answer in self._answers.items() if answer.waiting}
        others = sorted(set(range(self._world_size)) - set(waits))
        if not others:
            return Blame((), step, f"all ranks wait in a collective of step {step}, nobody knows for whom")
        if 2 * len(others) > self._world_size:
            return Blame((), step, f"ranks {_list(others)} are at work in step {step}: it is a long one")
        youngest = min(waits, key=lambda rank: waits[rank])
        if waits[youngest] < self.limit_s() / 2:
            how = f"rank {youngest} waits only since {waits[youngest]:.1f} s: step {step} goes on, slowly"
            return Blame((), step, how)
        mute = [rank for rank in others if rank not in self._answers]
        silent = f"; ranks {_list(mute)} did not even answer" if mute else ""
        how = (
            f"in step {step}, for {silence_s:.1f} s without a commit, ranks {_list(others)} are in no "
            f"collective while all others wait{silent}"
        )
        return Blame(tuple(others), step, how)


def _list(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
