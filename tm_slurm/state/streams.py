"""The data of a transfer: blocks of live memory through several connections at once, each with its checksum.

Per connection one thread; hashing, sending and receiving all release the GIL. Receiving writes straight into
storage.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import xxhash

from tm_slurm.state.blocks import Block, plan_streams
from tm_slurm.state.connection import Connection, Deadline
from tm_slurm.state.errors import StateError
from tm_slurm.state.layout import Layout, Piece
from tm_slurm.state.tensors import byte_view, is_direct, lies_as, write_in_place


class Memory:
    """The bytes of one piece on this side: the tensor's own if they lie as they travel, else a copy's."""

    def __init__(self, piece: Piece, tensor: torch.Tensor) -> None:
        self._name = piece.name
        self._tensor = tensor.detach()
        self._staging: torch.Tensor | None = None
        if not (is_direct(tensor) and lies_as(tensor, piece.stride)):
            pinned = tensor.device.type == "cuda"
            self._staging = torch.empty_strided(
                piece.shape, piece.stride, dtype=piece.dtype, pin_memory=pinned
            )
        self.view = byte_view(self._tensor if self._staging is None else self._staging)

    def fill(self) -> None:
        """Before sending: the tensor's elements into the staging copy, if there is one."""
        if self._staging is not None:
            self._staging.copy_(self._tensor)

    def empty(self) -> None:
        """After receiving: the staging copy's elements into the tensor, if there is one."""
        if self._staging is None:
            return
        write_in_place(self._name, self._tensor, self._staging)


@dataclass(frozen=True)
class Stream:
    """The blocks that go over one connection, and where their bytes are on this side."""

    connection: Connection
    blocks: Sequence[Block]
    memories: Mapping[int, Memory]
    pieces: Sequence[Piece]

    def send(self, deadline: Deadline) -> None:
        """The blocks' bytes one after the other, then their checksums (8 bytes each)."""
        checksums = []
        for block in self.blocks:
            data: memoryview | bytes
            if len(block.pieces) > 1:
                data = b"".join([self.memories[position].view for position in block.pieces])
            else:
                data = self._inside(block)
            checksums.append(xxhash.xxh3_64_intdigest(data))
            self.connection.send(data, deadline, describe(block, self.pieces))
        trailer = struct.pack(f">{len(checksums)}Q", *checksums)
        self.connection.send(trailer, deadline, "the checksums")

    def receive(self, deadline: Deadline) -> None:
        """Fills the pieces' memory; StateError naming the first tensors whose checksum differs."""
        checksums = []
        for block in self.blocks:
            small = len(block.pieces) > 1
            data = memoryview(bytearray(block.nbytes)) if small else self._inside(block)
            self.connection.receive_into(data, deadline, describe(block, self.pieces))
            checksums.append(xxhash.xxh3_64_intdigest(data))
            if small:
                self._spread(block, data)
        trailer = bytearray(8 * len(checksums))
        self.connection.receive_into(memoryview(trailer), deadline, "the checksums")
        expected = struct.unpack(f">{len(checksums)}Q", trailer)
        for block, here, there in zip(self.blocks, checksums, expected, strict=True):
            if here != there:
                raise StateError(
                    f"{describe(block, self.pieces)}: checksum {there:016x} at the sender, {here:016x} here; "
                    "the bytes changed on the way"
                )

    def _inside(self, block: Block) -> memoryview:
        return self.memories[block.pieces[0]].view[block.start : block.stop]

    def _spread(self, block: Block, data: memoryview) -> None:
        start = 0
        for position in block.pieces:
            view = self.memories[position].view
            view[:] = data[start : start + len(view)]
            start += len(view)


def streams_of(
    connections: Sequence[Connection],
    layout: Layout,
    tensors: Sequence[torch.Tensor],
    share: tuple[int, int],
    memories: dict[int, Memory],
) -> list[Stream]:
    """What goes over each of `connections` between the source with `share` and its receiver.

    `tensors` are this side's, piece by piece; `memories` gets those of the pieces that are not in it yet.
    """
    plan = plan_streams([piece.nbytes for piece in layout.pieces], len(connections), share)
    for position in {position for blocks in plan for block in blocks for position in block.pieces}:
        if position not in memories:
            memories[position] = Memory(layout.pieces[position], tensors[position])
    return [
        Stream(connection, blocks, memories, layout.pieces)
        for connection, blocks in zip(connections, plan, strict=True)
    ]


def describe(block: Block, pieces: Sequence[Piece]) -> str:
    """What a block holds, for messages."""
    first = pieces[block.pieces[0]].name
    if len(block.pieces) > 1:
        return f"{first} to {pieces[block.pieces[-1]].name} ({len(block.pieces)} small tensors)"
    return f"{first} bytes {block.start} to {block.stop}"


def in_parallel(
    work: Callable[[int], None],
    connections: Sequence[Connection],
    *,
    controls: Sequence[Connection] = (),
    wake: int = socket.SHUT_RDWR,
) -> None:
    """`work(index)` for each connection at once, the first in this thread.

    The first failure ends all of them and is raised. Of those in `controls` only the direction `wake` ends:
    in the other one a reason can still be told.
    """
    failures: list[BaseException] = []
    lock = threading.Lock()

    def guarded(index: int) -> None:
        try:
            work(index)
        except BaseException as error:  # raised below, in the calling thread
            with lock:
                failures.append(error)
            for connection in connections:
                connection.shut_down(wake if connection in controls else socket.SHUT_RDWR)

    threads = [
        threading.Thread(target=guarded, args=(index,), name=f"state-{index}", daemon=True)
        for index in range(1, len(connections))
    ]
    for thread in threads:
        thread.start()
    guarded(0)
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
