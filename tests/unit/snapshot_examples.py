"""What the tests of snapshots share: a vault, a rank's peer memory with what it told, a hand-made client."""

from __future__ import annotations

import contextlib
import queue
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import xxhash

from tm_slurm.agent.vault import Vault
from tm_slurm.control import FrameSocket, connect_socket
from tm_slurm.runtime.peer_memory import PeerMemory

SECRET = b"s" * 32
HOST = "127.0.0.1"
LIMIT = 1 << 30


@contextlib.contextmanager
def vault_of(max_bytes: int = LIMIT) -> Iterator[Vault]:
    vault = Vault(SECRET, HOST, max_bytes=max_bytes)
    try:
        yield vault
    finally:
        vault.close()


@dataclass
class Rank:
    """A rank's peer memory; `told` gets (step, None) for each that was stored, (step, why) for the others."""

    rank: int = 0
    epoch: int = 1
    told: queue.Queue[tuple[int, str | None]] = field(default_factory=queue.Queue)

    def __post_init__(self) -> None:
        self.memory = PeerMemory(
            SECRET,
            stored=lambda step: self.told.put((step, None)),
            failed=lambda step, why: self.told.put((step, why)),
        )

    def begin(self, state: Any, step: int, vault: Vault | tuple[str, int]) -> bool:
        address = (HOST, vault.port) if isinstance(vault, Vault) else vault
        return self.memory.begin(state, step, rank=self.rank, epoch=self.epoch, vault=address)

    def store(self, state: Any, step: int, vault: Vault, *, complete: bool = True) -> None:
        """A whole snapshot, waited for."""
        assert self.begin(state, step, vault)
        assert self.told.get(timeout=20) == (step, None)
        if complete:
            self.memory.completed(step)
            vault.keep(step)


@contextlib.contextmanager
def rank_of(rank: int = 0, epoch: int = 1) -> Iterator[Rank]:
    one = Rank(rank, epoch)
    try:
        yield one
    finally:
        one.memory.close()


class Client:
    """Speaks to a vault by hand."""

    def __init__(self, vault: Vault, secret: bytes = SECRET) -> None:
        self.sock: socket.socket = connect_socket((HOST, vault.port), secret, {"role": "test"}, timeout_s=5)
        self.sock.settimeout(10)
        self.frames = FrameSocket(self.sock)

    def ask(self, **request: Any) -> dict[str, Any]:
        self.frames.send(request)
        return self.frames.receive()

    def put(self, blob: bytes, *, step: int, rank: int = 0, epoch: int = 1, **more: Any) -> dict[str, Any]:
        """The answer to the announcement."""
        sizes = {"head": 4, "blob": len(blob), "block": 1 << 20, "complete": -1}
        return self.ask(op="put", rank=rank, step=step, epoch=epoch, **(sizes | more))

    def body(self, blob: bytes) -> bytes:
        parts = [b"head", *[blob[start : start + (1 << 20)] for start in range(0, len(blob), 1 << 20)]]
        return b"".join(parts) + b"".join(xxhash.xxh3_64_digest(part) for part in parts)

    def put_whole(self, blob: bytes, *, step: int, rank: int = 0, epoch: int = 1) -> dict[str, Any]:
        answer = self.put(blob, step=step, rank=rank, epoch=epoch)
        if "ok" in answer:
            self.sock.sendall(self.body(blob))
            answer = self.frames.receive()
        self.sock.close()
        return answer

    def get(self, *, step: int, rank: int = 0) -> bytes | str:
        """The blob, or why not."""
        answer = self.ask(op="get", rank=rank, step=step)
        if "refused" in answer:
            return str(answer["refused"])
        data = b""
        while part := self.sock.recv(1 << 20):
            data += part
        self.sock.close()
        blob = data[answer["head"] : answer["head"] + answer["blob"]]
        assert data == self.body(blob)
        return blob
