"""Where Prometheus asks the coordinator: GET /metrics, and nothing else.

Whoever leads writes metrics_targets.json into the job directory, in the form of Prometheus's file_sd: a
coordinator may move at any moment, and so does the address. Anybody on the network may read the metrics; a
connection costs no thread, little memory, and ends after one answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tm_slurm.coordinator.election import write_atomically
from tm_slurm.observe.tally import Tally

if TYPE_CHECKING:
    from tm_slurm.observe.metrics import JobCollector

log = logging.getLogger("tm_slurm.leader")

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TARGETS = "metrics_targets.json"
REQUEST_LIMIT_S = 5.0
REQUEST_BYTES = 8192
CONNECTIONS = 32


class MetricsDoor:
    """`port`: None for no door at all, 0 for any free port. `address` is where it listens, once it does."""

    def __init__(
        self,
        job_dir: Path,
        host: str,
        port: int | None,
        *,
        status: Callable[[], dict[str, Any]],
        tally: Tally,
    ) -> None:
        self._job_dir = job_dir
        self._host = host
        self._port = port
        self._status = status
        self._tally = tally
        self._collector: JobCollector | None = None
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self.address: str | None = None

    async def open(self) -> None:
        """Begin to listen; on another port where the one that was asked for is taken. Whatever fails here is
        no reason not to lead."""
        if self._port is None:
            return
        from tm_slurm.observe.metrics import JobCollector

        self._collector = JobCollector(self._status, self._tally)
        for port in (self._port, 0):
            try:
                self._server = await asyncio.start_server(
                    self._connected, self._host, port, limit=REQUEST_BYTES
                )
                break
            except OSError as error:
                log.warning("no metrics on port %d reason=%s", port, error)
        if self._server is None:
            return
        self.address = f"{self._host}:{self._server.sockets[0].getsockname()[1]}"
        log.info("metrics at http://%s/metrics", self.address)
        with contextlib.suppress(OSError):
            write_atomically(self._job_dir / TARGETS, json.dumps([{"targets": [self.address]}]))

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in self._open:
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            if len(self._open) <= CONNECTIONS:
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), REQUEST_LIMIT_S)
                writer.write(self._answer(head))
                await asyncio.wait_for(writer.drain(), REQUEST_LIMIT_S)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.TimeoutError):
            pass  # whoever that was, they know no HTTP, or do not read
        finally:
            self._open.discard(writer)
            writer.close()

    def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b" ")
        path = rest.split(b" ", 1)[0].split(b"?", 1)[0]
        if method not in (b"GET", b"HEAD"):
            return _response("405 Method Not Allowed", b"only GET is answered\n")
        if path != b"/metrics" or self._collector is None:
            return _response("404 Not Found", b"there is only /metrics\n")
        page = self._collector.page()
        return _response("200 OK", page, body=method == b"GET")


def _response(status: str, page: bytes, *, body: bool = True) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {len(page)}\r\n"
    return (head + "Connection: close\r\n\r\n").encode() + (page if body else b"")
