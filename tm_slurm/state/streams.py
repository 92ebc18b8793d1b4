"""The data of a transfer: blocks of live memory through several connections at once, each with its checksum.

Per connection one thread; hashing, sending and receiving all release the GIL. Receiving writes straight into
storage.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence

import torch
import xxhash

from tm_slurm.state.blocks import Block
from tm_slurm.state.connection import Connection, Deadline
from tm_slurm.state.errors import StateError
from tm_slurm.state.layout import Piece
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


def send_blocks(
    connection: Connection,
    blocks: Sequence[Block],
    memories: Sequence[Memory],
    pieces: Sequence[Piece],
    deadline: Deadline,
) -> None:
    """The blocks' bytes one after the other, then their checksums (8 bytes each)."""
    checksums = []
    for block in blocks:
        data: memoryview | bytes
        if len(block.pieces) > 1:
            data = b"".join([memories[position].view for position in block.pieces])
        else:
            data = memories[block.pieces[0]].view[block.start : block.stop]
        checksums.append(xxhash.xxh3_64_intdigest(data))
        connection.send(data, deadline, describe(block, pieces))
    connection.send(struct.pack(f">{len(checksums)}Q", *checksums), deadline, "the checksums")


def receive_blocks(
    connection: Connection,
    blocks: Sequence[Block],
    memories: Sequence[Memory],
    pieces: Sequence[Piece],
    deadline: Deadline,
) -> None:
    """Fills the pieces' memory; StateError naming the first tensors whose checksum differs."""
    checksums = []
    for block in blocks:
        what = describe(block, pieces)
        if len(block.pieces) > 1:
            data = memoryview(bytearray(block.nbytes))
            connection.receive_into(data, deadline, what)
            start = 0
            for position in block.pieces:
                view = memories[position].view
                stop = start + len(view)
                view[:] = data[start:stop]
                start = stop
        else:
            data = memories[block.pieces[0]].view[block.start : block.stop]
            connection.receive_into(data, deadline, what)
        checksums.append(xxhash.xxh3_64_intdigest(data))
    trailer = bytearray(8 * len(checksums))
    connection.receive_into(memoryview(trailer), deadline, "the checksums")
    for block, found, expected in zip(
        blocks, checksums, struct.unpack(f">{len(checksums)}Q", trailer), strict=True
    ):
        if found != expected:
            raise StateError(
                f"{describe(block, pieces)}: checksum {expected:016x} at the sender, {found:016x} here; "
                "the bytes changed on the way"
            )


def describe(block: Block, pieces: Sequence[Piece]) -> str:
    """What a block holds, for messages."""
    first = pieces[block.pieces[0]].name
    if len(block.pieces) > 1:
        return f"{first} to {pieces[block.pieces[-1]].name} ({len(block.pieces)} small tensors)"
    return f"{first} bytes {block.start} to {block.stop}"


def in_parallel(work: Callable[[int], None], connections: Sequence[Connection]) -> None:
    """`work(index)` for each connection at once, the first in this thread.

    The first failure ends all of them and is raised.
    """
    failures: list[BaseException] = []
    lock = threading.Lock()

    def guarded(index: int) -> None:
        try:
            work(index)
        except BaseException as error:  # raised below, in the calling thread
            with lock:
                failures.append(error)
            for connection in connections[1:]:
                connection.shut_down()

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
