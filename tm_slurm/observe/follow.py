"""Reading a job's files while they grow: the timeline, the steps, the status, the verdict."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


class JsonLines:
    """The objects of a growing JSON-lines file; each call to `new` returns those that have come since the
    last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def skip_to(self, offset: int) -> None:
        """Go on at the first line that begins at or after `offset` bytes (the one before is no object, cut as
        it is)."""
        self._offset = offset

    def new(self) -> Iterator[dict[str, Any]]:
        """Complete lines only; nothing while the file does not exist. A line that is no JSON object is passed
        over."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        whole = data.rfind(b"\n") + 1
        self._offset += whole
        for line in data[:whole].splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, dict):
                yield entry


def tail_of(path: Path, size: int) -> list[dict[str, Any]]:
    """The objects in the last `size` bytes of a JSON-lines file; nothing while it does not exist."""
    lines = JsonLines(path)
    with contextlib.suppress(FileNotFoundError):
        lines.skip_to(max(0, path.stat().st_size - size))
    return list(lines.new())


class JobFiles:
    """What the coordinator writes into a job's directory, as it stands now."""

    def __init__(self, job_dir: Path) -> None:
        self.job_dir = job_dir

    def timeline(self) -> list[dict[str, Any]]:
        """Every entry so far: {at, what, …}."""
        return list(JsonLines(self.job_dir / "timeline.jsonl").new())

    def notes(self, what: str) -> list[dict[str, Any]]:
        """The timeline's entries of one kind."""
        return [entry for entry in self.timeline() if entry["what"] == what]

    def steps(self) -> list[dict[str, Any]]:
        """Every step of rank 0 so far: {step, at, seconds, loss}."""
        return list(JsonLines(self.job_dir / "steps.jsonl").new())

    def status(self) -> dict[str, Any] | None:
        """The newest status; None before the first."""
        return read_json(self.job_dir / "status.json")

    def verdict(self) -> dict[str, Any] | None:
        """How the job ended; None while it has not."""
        return read_json(self.job_dir / "verdict.json")


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file that is replaced atomically; None when there is none."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def where(entries: list[dict[str, Any]], test: Callable[[dict[str, Any]], bool]) -> dict[str, Any] | None:
    """The first entry that passes a test."""
    return next((entry for entry in entries if test(entry)), None)
