"""One thread beside the training thread, for what may take long: sending a snapshot, writing a checkpoint."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable

CLOSE_TIMEOUT_S = 2.0


class Background:
    """Carries out what it is given, one after the other, in a daemon thread."""

    def __init__(self, name: str) -> None:
        self._jobs: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        return self._closed

    def submit(self, job: Callable[[], None]) -> None:
        """Has `job` carried out after those before it; never, once this is closed."""
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Begins no further job, and waits at most `timeout_s` seconds for the one that is running."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closed)
                if self._closed:
                    return
                job = self._jobs.popleft()
            try:
                job()
            except Exception as error:  # whatever it is, a callback's too: the next job must be carried out
                print(f"tm_slurm: {self._thread.name}: {error!r}", file=sys.stderr, flush=True)
