"""The step log: one line for each step that a rank has completed, the same for every rival.

Each process writes a file of its own in `steps/` of the run's directory, so that nobody waits for anybody.
The nodes are on one kernel, so their wall clocks are one.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, order=True)
class Step:
    """`at`: Unix seconds when the process had applied the step. `process`: node and process number there."""

    at: float
    rank: int
    step: int
    process: str


class StepWriter:
    """Of one process. A line is in the file when `done` returns, and outlives the process."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.process = f"{os.uname().nodename}:{os.getpid()}"
        self.last = -1
        """the number of the step that it has done last"""
        self._file = (directory / f"{self.process}.jsonl").open("ab", buffering=0)

    def done(self, rank: int, step: int) -> None:
        """This process, as `rank`, has applied `step`."""
        line = {"at": time.time(), "rank": rank, "step": step, "process": self.process}
        self._file.write(json.dumps(line).encode() + b"\n")
        self.last = step


class StepReader:
    """All that the processes of a run have written so far."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: dict[Path, int] = {}
        self._steps: list[Step] = []

    def all(self) -> list[Step]:
        """In the order of their times."""
        for path in self._directory.glob("*.jsonl") if self._directory.is_dir() else ():
            self._steps += self._new(path)
        self._steps.sort()
        return self._steps

    def _new(self, path: Path) -> Iterator[Step]:
        with path.open("rb") as file:
            file.seek(self._read.get(path, 0))
            whole, ended, _ = file.read().rpartition(b"\n")
        self._read[path] = self._read.get(path, 0) + len(whole) + len(ended)
        for line in whole.splitlines():
            yield Step(**json.loads(line))
