"""Who leads. `leader.lock` is held by the leader's process; `leader.json` says where it listens and until
when its word holds (the lease, which it keeps renewing). Terms only grow: messages of an older term are
refused."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock, Timeout


@dataclass(frozen=True)
class LeaderFile:
    """`lease_until`: wall-clock seconds. A leader whose lease has run out may be replaced by whoever gets the
    lock."""

    node: str
    host: str
    port: int
    term: int
    attempt: int
    lease_until: float

    @classmethod
    def read(cls, job_dir: Path) -> LeaderFile | None:
        """The file's content, or None when there is none that can be read."""
        try:
            return cls(**json.loads((job_dir / "leader.json").read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, job_dir: Path) -> None:
        """Replace the file in one step, so that a reader sees the old one or the new one."""
        write_atomically(job_dir / "leader.json", json.dumps(asdict(self)))

    def is_current(self, attempt: int) -> bool:
        """Whether it speaks for this start of the job and its lease still runs."""
        return self.attempt == attempt and self.lease_until > time.time()


class Leadership:
    """The lock, held or not."""

    def __init__(self, job_dir: Path, attempt: int) -> None:
        self._job_dir = job_dir
        self._attempt = attempt
        self._lock = FileLock(job_dir / "leader.lock", mode=0o600)
        self.term = 0

    def try_to_lead(self) -> bool:
        """Take the lock if nobody holds it and no lease runs; `term` is then one more than the last
        leader's."""
        known = LeaderFile.read(self._job_dir)
        if known is not None and known.is_current(self._attempt):
            return False
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            return False
        known = LeaderFile.read(self._job_dir)
        if known is not None and known.is_current(self._attempt):
            self._lock.release()
            return False
        self.term = known.term + 1 if known is not None else 1
        return True

    def resign(self) -> None:
        """Give the lock back, and end the lease so that a successor need not wait for it."""
        known = LeaderFile.read(self._job_dir)
        if known is not None and known.term == self.term:
            LeaderFile(**{**asdict(known), "lease_until": 0.0}).write(self._job_dir)
        self._lock.release()


def write_atomically(path: Path, text: str) -> None:
    """Write a file, mode 0600, so that a reader sees either the old content or the new."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    temporary.replace(path)
