"""Tables of peers of large jobs: 16,384 ranks make a megabyte, and everybody needs one. So it is in the job
directory, once, and an order names the file and what has changed since.

    leader   {"peers": {"0": [...], …}}  →  {"peers": {"file": "peers.3.json", "changes": {"7": [...]}}}
    agent    the same back again, before a rank process hears of it
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from tm_slurm.coordinator.election import write_atomically
from tm_slurm.coordinator.roster import SHARED_FROM, PeerTable

log = logging.getLogger("tm_slurm.leader")

Message = dict[str, Any]


class PeerTables:
    """Of one leader. Files of earlier leaders stay: what they have told may still be under way."""

    def __init__(self, job_dir: Path, attempt: int, term: int) -> None:
        self._job_dir = job_dir
        self._stem = f"peers.{attempt}.{term}"
        self._written: dict[int, tuple[Mapping[str, list[Any]], str]] = {}
        """id of a base → the base itself, so that the id stays its own, and its file"""

    def to_send(self, message: Message) -> Message:
        """An order as it goes over the wire. With the whole table if the job directory cannot be written."""
        peers = message.get("peers")
        if not isinstance(peers, PeerTable) or len(peers) < SHARED_FROM:
            return message
        file = self._file_of(peers.base)
        return message if file is None else {**message, "peers": {"file": file, "changes": peers.changes}}

    def _file_of(self, base: Mapping[str, list[Any]]) -> str | None:
        known = self._written.get(id(base))
        if known is None:
            known = base, f"{self._stem}.{len(self._written)}.json"
            try:
                write_atomically(self._job_dir / known[1], json.dumps(base))
            except OSError as error:
                log.warning("a table of peers cannot be written reason=%s", error)
                return None
            self._written[id(base)] = known
        return known[1]


def as_sent(message: Message, job_dir: Path) -> Message:
    """An order as a rank process hears it. OSError or ValueError when the file that it names cannot be
    read."""
    peers = message.get("peers")
    if peers is None or "file" not in peers:
        return message
    base = _base_in(job_dir / Path(str(peers["file"])).name)
    return {**message, "peers": {**base, **peers["changes"]}}


@lru_cache(maxsize=1)
def _base_in(path: Path) -> dict[str, list[Any]]:
    """Read once for all processes of a node: a name is not used twice."""
    base: dict[str, list[Any]] = json.loads(path.read_text())
    return base
