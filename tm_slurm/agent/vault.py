"""Peer memory on the side of the agent: keeps the snapshots of the ranks of another node in this node's
memory (paper section 7: where no replica has a dead rank's state, all roll back to the newest snapshot).

A connection carries one request, after the handshake:

    → {op: put, rank, step, epoch, complete, head, blob, block}
    ← {ok}
    → head, blob, checksums
    ← {stored, cpu_s}

    → {op: get, rank, step}
    ← {head, blob, block, epoch}, then head, blob, checksums

`head` and `blob` are sizes in bytes; the checksums (xxh3, 8 bytes each) are those of the head and of each
`block` bytes of the blob. Whatever cannot be done is answered with {refused: why}. What the bytes mean is not
known here: this process has no torch.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import socket
import struct
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import xxhash

from tm_slurm.control import FrameSocket, HandshakeRefused, accept_socket, listening_at
from tm_slurm.control.frames import MAX_HELLO_BYTES

log = logging.getLogger("tm_slurm.agent")

HANDSHAKE_TIMEOUT_S = 5.0
STALL_TIMEOUT_S = 30.0
"""A connection that moves no byte for so long is given up."""

GIVE_WAY_TIMEOUT_S = 2.0
"""How long a new put waits until an older one of the same rank, which it has cut off, lets go."""

MAX_CONNECTIONS = 1024
MAX_HEAD_BYTES = 64 << 20
MAX_BLOCK_BYTES = 64 << 20
SLOTS = 2

_TIMEVAL = struct.Struct("@ll")


class Refused(Exception):
    """A request that is answered with its reason."""


@dataclass
class _Slot:
    """Memory for one snapshot. `step` is -1 unless a whole one is in it."""

    step: int = -1
    epoch: int = -1
    head: bytearray = field(default_factory=bytearray, repr=False)
    blob: mmap.mmap | bytearray = field(default_factory=bytearray, repr=False)
    block: int = 1
    sums: bytearray = field(default_factory=bytearray, repr=False)
    readers: int = 0
    writer: socket.socket | None = None

    @property
    def nbytes(self) -> int:
        return len(self.head) + len(self.blob) + len(self.sums)

    def parts(self) -> Iterator[memoryview]:
        """The head, then the blob in blocks: what each checksum is of."""
        yield memoryview(self.head)
        view = memoryview(self.blob)
        for start in range(0, len(view), self.block):
            yield view[start : start + self.block]


@dataclass(frozen=True)
class _Put:
    """A checked request to keep a snapshot."""

    rank: int
    step: int
    epoch: int
    complete: int
    head: int
    blob: int
    block: int

    @property
    def sums(self) -> int:
        return 8 * (1 + -(-self.blob // self.block))

    @property
    def nbytes(self) -> int:
        return self.head + self.blob + self.sums


class Vault:
    """Listens at `port` from the start. At most `max_bytes` are held, of all ranks together: two snapshots of
    each, of which the one of the step last given to `keep` is not overwritten."""

    def __init__(self, secret: bytes, host: str, *, max_bytes: int) -> None:
        self._secret = secret
        self._host = host
        self._max_bytes = max_bytes
        self._ranks: dict[int, list[_Slot]] = {}
        self._kept = self._kept_in = -1  # the step, and the epoch in which it was said
        self._epoch = 0
        self._changed = threading.Condition()
        self._peers: dict[socket.socket, threading.Thread] = {}
        self._closed = False
        self._listener = listening_at(host)
        self.port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._listen, name="tm-vault", daemon=True)
        self._thread.start()

    # ---- what the agent asks ----

    def keep(self, step: int) -> None:
        """The snapshot of `step` is complete: all ranks have theirs stored, wherever. It stays until the
        next."""
        with self._changed:
            self._kept, self._kept_in = step, self._epoch

    def saw_epoch(self, epoch: int) -> None:
        """Puts of an epoch before this are refused from now on: they come from ranks that were replaced."""
        with self._changed:
            self._epoch = max(self._epoch, epoch)

    def holds(self) -> dict[int, list[int]]:
        """The steps of which a whole snapshot is here, by rank."""
        with self._changed:
            return {
                rank: sorted(slot.step for slot in slots if slot.step >= 0)
                for rank, slots in self._ranks.items()
            }

    def forget_all_but(self, ranks: Collection[int], *, step: int, epoch: int) -> None:
        """The complete snapshot of `step`, taken in `epoch`, has the parts of `ranks` here: lets go of the
        memory of all others, who are kept elsewhere. Of a rank that has a later one here, or on its way, this
        vault is the next keeper, and nothing is let go."""
        with self._changed:
            for rank in [rank for rank in self._ranks if rank not in ranks]:
                slots = self._ranks[rank]
                if all(s.writer is None and (s.epoch, s.step) <= (epoch, step) for s in slots):
                    del self._ranks[rank]

    def close(self) -> None:
        """Ends every connection and lets go of all memory."""
        with self._changed:
            self._closed = True
            for sock in (self._listener, *self._peers):
                _shut_down(sock)
            self._ranks.clear()
            threads = [self._thread, *self._peers.values()]
        for thread in threads:
            thread.join(GIVE_WAY_TIMEOUT_S)
        self._listener.close()

    # ---- connections ----

    def _listen(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if self._closed:
                    return
                log.warning("the vault could not accept a connection: %s", error)
                time.sleep(0.1)  # out of descriptors: no event says when there are some again
                continue
            with self._changed:
                if self._closed or len(self._peers) >= MAX_CONNECTIONS:
                    sock.close()
                    continue
                self._peers[sock] = threading.Thread(
                    target=self._serve, args=(sock,), name="tm-vault-peer", daemon=True
                )
                try:
                    self._peers[sock].start()
                except RuntimeError as error:  # no thread can be had just now
                    log.warning("the vault could not serve a connection: %s", error)
                    del self._peers[sock]
                    sock.close()

    def _serve(self, sock: socket.socket) -> None:
        try:
            identity = accept_socket(sock, self._secret, timeout_s=HANDSHAKE_TIMEOUT_S)
            _block_at_most(sock, STALL_TIMEOUT_S)
            frames = FrameSocket(sock)
            request = frames.receive(MAX_HELLO_BYTES)
            try:
                if request.get("op") == "put":
                    self._put(sock, frames, request)
                elif request.get("op") == "get":
                    self._get(sock, frames, request)
                else:
                    raise Refused(f"{request.get('op')!r:.40} is not what a vault does")
            except Refused as refusal:
                log.warning(
                    "the vault refused %r of %r: %s", request.get("op"), identity.get("rank"), refusal
                )
                frames.send({"refused": str(refusal)})
        except HandshakeRefused as error:
            log.warning("the vault refused a connection: %s", error)
        except OSError as error:
            log.info("a connection to the vault broke: %s", error)
        finally:
            with self._changed:
                self._peers.pop(sock, None)
            sock.close()

    def _put(self, sock: socket.socket, frames: FrameSocket, request: dict[str, Any]) -> None:
        began = time.thread_time()
        put = _checked(request)
        slot = self._slot_for(put, sock)
        try:
            frames.send({"ok": True})
            sums = bytearray()
            for part in slot.parts():
                _receive(sock, part)
                sums += xxhash.xxh3_64_digest(part)
            _receive(sock, memoryview(slot.sums))
            if sums != slot.sums:
                raise Refused(f"rank {put.rank} step {put.step}: the bytes changed on the way (checksum)")
            with self._changed:
                if slot.writer is not sock or self._closed:
                    raise Refused(f"rank {put.rank} step {put.step}: another put took its place")
                slot.step = put.step
        finally:
            with self._changed:
                slot.writer = None
                self._changed.notify_all()
        frames.send({"stored": put.step, "cpu_s": time.thread_time() - began})

    def _slot_for(self, put: _Put, sock: socket.socket) -> _Slot:
        """The memory that `put` may write to, empty, and marked as its own. Refused if there is none."""
        where = f"rank {put.rank} step {put.step}"
        with self._changed:
            if put.epoch < self._epoch:
                raise Refused(f"{where}: it is of epoch {put.epoch}, this vault has seen {self._epoch}")
            self._epoch = put.epoch
            if put.complete > self._kept or (put.step < self._kept and put.epoch > self._kept_in):
                # The latter: everybody has gone back to before what was kept.
                self._kept, self._kept_in = put.complete, put.epoch
            slots = self._ranks.setdefault(put.rank, [_Slot() for _ in range(SLOTS)])
            for slot in slots:
                if slot.writer is not None:
                    _shut_down(slot.writer)
            if not self._changed.wait_for(
                lambda: all(slot.writer is None for slot in slots), GIVE_WAY_TIMEOUT_S
            ):
                raise Refused(f"{where}: an earlier put of this rank did not end")
            free = [slot for slot in slots if not slot.readers and not (0 <= slot.step == self._kept)]
            if not free:
                raise Refused(
                    f"{where}: both memories are in use: step {self._kept} is kept, the other being read"
                )
            slot = min(free, key=lambda slot: (slot.step >= 0, slot.epoch, slot.step))
            held = sum(other.nbytes for own in self._ranks.values() for other in own if other is not slot)
            if held + put.nbytes > self._max_bytes:
                raise Refused(
                    f"{where}: {put.nbytes} bytes more than the {held} that are held; the vault at "
                    f"{self._host}:{self.port} may hold {self._max_bytes}"
                )
            slot.step, slot.epoch, slot.block, slot.writer = -1, put.epoch, put.block, sock
            if len(slot.blob) != put.blob:
                slot.blob = bytearray()  # before the new one, so that there are never three
                slot.blob = _memory(put.blob)
            slot.head, slot.sums = bytearray(put.head), bytearray(put.sums)
            return slot

    def _get(self, sock: socket.socket, frames: FrameSocket, request: dict[str, Any]) -> None:
        rank, step = _number(request, "rank"), _number(request, "step")
        with self._changed:
            slots = self._ranks.get(rank, [])
            slot = next((slot for slot in slots if slot.step == step), None)
            if slot is None:
                steps = sorted(slot.step for slot in slots if slot.step >= 0)
                raise Refused(
                    f"no snapshot of rank {rank} step {step} is here, only of steps {steps or 'none'}"
                )
            slot.readers += 1
        try:
            sizes = {"head": len(slot.head), "blob": len(slot.blob), "block": slot.block}
            frames.send({**sizes, "epoch": slot.epoch})
            for part in slot.parts():
                sock.sendall(part)
            sock.sendall(slot.sums)
        finally:
            with self._changed:
                slot.readers -= 1


def _checked(request: dict[str, Any]) -> _Put:
    put = _Put(**{name: _number(request, name) for name in _Put.__dataclass_fields__})
    if not 0 < put.block <= MAX_BLOCK_BYTES or put.head > MAX_HEAD_BYTES:
        raise Refused(
            f"rank {put.rank} step {put.step}: a head of {put.head} bytes in blocks of {put.block}, at most "
            f"{MAX_HEAD_BYTES} and {MAX_BLOCK_BYTES} are allowed"
        )
    return put


def _number(request: dict[str, Any], name: str) -> int:
    value = request.get(name)
    if type(value) is not int or not (-1 if name == "complete" else 0) <= value < 1 << 62:
        raise Refused(f"{name} must be a number of at least 0, found {value!r:.40}")
    return value


def _memory(size: int) -> mmap.mmap | bytearray:
    """`size` bytes that the kernel gives as they are first written."""
    if size == 0:
        return bytearray()
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _block_at_most(sock: socket.socket, seconds: float) -> None:
    """Blocking calls from now on, each with a limit that the kernel keeps: one call a block, not many."""
    sock.settimeout(None)
    limit = _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _receive(sock: socket.socket, view: memoryview) -> None:
    done = 0
    while done < len(view):
        count = sock.recv_into(view[done:], 0, socket.MSG_WAITALL)
        if count == 0:
            raise ConnectionError(f"it ended after {done} of {len(view)} bytes")
        done += count


def _shut_down(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it was not connected any longer
        sock.shutdown(socket.SHUT_RDWR)
