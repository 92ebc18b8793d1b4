"""Whether a process runs at all: the kernel's word on it (`/proc/PID/stat`, proc(5)), looked at once a beat.

A process that somebody has stopped (SIGSTOP, or the terminal's SIGTSTP) never ends, and its kernel still
acknowledges what it is sent: nobody else can tell it from a slow one. One that a debugger has stopped is left
alone. A process in uninterruptible sleep, or one whose main thread has ended, is only spoken of: both may be
in order.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

UNWELL_LIMIT_S = 30.0
"""How long a process may be seen in uninterruptible sleep, or without its main thread, before it is noted."""

STOPPED = "T"
_UNWELL = {"D": "in uninterruptible sleep (state D)", "Z": "without its main thread (a zombie)"}


def state_of(pid: int) -> str | None:
    """The kernel's letter for a process's main thread; None when there is no such process."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    return None


@dataclass(frozen=True)
class Finding:
    """`kind`: "process_stopped", "process_unwell", or "process_goes_on", which ends the one said before."""

    kind: str
    how: str


class Standstill:
    """Of one process. `limit_s`: how long it may be stopped.

    Only time that the watcher itself has seen pass counts: at most half the limit between two looks, because
    a watcher that was stopped too (the whole node was frozen, say) knows nothing of the time between.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._state: str | None = None
        self._seconds = 0.0
        self._looked_at = 0.0
        self._told = False

    def look(self, state: str | None, now: float) -> Finding | None:
        """What is new, given the state that the process is in at `now` (seconds, monotonic)."""
        passed = min(now - self._looked_at, self._limit_s / 2)
        self._looked_at = now
        if state != self._state:
            self._state, self._seconds = state, 0.0
            told, self._told = self._told, False
            return Finding("process_goes_on", f"state {state}") if told else None
        self._seconds += passed
        if self._told:
            return None
        if state == STOPPED and self._seconds >= self._limit_s:
            self._told = True
            return Finding("process_stopped", f"stopped (SIGSTOP) for {self._seconds:.1f} s")
        if state in _UNWELL and self._seconds >= UNWELL_LIMIT_S:
            self._told = True
            return Finding("process_unwell", f"{_UNWELL[state]} for {self._seconds:.0f} s")
        return None
