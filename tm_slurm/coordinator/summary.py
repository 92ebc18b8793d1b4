"""What a leader knows, summed up, so that the next one need not repeat the whole history: a journal of a job
of 16,384 nodes grows by as many lines with every failure.

    summary.0.3.pickle   {"of": [[1,1000],[3,5200]], "digest": …, "made_by": …}, then a pickled Memory

It counts for a leader in whose history those pieces of journals are the beginning; so what a leader sums up
that has been deposed without knowing counts for nobody. Anything else that is wrong with it, another version
of this program included, and it is passed over: the journal has everything.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import pickle
import platform
from functools import lru_cache
from pathlib import Path

from tm_slurm.coordinator.journal import Piece
from tm_slurm.coordinator.memory import Memory

log = logging.getLogger("tm_slurm.leader")

INPUTS = 10_000
"""So many are repeated in a fraction of a second; after so many more it is summed up again."""


def pickled(memory: Memory) -> bytes:
    """As it is at this moment."""
    return pickle.dumps(memory, protocol=pickle.HIGHEST_PROTOCOL)


def write(job_dir: Path, attempt: int, position: list[Piece], summary: bytes) -> None:
    """Put down what `pickled` gave when the history had come to `position`; those of earlier terms are of no
    use any more. OSError."""
    term = position[-1][0]
    head = {"of": position, "digest": hashlib.sha256(summary).hexdigest(), "made_by": _program()}
    path = _path(job_dir, attempt, term)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(json.dumps(head).encode() + b"\n" + summary)
    temporary.replace(path)
    for older in _found(job_dir, attempt):
        if older < term:
            _path(job_dir, attempt, older).unlink(missing_ok=True)


def newest(job_dir: Path, attempt: int, pieces: list[Piece]) -> tuple[Memory, list[Piece]] | None:
    """What the newest summary of this history says, and how much of the history it covers; None when there
    is none that counts."""
    for term in sorted(_found(job_dir, attempt), reverse=True):
        with contextlib.suppress(OSError):
            head_line, _, summary = _path(job_dir, attempt, term).read_bytes().partition(b"\n")
            try:
                head = json.loads(head_line)
                of = [(int(t), int(size)) for t, size in head["of"]]
                digest, made_by = head["digest"], head["made_by"]
            except (ValueError, KeyError, TypeError):
                continue
            whole = digest == hashlib.sha256(summary).hexdigest() and made_by == _program()
            if whole and _begins(pieces, of):
                memory = pickle.loads(summary)
                assert isinstance(memory, Memory)
                return memory, of
            log.info("a summary of the history does not count term=%d", term)
    return None


def _begins(pieces: list[Piece], of: list[Piece]) -> bool:
    """Whether `of` is the beginning of this history: all but its last piece are whole."""
    if not of or len(of) > len(pieces) or of[:-1] != pieces[: len(of) - 1]:
        return False
    (term, size), (own_term, own_size) = of[-1], pieces[len(of) - 1]
    return term == own_term and size <= own_size


def _path(job_dir: Path, attempt: int, term: int) -> Path:
    return job_dir / f"summary.{attempt}.{term}.pickle"


def _found(job_dir: Path, attempt: int) -> list[int]:
    terms = (path.name.split(".")[2] for path in job_dir.glob(f"summary.{attempt}.*.pickle"))
    return [int(term) for term in terms if term.isdigit()]


@lru_cache(maxsize=1)
def _program() -> str:
    """What must be the same for a pickle to mean the same."""
    digest = hashlib.sha256(platform.python_version().encode())
    for folder in ("coordinator", "events"):
        for source in sorted((Path(__file__).parents[1] / folder).glob("*.py")):
            digest.update(source.read_bytes())
    return digest.hexdigest()
