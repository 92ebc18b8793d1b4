"""What a leader knows, summed up, so that the next one need not repeat the whole history: a journal of a job
of 16,384 nodes grows by as many lines with every failure.

    summary.0.3.pickle   {"of": [[1,1000],[3,5200]], "made_by": …, "seal": …}, then a pickled Memory

It counts for a leader in whose history those pieces of journals are the beginning; so what a leader sums up
that has been deposed without knowing counts for nobody. It is sealed with the job's secret: nobody else hands
a pickle to the next leader. Anything that is wrong with it, another version of this program included, and it
is passed over: the journal has everything.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import os
import pickle
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tm_slurm.coordinator.journal import Piece
from tm_slurm.coordinator.memory import Memory

log = logging.getLogger("tm_slurm.leader")

INPUTS = 10_000
"""So many are repeated in a fraction of a second; after so many more it is summed up again."""

PIECE_BYTES = 8 << 20
"""Read at a time, between two renewals of the lease."""


def pickled(memory: Memory) -> bytes:
    """As it is at this moment."""
    return pickle.dumps(memory, protocol=pickle.HIGHEST_PROTOCOL)


def write(job_dir: Path, attempt: int, position: list[Piece], summary: bytes, secret: bytes) -> None:
    """Put down what `pickled` gave when the history had come to `position`; those of earlier terms are of no
    use any more. OSError: then nothing of it is left."""
    term = position[-1][0]
    head = {"of": position, "made_by": PROGRAM}
    sealed = {**head, "seal": _seal(secret, head, summary)}
    path = _path(job_dir, attempt, term)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(json.dumps(sealed).encode() + b"\n" + summary)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()  # it may be what fills the disk
        raise
    for older in _found(job_dir, attempt):
        if older < term:
            _path(job_dir, attempt, older).unlink(missing_ok=True)
    for left in job_dir.glob(f".summary.{attempt}.*.pickle.*"):  # by a leader that was lost meanwhile
        if left != temporary:
            left.unlink(missing_ok=True)


def newest(
    job_dir: Path,
    attempt: int,
    pieces: list[Piece],
    secret: bytes,
    *,
    meanwhile: Callable[[], object] = lambda: None,
) -> tuple[Memory, list[Piece]] | None:
    """What the newest summary of this history says, and how much of the history it covers; None when there
    is none that counts. `meanwhile`: called again and again while it is read."""
    for term in sorted(_found(job_dir, attempt), reverse=True):
        try:
            head_line, _, summary = _read(_path(job_dir, attempt, term), meanwhile).partition(b"\n")
            sealed = json.loads(head_line)
            of = [(int(t), int(size)) for t, size in sealed["of"]]
            head = {"of": sealed["of"], "made_by": sealed["made_by"]}
            ours = hmac.compare_digest(str(sealed["seal"]).encode(), _seal(secret, head, summary).encode())
            if not ours or head["made_by"] != PROGRAM or not PROGRAM or not _begins(pieces, of):
                log.info("a summary of the history does not count term=%d", term)
                continue
            meanwhile()
            return pickle.loads(summary), of
        except FileNotFoundError:  # the next one is there already
            continue
        except Exception as error:  # whatever it is
            log.warning("a summary of the history cannot be read term=%d reason=%r", term, error)
    return None


def _read(path: Path, meanwhile: Callable[[], object]) -> bytes:
    pieces = []
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            pieces.append(piece)
            meanwhile()
    return b"".join(pieces)


def _seal(secret: bytes, head: dict[str, Any], summary: bytes) -> str:
    sealed = hmac.new(secret, b"tm_slurm summary\n" + json.dumps(head).encode() + b"\n", "sha256")
    sealed.update(summary)
    return sealed.hexdigest()


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


def _program() -> str:
    """What must be the same for a pickle to mean the same; empty where it cannot be told."""
    sources = [
        source
        for folder in ("coordinator", "events")
        for source in sorted((Path(__file__).parents[1] / folder).glob("*.py"))
    ]
    if not sources:
        return ""
    digest = hashlib.sha256(platform.python_version().encode())
    for source in sources:
        digest.update(source.read_bytes())
    return digest.hexdigest()


PROGRAM = _program()
"""As it was imported: what is on the disk may be another one by then."""
