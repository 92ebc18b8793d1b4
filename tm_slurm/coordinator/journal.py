"""The append-only journal: every input that can change a decision, written before it is acted on.

Decisions are a function of their inputs, so replaying the journal gives a new leader exactly the old one's
state. One JSON object a line; a line that a killed writer left half written does not count.

Every term has a file of its own, which begins with how much of the files before it counts. So nothing that
an old leader still writes, after the next one has read what there was, is part of the history:

    journal.0.1.jsonl   {"kind":"continues","of":[]} …        1000 bytes when term 2 began, more now
    journal.0.2.jsonl   {"kind":"continues","of":[[1,1000]]} …
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Piece = tuple[int, int]
"""A term, and how many bytes of its journal count."""


def journal_path(job_dir: Path, attempt: int, term: int) -> Path:
    """`attempt`: how often Slurm has restarted the job; each start has a history of its own."""
    return job_dir / f"journal.{attempt}.{term}.jsonl"


def create(job_dir: Path, attempt: int, term: int) -> bool:
    """Create the empty journal of a term; False when there is one already. Only one can be the first."""
    try:
        descriptor = os.open(
            journal_path(job_dir, attempt, term), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600
        )
    except FileExistsError:
        return False
    os.close(descriptor)
    return True


class Journal:
    """The history up to here, and a file to append to. `sync`: have each line reach the disk before it is
    acted on."""

    def __init__(
        self, job_dir: Path, attempt: int, term: int, about: dict[str, Any], *, sync: bool = True
    ) -> None:
        """Continue the history in the term's own file, which is there and empty (see `create`).

        `about`: what must be the same for every leader of this start of the job; the first one's counts."""
        self._job_dir = job_dir
        self._attempt = attempt
        self._term = term
        self._sync = sync
        self._pieces, earlier = history(job_dir, attempt, before=term)
        self.about = earlier if earlier is not None else about
        self.path = journal_path(job_dir, attempt, term)
        self._file = self.path.open("ab", buffering=0)
        self.append({"kind": "continues", "of": self._pieces, "about": self.about})

    @property
    def pieces(self) -> list[Piece]:
        """Those of earlier leaders."""
        return list(self._pieces)

    def position(self) -> list[Piece]:
        """How far the history has come: the pieces, and what there is of this term's."""
        return [*self._pieces, (self._term, os.fstat(self._file.fileno()).st_size)]

    def inherited(self, after: Sequence[Piece] = ()) -> Iterator[tuple[int, dict[str, Any]]]:
        """What earlier leaders have written, in order, and in which term; `after`: from there on."""
        return _records(self._job_dir, self._attempt, self._pieces, after)

    def append(self, *records: dict[str, Any]) -> None:
        """Write records; OSError when the disk does not take them whole: then nothing of them is left in the
        file, and nothing may be done about any."""
        data = b"".join(json.dumps(record, separators=(",", ":")).encode() + b"\n" for record in records)
        size = os.fstat(self._file.fileno()).st_size
        try:
            while data:
                data = data[self._file.write(data) or 0 :]
            if self._sync:
                os.fsync(self._file.fileno())
        except OSError:
            os.ftruncate(self._file.fileno(), size)
            raise

    @property
    def closed(self) -> bool:
        return self._file.closed

    def close(self) -> None:
        self._file.close()


def history(
    job_dir: Path, attempt: int, *, before: int | None = None
) -> tuple[list[Piece], dict[str, Any] | None]:
    """The pieces of the history, the oldest first, and what its first leader has said about the job: None
    when there is no history yet. `before`: as the leader of that term finds it."""
    terms = sorted(_terms(job_dir, attempt), reverse=True)
    for term in terms:
        if before is not None and term >= before:
            continue
        path = journal_path(job_dir, attempt, term)
        with path.open("rb") as file:
            data = file.read()
        head = _head(data)
        if head is not None:  # else whoever claimed that term has died before it led
            size = data.rfind(b"\n") + 1
            return [*((int(t), int(s)) for t, s in head["of"]), (term, size)], dict(head["about"])
    return [], None


def replay(job_dir: Path, attempt: int) -> Iterator[dict[str, Any]]:
    """The whole history of a start of the job, in order; nothing when there is none yet."""
    pieces, _ = history(job_dir, attempt)
    return (record for _, record in _records(job_dir, attempt, pieces))


def _terms(job_dir: Path, attempt: int) -> Iterator[int]:
    for path in job_dir.glob(f"journal.{attempt}.*.jsonl"):
        term = path.name.split(".")[2]
        if term.isdigit():
            yield int(term)


def _head(data: bytes) -> dict[str, Any] | None:
    line, newline, _ = data.partition(b"\n")
    return json.loads(line) if newline else None


def _records(
    job_dir: Path, attempt: int, pieces: list[Piece], after: Sequence[Piece] = ()
) -> Iterator[tuple[int, dict[str, Any]]]:
    known = dict(after)
    for term, size in pieces:
        with journal_path(job_dir, attempt, term).open("rb") as file:
            at = file.seek(known[term]) if term in known else len(file.readline())
            while at < size:
                line = file.readline()
                at += len(line)
                yield term, json.loads(line.decode())  # from text it is quicker than from bytes
