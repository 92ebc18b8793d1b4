"""The append-only journal: every input that can change a decision, written before it is acted on.

Decisions are a function of their inputs, so replaying the journal gives a new leader exactly the old one's
state. One JSON object a line; a line that a killed writer left half written is dropped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Journal:
    """Appends to one file. `sync`: have each line reach the disk before it is acted on."""

    def __init__(self, path: Path, *, sync: bool = True) -> None:
        self.path = path
        self._sync = sync
        self._repair()
        self._file = path.open("ab", buffering=0)
        path.chmod(0o600)

    def _repair(self) -> None:
        """Cut off a half-written last line, so that the next one starts on its own."""
        if not self.path.exists():
            return
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.truncate(self.path, whole)

    def append(self, record: dict[str, Any]) -> None:
        """Write one record; OSError when the disk does not take it whole: then nothing of it is left in the
        file, and nothing may be done about it."""
        data = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        size = os.fstat(self._file.fileno()).st_size
        try:
            while data:
                data = data[self._file.write(data) or 0 :]
            if self._sync:
                os.fsync(self._file.fileno())
        except OSError:
            os.ftruncate(self._file.fileno(), size)
            raise

    def close(self) -> None:
        self._file.close()

    @staticmethod
    def replay(path: Path) -> Iterator[dict[str, Any]]:
        """The records in order; nothing when there is no journal yet."""
        if not path.exists():
            return
        with path.open("rb") as lines:
            for line in lines:
                if line.endswith(b"\n"):
                    yield json.loads(line)
