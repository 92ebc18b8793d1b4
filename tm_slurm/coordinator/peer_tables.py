"""Tables of peers of large jobs: 16,384 ranks make a megabyte, and everybody needs one. So it is in the job
directory, once, and an order names the file and what has changed since.

    leader   {"peers": {"0": [...], …}}  →  {"peers": {"file": "peers.3.json", "changes": {"7": [...]}}}
    agent    the same back again, before a rank process hears of it

The changes that all survivors of a failure are told of, when these have become many, are in a file as well.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections import OrderedDict
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import xxhash

from tm_slurm.coordinator.election import write_atomically
from tm_slurm.coordinator.roster import SHARED_FROM, PeerTable

CHANGES_FROM = SHARED_FROM
"""More changed peers than these are not sent to each survivor."""

KEPT_FILES = 8
"""Files of one leader that are there at a time. Who wants an older one is told again, with a new one."""

log = logging.getLogger("tm_slurm.leader")

Message = dict[str, Any]


class PeerTables:
    """Of one leader. Files of earlier leaders stay: what they have told may still be under way."""

    def __init__(self, job_dir: Path, attempt: int, term: int) -> None:
        self._job_dir = job_dir
        self._stem = f"peers.{attempt}.{term}"
        self._written: OrderedDict[int, tuple[Mapping[str, list[Any]], str]] = OrderedDict()
        """id of a table → the table itself, so that the id stays its own, and its file; the last used last"""

    def to_send(self, message: Message) -> Message:
        """An order as it goes over the wire. With the whole table if the job directory cannot be written."""
        peers, changes = message.get("peers"), message.get("changes")
        if isinstance(peers, PeerTable) and len(peers) >= SHARED_FROM:
            file = self._file_of(peers.base)
            if file is not None:
                message = {**message, "peers": {"file": file, "changes": peers.changes}}
        if changes is not None and len(changes) >= CHANGES_FROM:
            file = self._file_of(changes)
            if file is not None:
                message = {**message, "changes": {"file": file}}
        return message

    def _file_of(self, table: Mapping[str, list[Any]]) -> str | None:
        """Equal tables have one file, since it is named for what is in it."""
        known = self._written.get(id(table))
        if known is None:
            text = json.dumps(table)
            name = f"{self._stem}.{xxhash.xxh3_128_hexdigest(text.encode())}.json"
            known = next((there for there in self._written.values() if there[1] == name), None)
            if known is None:
                known = table, name
                try:
                    write_atomically(self._job_dir / name, text)
                except OSError as error:
                    log.warning("a table of peers cannot be written reason=%s", error)
                    return None
                self._written[id(table)] = known
                if len(self._written) > KEPT_FILES:
                    _, (_, oldest) = self._written.popitem(last=False)
                    with contextlib.suppress(OSError):
                        (self._job_dir / oldest).unlink()
        self._written.move_to_end(id(known[0]))
        return known[1]


def as_sent(message: Message, job_dir: Path) -> Message:
    """An order as a rank process hears it. OSError or ValueError when a file that it names cannot be read."""
    peers, changes = message.get("peers"), message.get("changes")
    if peers is not None and "file" in peers:
        message = {**message, "peers": {**_table_in(job_dir, peers["file"]), **peers["changes"]}}
    if changes is not None and "file" in changes:
        message = {**message, "changes": _table_in(job_dir, changes["file"])}
    return message


@lru_cache(maxsize=2)
def _table_in(job_dir: Path, name: str) -> dict[str, list[Any]]:
    """Read once for all processes of a node: what is in it never changes."""
    table: dict[str, list[Any]] = json.loads((job_dir / Path(name).name).read_text())
    return table
