"""steps.jsonl: every step of the training once, in order, whoever told of it and however often it was
done."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from pathlib import Path
from typing import Any, TextIO

log = logging.getLogger("tm_slurm.leader")

TAIL_BYTES = 64 << 10
"""How much of a log that an earlier leader has written is looked at."""


def append_to(path: Path) -> TextIO:
    """Open a file of lines to append to. A last line that was torn when its writer died is ended first."""
    with contextlib.suppress(OSError), path.open("rb+") as file:
        if file.seek(0, os.SEEK_END) and not _ends_a_line(file):
            file.write(b"\n")
    return path.open("a")


def put(file: TextIO, text: str) -> bool:
    """Write something for people. False when the disk does not take it: no training ends for want of that."""
    try:
        file.write(text)
        file.flush()
    except OSError as error:
        log.warning("cannot be written file=%s reason=%s", file.name, error)
        return False
    return True


def _ends_a_line(file: Any) -> bool:
    file.seek(-1, os.SEEK_END)
    return bool(file.read(1) == b"\n")


class StepLog:
    """A step is written when rank 0 has told of it; one that rank 0 took with it, when another rank has. A
    step that was rolled back and done again is not written again: it is the same, bit for bit.

    A leader that was frozen may still write one thing when another writes already: who finds lines that are
    not its own goes on after them."""

    def __init__(self, path: Path, world_size: int) -> None:
        self._world_size = world_size
        self._path = path
        self._file = append_to(path)
        self._size = os.fstat(self._file.fileno()).st_size
        self._written = _tail(path)
        self._next = _after(self._written)
        self._told: dict[int, dict[str, Any]] = {}
        self._heads: dict[int, int] = {}
        losses = [step["loss"] for step in self._written if step.get("loss") is not None]
        self.last_loss: float | None = losses[-1] if losses else None

    def durations(self, count: int) -> list[float]:
        """Seconds of the last steps that were in the log when it was opened."""
        return [step["seconds"] for step in self._written if step["step"] > 1 and step["seconds"] > 0][
            -count:
        ]

    def take(self, rank: int, step: int, told: dict[str, Any]) -> None:
        """A rank says that it has committed `step`."""
        self._heads[rank] = max(step, self._heads.get(rank, step))
        if step >= self._next and (rank == 0 or step not in self._told):
            self._told[step] = {"step": step, **told}
        self._write_out()

    def _write_out(self) -> None:
        while self._told:
            told = self._told.get(self._next)
            if told is None:
                if len(self._heads) < self._world_size or min(self._heads.values()) < self._next:
                    return  # somebody may still tell it
                self._next = min(self._told)
            elif told["rank"] == 0 or self._heads.get(0, -1) > self._next:
                self._write(self._told.pop(self._next))
            else:
                return

    def _write(self, told: dict[str, Any]) -> None:
        if os.fstat(self._file.fileno()).st_size != self._size:
            self._go_on_after_another()
        if int(told["step"]) < self._next:
            return
        line = json.dumps(told) + "\n"
        if put(self._file, line):
            self._size += len(line)
        self._next += 1

    def _go_on_after_another(self) -> None:
        self._size = os.fstat(self._file.fileno()).st_size
        self._next = max(self._next, _after(_tail(self._path)))
        self._told = {step: told for step, told in self._told.items() if step >= self._next}

    def close(self, *, job_ended: bool = True) -> None:
        """Close; if the job has ended, write before what was still held back in the hope for rank 0's word.
        If not, the next leader is told of it."""
        for step, told in sorted(self._told.items()) if job_ended else ():
            self._next = max(step, self._next)
            self._write(told)
        self._told.clear()
        with contextlib.suppress(OSError):
            self._file.close()


def _after(written: list[dict[str, Any]]) -> int:
    """The step that comes next in a log that ends so."""
    return max((int(step["step"]) + 1 for step in written), default=0)


def _tail(path: Path) -> list[dict[str, Any]]:
    """The last steps of a log that is there already."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):
            entry = json.loads(line)
            if isinstance(entry, dict) and isinstance(entry.get("step"), int):
                found.append(entry)
    return found
