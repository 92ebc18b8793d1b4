"""Peer memory on the rank's side: snapshots of its state, sent to another node's vault while training
goes on.

    memory = PeerMemory(secret, stored=tell_stored, failed=tell_failed)
    memory.reserve(state)                                  after build(): allocates, in the background
    memory.begin(state, step, rank=0, epoch=1, vault=(host, port))   at a boundary: blocks for one copy
    memory.completed(step)                                 all ranks have theirs stored
    unpack(state, memory.local(step, rank))                a survivor goes back
    unpack(state, fetch(vault, secret, rank, step, …))     a dead rank's successor comes to the same boundary

Two snapshots are here in host memory, two in the vault. The newest complete one and the one on its way are
never overwritten. Nothing is allocated on the device.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import xxhash

from tm_slurm.control import FrameSocket, connect_socket
from tm_slurm.runtime.limits import HANDSHAKE_TIMEOUT_S
from tm_slurm.state import Snapshot, StateError, Stored, capture, pack, read_head
from tm_slurm.state.background import Background
from tm_slurm.state.blocks import BLOCK_BYTES
from tm_slurm.state.connection import MAX_MESSAGE_BYTES, Connection, Deadline
from tm_slurm.state.stored import room_for

SLOTS = 2
STALL_TIMEOUT_S = 30.0
"""A vault that takes no byte for so long is given up."""

MAX_REPLY_BYTES = 4096

FREE, SENDING, STORED, COMPLETE = "free", "sending", "stored", "complete"

Address = tuple[str, int]


@dataclass(frozen=True)
class Cost:
    """What the last snapshot took, in seconds: `pack_s` of the training thread; processor time of the thread
    that sent it, and of the vault's that received it."""

    pack_s: float = 0.0
    send_cpu_s: float = 0.0
    vault_cpu_s: float = 0.0


def choose_interval(
    pack_s: float, step_s: float, *, cpu_s: float = 0.0, cpus: float = 1.0, limit: float = 0.01
) -> int:
    """The smallest number of steps between two snapshots at which they cost at most `limit` of the time.

    `pack_s`: how long a snapshot blocks a step of `step_s` seconds. `cpu_s`: processor seconds of sending and
    receiving one, which training would have used on a node with `cpus` processors a rank. Raises ValueError
    if `step_s`, `cpus` or `limit` is not above 0, or a cost is below.
    """
    if not (step_s > 0 and cpus > 0 and limit > 0 and pack_s >= 0 and cpu_s >= 0):
        raise ValueError(
            f"a step of {step_s} s, {cpus} processors, a limit of {limit}, costs {pack_s} and {cpu_s} s: "
            "the first three must be above 0, the costs not below"
        )
    return max(1, math.ceil((pack_s + cpu_s / cpus) / (limit * step_s) - 1e-9))


@dataclass
class _Slot:
    use: str = FREE
    step: int = -1
    rank: int = -1  # whose state it is: a standby's may be of one that it did not become
    memory: Stored | None = None
    given_up: bool = False  # while it is being sent: stop, nobody wants it any longer


@dataclass(frozen=True)
class _Job:
    slot: _Slot
    memory: Stored
    rank: int
    epoch: int
    vault: Address


class _GivenUp(Exception):
    """This snapshot was abandoned while it was on its way."""


class PeerMemory:
    """`stored(step)` and `failed(step, why)` are called from the background thread: that the vault has this
    rank's snapshot of `step`, checked; or that it will not have it."""

    def __init__(
        self, secret: bytes, *, stored: Callable[[int], None], failed: Callable[[int, str], None]
    ) -> None:
        self.cost = Cost()
        self._secret = secret
        self._stored = stored
        self._failed = failed
        self._slots = [_Slot() for _ in range(SLOTS)]
        self._changed = threading.Condition()
        self._sending: tuple[_Slot, Connection] | None = None
        self._background = Background("tm-snapshots")

    # ---- the training thread's side: nothing here waits for the network ----

    def reserve(self, state: Mapping[str, Any]) -> None:
        """Has the memory for snapshots of `state` allocated in the background, so that the first `begin`
        finds it there. Optimizer state belongs to it, so call it after a first step."""
        snapshot = capture(state, 0, generators=False)
        self._background.submit(lambda: self._allocate(snapshot))

    def begin(self, state: Mapping[str, Any], step: int, *, rank: int, epoch: int, vault: Address) -> bool:
        """Takes a snapshot of `state` and has it sent; False, and nothing done, if neither slot is free.

        `step`: the number of steps done. Blocks for the copy to host memory only. Raises StateError as
        `pack` does.
        """
        with self._changed:
            slot = next((slot for slot in self._slots if slot.use == FREE), None)
            if slot is None or self._background.closed:
                return False
            slot.use, slot.step, slot.rank, slot.given_up = SENDING, step, rank, False
        began = time.perf_counter()
        try:
            slot.memory = pack(state, step, into=slot.memory)
        except BaseException:
            self._let_go(slot)
            raise
        with self._changed:
            self.cost = replace(self.cost, pack_s=time.perf_counter() - began)
        job = _Job(slot, slot.memory, rank, epoch, vault)
        self._background.submit(lambda: self._carry_out(job))
        return True

    def completed(self, step: int) -> None:
        """All ranks' snapshots of `step` are stored: this one is kept until a newer one is complete."""
        with self._changed:
            if not any(slot.step == step and slot.use in (STORED, COMPLETE) for slot in self._slots):
                return  # this rank took its place after that step
            for slot in self._slots:
                if slot.use == COMPLETE and slot.step != step:
                    slot.use = FREE
                elif slot.step == step and slot.use == STORED:
                    slot.use = COMPLETE

    def abandon(self, step: int | None = None) -> None:
        """The snapshot of `step` (None: every one that is not complete) will not be: its slot becomes free,
        as soon as no byte of it is being sent any longer."""
        with self._changed:
            for slot in self._slots:
                if step in (None, slot.step) and slot.use == STORED:
                    slot.use = FREE
                elif step in (None, slot.step) and slot.use == SENDING:
                    slot.given_up = True
            self._cut_off()

    def forget(self, *, above: int = -1) -> None:
        """What is here of steps above `above` cannot be gone back to any longer: all went back behind it, or
        this process did not become the rank that it was fetched for."""
        self.abandon()
        with self._changed:
            for slot in self._slots:
                if slot.use == COMPLETE and slot.step > above:
                    slot.use = FREE

    def local(self, step: int, rank: int) -> Stored | None:
        """The snapshot of `rank` at `step` in this process's memory, if it is whole; valid until a newer one
        is complete."""
        with self._changed:
            for slot in self._slots:
                if (slot.step, slot.rank) == (step, rank) and slot.use in (STORED, COMPLETE):
                    return slot.memory
        return None

    def fetch(self, address: Address, rank: int, step: int, *, timeout_s: float, max_bytes: int) -> Stored:
        """As `fetch`, into memory that was reserved if there is any; it is the newest complete one here then.

        On a standby `reserve` after its shadow steps: memory that the kernel has yet to give costs more time
        than the bytes take."""
        with self._changed:
            slot = next((slot for slot in self._slots if slot.use == FREE and slot.memory), None)
            if slot is not None:
                slot.use, slot.step = SENDING, -1
        try:
            into = slot.memory if slot is not None else None
            stored = fetch(
                address, self._secret, rank, step, timeout_s=timeout_s, max_bytes=max_bytes, into=into
            )
        finally:
            if slot is not None:
                self._let_go(slot)
        self.adopt(stored, rank)
        return stored

    def adopt(self, stored: Stored, rank: int) -> None:
        """What was fetched from a vault becomes the newest complete snapshot of `rank` here."""
        with self._changed:
            for other in self._slots:
                if other.use == COMPLETE and other.rank != rank:
                    other.use = FREE
            free = [slot for slot in self._slots if slot.use == FREE]
            slot = next((slot for slot in free if slot.memory is stored), free[0] if free else None)
            if slot is not None:
                slot.use, slot.step, slot.rank, slot.memory = STORED, stored.step, rank, stored
        self.completed(stored.step)

    def close(self) -> None:
        """Ends the thread and the connection; no callback comes afterwards."""
        with self._changed:
            for slot in self._slots:
                slot.given_up = True
            self._cut_off()
        self._background.close()

    def _cut_off(self) -> None:
        """Ends the transfer of a snapshot that nobody wants any longer."""
        if self._sending is not None and self._sending[0].given_up:
            self._sending[1].shut_down()

    # ---- the background thread ----

    def _allocate(self, snapshot: Snapshot) -> None:
        for slot in self._slots:
            with self._changed:
                if slot.use != FREE or slot.memory is not None:
                    continue
                slot.use = SENDING  # not to be begun with meanwhile
            try:
                slot.memory = room_for(snapshot)
            finally:
                self._let_go(slot)

    def _carry_out(self, job: _Job) -> None:
        step, began = job.memory.step, time.thread_time()
        try:
            vault_cpu_s = self._put(job)
        except Exception as error:  # whatever it was: training goes on, and the next snapshot is sent
            why = str(error) or type(error).__name__
        else:
            why = ""
        with self._changed:
            given_up = job.slot.given_up
            job.slot.use = FREE if given_up or why else STORED
            self._changed.notify_all()
            if not why:
                cpu_s = time.thread_time() - began
                self.cost = replace(self.cost, send_cpu_s=cpu_s, vault_cpu_s=vault_cpu_s)
        if given_up:
            return
        if why:
            self._failed(step, f"the snapshot of rank {job.rank} step {step} to {_at(job.vault)}: {why}")
        else:
            self._stored(step)

    def _let_go(self, slot: _Slot) -> None:
        with self._changed:
            slot.use = FREE
            self._changed.notify_all()

    def _put(self, job: _Job) -> float:
        """Sends one snapshot; answers the processor seconds that the vault spent on it."""
        memory, slot = job.memory, job.slot
        identity = {"role": "snapshot", "rank": job.rank, "epoch": job.epoch}
        self._go_on_with(slot)
        sock = connect_socket(job.vault, self._secret, identity, timeout_s=HANDSHAKE_TIMEOUT_S)
        try:
            connection = Connection(sock)
            with self._changed:
                self._sending = (slot, connection)
            self._go_on_with(slot)
            sock.settimeout(STALL_TIMEOUT_S)
            head = memory.head()
            frames = FrameSocket(sock)
            frames.send(
                {
                    "op": "put",
                    "rank": job.rank,
                    "step": memory.step,
                    "epoch": job.epoch,
                    "complete": self._newest_complete(),
                    "head": len(head),
                    "blob": memory.nbytes,
                    "block": BLOCK_BYTES,
                }
            )
            _answer(frames)
            sums = bytearray(xxhash.xxh3_64_digest(head))
            connection.send(head, Deadline.after(STALL_TIMEOUT_S), "the head")
            for block in memory.blocks():
                self._go_on_with(slot)
                sums += xxhash.xxh3_64_digest(block)
                connection.send(block, Deadline.after(STALL_TIMEOUT_S), "the tensors")
            connection.send(bytes(sums), Deadline.after(STALL_TIMEOUT_S), "the checksums")
            sock.settimeout(STALL_TIMEOUT_S)
            cpu_s = _answer(frames).get("cpu_s")
            return cpu_s if isinstance(cpu_s, float) else 0.0
        finally:
            with self._changed:
                self._sending = None
            sock.close()

    def _go_on_with(self, slot: _Slot) -> None:
        if slot.given_up:
            raise _GivenUp("it was abandoned")

    def _newest_complete(self) -> int:
        with self._changed:
            return max((slot.step for slot in self._slots if slot.use == COMPLETE), default=-1)


def fetch(
    address: Address,
    secret: bytes,
    rank: int,
    step: int,
    *,
    timeout_s: float,
    max_bytes: int,
    into: Stored | None = None,
) -> Stored:
    """The snapshot of `rank` and `step` from the vault at `address`, every byte checked.

    `into` lends its memory if its layout is the same. At most `max_bytes` are allocated. Raises StateError,
    naming all of them, if the vault has it not, is gone, or has not sent it within `timeout_s` seconds.
    """
    where = f"the snapshot of rank {rank} step {step} from the vault at {_at(address)}"
    deadline = Deadline.after(timeout_s)
    try:
        identity = {"role": "successor", "rank": rank}
        with connect_socket(address, secret, identity, timeout_s=min(timeout_s, HANDSHAKE_TIMEOUT_S)) as sock:
            sock.settimeout(deadline.remaining("the answer"))
            frames = FrameSocket(sock)
            frames.send({"op": "get", "rank": rank, "step": step})
            stored = _read(Connection(sock), _answer(frames), deadline, max_bytes, into)
        if stored.step != step:
            raise StateError(f"it is of step {stored.step}")
        return stored
    except (OSError, StateError) as error:
        raise StateError(f"{where}: {str(error) or type(error).__name__}") from error


def _read(
    connection: Connection, sizes: Mapping[str, Any], deadline: Deadline, max_bytes: int, into: Stored | None
) -> Stored:
    head_bytes = sizes.get("head")
    if type(head_bytes) is not int or not 0 < head_bytes <= MAX_MESSAGE_BYTES:
        raise StateError(f"a head of {head_bytes!r:.40} bytes, at most {MAX_MESSAGE_BYTES} are allowed")
    if sizes.get("block") != BLOCK_BYTES:
        raise StateError(f"it is in blocks of {sizes.get('block')!r:.40} bytes, {BLOCK_BYTES} are read here")
    head = bytearray(head_bytes)
    connection.receive_into(memoryview(head), deadline, "the head")
    stored = read_head(bytes(head), max_bytes=max_bytes, into=into)
    if sizes.get("blob") != stored.nbytes:
        raise StateError(f"{sizes.get('blob')!r:.40} bytes are announced, its layout has {stored.nbytes}")
    step, stored.step = stored.step, -1
    sums = bytearray(xxhash.xxh3_64_digest(head))
    for block in stored.blocks():
        connection.receive_into(block, deadline, "the tensors")
        sums += xxhash.xxh3_64_digest(block)
    expected = bytearray(len(sums))
    connection.receive_into(memoryview(expected), deadline, "the checksums")
    if sums != expected:
        raise StateError("the bytes changed on the way (checksum)")
    stored.step = step
    return stored


def _answer(frames: FrameSocket) -> Mapping[str, Any]:
    answer = frames.receive(MAX_REPLY_BYTES)
    if "refused" in answer:
        raise StateError(f"the vault refused: {str(answer['refused'])[:300]}")
    return answer


def _at(address: Address) -> str:
    return f"{address[0]}:{address[1]}"
