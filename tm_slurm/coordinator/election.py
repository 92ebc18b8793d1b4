"""Who leads. `leader.json` says who it is and where it listens, and counts up for as long as it leads.

A term is claimed by being the first to create its journal: that needs no lock, so neither a stopped process
nor a dead machine can hold one. Whoever watches counts a lease as over when the file has not changed for the
lease's time on the watcher's own clock; the leader stops leading when it could not renew for as long on its
own. No two clocks are ever compared. Terms only grow: messages of an older term are refused.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tm_slurm.coordinator.clock import JobClock, elapsed_s
from tm_slurm.coordinator.journal import create

CLAIM_LIMIT_S = 1.0
"""A term that somebody has claimed, and of which `leader.json` says nothing for so long, is passed over: who
claimed it has died."""

RENEWALS_A_LEASE = 4


@dataclass(frozen=True)
class LeaderFile:
    """`renewal` grows with every change. `port` is 0 until the leader listens. `at`: the job's time (see
    JobClock). `resigned`: it leads no more, nobody need wait for the lease to be over."""

    node: str
    host: str
    port: int
    term: int
    attempt: int
    renewal: int
    at: float
    resigned: bool = False

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

    def age(self) -> tuple[int, int]:
        """What grows with every change of the file."""
        return self.term, self.renewal


class LeaderWatch:
    """What one process has seen of the leader, and for how long nothing has changed about it."""

    def __init__(
        self, job_dir: Path, attempt: int, lease_s: float, clock: Callable[[], float] = elapsed_s
    ) -> None:
        self.job_dir = job_dir
        self.attempt = attempt
        self.lease_s = lease_s
        self.clock = clock
        self.known: LeaderFile | None = None
        """The newest leader file of this start of the job that was seen."""
        self._changed_at = clock()

    def look(self) -> LeaderFile | None:
        """Read the file; returns what is known now. What is older than that is not believed."""
        found = LeaderFile.read(self.job_dir)
        if found is None or found.attempt != self.attempt:
            return self.known
        if self.known is None or found.age() > self.known.age():
            self.known, self._changed_at = found, self.clock()
        return self.known

    def heard(self, term: int, renewal: int, at: float) -> None:
        """The leader itself has said that it leads, which is as good as having looked."""
        if self.known is None or self.known.term != term or self.known.resigned:
            return
        self._changed_at = self.clock()
        self.known = replace(self.known, renewal=max(renewal, self.known.renewal), at=at)

    def over_for_s(self) -> float | None:
        """For how many seconds nobody has led; None while somebody does."""
        waited = self.clock() - self._changed_at
        if self.known is not None and not self.known.resigned:
            waited -= self.lease_s
        return waited if waited >= 0 else None

    def job_time(self) -> float | None:
        """The job's time now, counted from what the leader has told; None when there has been none."""
        if self.known is None:
            return None
        return self.known.at + self.clock() - self._changed_at


class Candidate:
    """An agent that may lead: claims a term when nobody leads."""

    def __init__(self, watch: LeaderWatch, *, node: str, host: str) -> None:
        self._watch = watch
        self._node = node
        self._host = host
        self._claimed_since: dict[int, float] = {}

    def claim(self) -> Leadership | None:
        """The next term, if nobody leads and nobody else is about to; else None. OSError when the job's
        directory cannot be written."""
        watch = self._watch
        watch.look()
        if watch.over_for_s() is None:
            return None
        found = watch.known if watch.known is not None else LeaderFile.read(watch.job_dir)
        term = found.term + 1 if found is not None else 1
        began = watch.clock()
        while not create(watch.job_dir, watch.attempt, term):
            since = self._claimed_since.setdefault(term, began)
            if began - since < CLAIM_LIMIT_S:
                return None
            term += 1
        return self._begin(term, began)

    def _begin(self, term: int, began: float) -> Leadership | None:
        """Say that this term has begun, unless a later one has begun since."""
        watch = self._watch
        later = watch.look()
        if later is not None and later.term >= term:
            return None
        job_clock = JobClock(watch.job_time())
        mine = LeaderFile(self._node, self._host, 0, term, watch.attempt, 0, job_clock.now())
        mine.write(watch.job_dir)
        return Leadership(watch.job_dir, mine, watch.lease_s, job_clock, began=began, clock=watch.clock)


class Leadership:
    """One term of one leader."""

    def __init__(
        self,
        job_dir: Path,
        mine: LeaderFile,
        lease_s: float,
        job_clock: JobClock,
        *,
        began: float,
        clock: Callable[[], float],
    ) -> None:
        """`began`: when the claim of the term was begun, on `clock`."""
        self.job_dir = job_dir
        self.job_clock = job_clock
        self.term = mine.term
        self.attempt = mine.attempt
        self.lease_s = lease_s
        self._mine = mine
        self._clock = clock
        self._renewed_at = began
        self._tried_at = began
        self._lost = False

    @property
    def renewal(self) -> int:
        return self._mine.renewal

    def holds(self) -> bool:
        """Whether this process leads. Costs a look at the clock: to be asked before anything is written or
        told."""
        if not self._lost and self._clock() - self._renewed_at >= self.lease_s:
            self._lost = True
        return not self._lost

    def is_due(self) -> bool:
        """Whether it is time to renew."""
        return self._clock() - self._renewed_at >= self.lease_s / RENEWALS_A_LEASE

    def keep(self) -> bool:
        """Renew if it is time to: to be called every now and then by what takes long. A disk that refuses is
        not asked again at once. Whether this process leads."""
        if not self.holds():
            return False
        now = self._clock()
        if self.is_due() and now - self._tried_at >= self.lease_s / RENEWALS_A_LEASE:
            self._tried_at = now
            return self.renew()
        return True

    def renew(self, port: int | None = None) -> bool:
        """Go on leading, and say so; `port`: where the leader listens from now on. False when it does not
        lead any more. A file system that fails may recover until the lease is over."""
        began = self._clock()
        found = LeaderFile.read(self.job_dir)
        if found is not None and found.term > self.term:
            self._lost = True
        if not self.holds():
            return False
        port = self._mine.port if port is None else port
        try:
            self._write(replace(self._mine, port=port, renewal=self._mine.renewal + 1))
        except OSError:
            return self.holds()
        self._renewed_at = began
        return True

    def step_down(self) -> None:
        """Lead no more, and leave it to the others to find that out."""
        self._lost = True

    def resign(self) -> None:
        """Lead no more, and say so, so that a successor need not wait for the lease to be over."""
        if self.holds():
            found = LeaderFile.read(self.job_dir)
            if found is None or found.term <= self.term:
                self._write(replace(self._mine, renewal=self._mine.renewal + 1, resigned=True))
        self._lost = True

    def _write(self, file: LeaderFile) -> None:
        file = replace(file, at=self.job_clock.now())
        file.write(self.job_dir)
        self._mine = file


def write_atomically(path: Path, text: str) -> None:
    """Write a file, mode 0600, so that a reader sees either the old content or the new."""
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    temporary.replace(path)
