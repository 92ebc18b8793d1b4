"""A rank's whole state at a step boundary, in host memory: what snapshots and checkpoints are made of.

    stored = pack(state, step)                      at a boundary: one copy of every tensor, to host memory
    stored = pack(state, step + 10, into=stored)    the same memory again
    step = unpack(state, stored)                    everything as it was then, in place

As bytes: `head()`, JSON with all that is not a tensor and with what the rest means; then the blob, cut in
blocks (`blocks()`), each with its xxh3 checksum; `read_head` makes the memory for a blob that is to come.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash

from tm_slurm.state.binding import bind
from tm_slurm.state.blocks import BLOCK_BYTES
from tm_slurm.state.capturing import Snapshot, capture
from tm_slurm.state.collecting import no_garbage_collection
from tm_slurm.state.digesting import canonical
from tm_slurm.state.dtypes import dtype_name
from tm_slurm.state.entries import MODULE, OPTIMIZER
from tm_slurm.state.errors import StateError
from tm_slurm.state.json_object import read_json
from tm_slurm.state.layout import Layout, layout_from, layout_of, piece_of
from tm_slurm.state.private import BUFFER_LIMIT_BYTES
from tm_slurm.state.restoring import restore
from tm_slurm.state.tensors import shard_of, value_bytes, write_in_place
from tm_slurm.state.tree import Json

ALIGNMENT = 16
"""Bytes; every piece begins at a multiple, so that it can be looked at as a tensor of any dtype."""

_VERSION = 1


@dataclass
class Stored:
    """`flat` holds the bytes of all pieces of `layout`, one after the other, each at a multiple of ALIGNMENT;
    `tree` and `generators` are as in `capture.Snapshot`; `shards` says of each piece which part of a whole
    tensor it is (None: it is the whole). `step` is -1 while there is nothing in it."""

    step: int
    layout: Layout
    tree: dict[str, Json]
    generators: Json
    shards: list[Json]
    flat: torch.Tensor = field(repr=False)
    places: list[torch.Tensor] = field(init=False, repr=False)  # each piece as a tensor, inside `flat`

    def __post_init__(self) -> None:
        self.places = [
            self.flat[start : start + piece.nbytes].view(piece.dtype).as_strided(piece.shape, piece.stride)
            if piece.nbytes
            else torch.empty(piece.shape, dtype=piece.dtype)
            for piece, start in zip(self.layout.pieces, _starts(self.layout), strict=True)
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of the blob: the shard, and what the alignment of its pieces needs."""
        return self.flat.numel()

    def head(self) -> bytes:
        """All but the blob, as JSON. StateError for a number that JSON has not."""
        rest = {
            "version": _VERSION,
            "step": self.step,
            "blob": self.nbytes,
            "fingerprint": self.layout.fingerprint,
            "tree": self.tree,
            "generators": self.generators,
            "shards": self.shards,
        }
        text = json.dumps(rest, separators=(",", ":"), allow_nan=False)
        return b'{"layout":' + self.layout.text + b"," + text[1:].encode("ascii")

    def blocks(self) -> Iterator[memoryview]:
        """The blob in blocks of BLOCK_BYTES, the last one shorter; they may be read and written."""
        view = memoryview(self.flat.numpy())  # type: ignore[arg-type]
        for start in range(0, len(view), BLOCK_BYTES):
            yield view[start : start + BLOCK_BYTES]

    def replica_key(self) -> str:
        """What `replica_key` said of the state that this was packed from."""
        return _key(self.layout, self.places, self.shards, self.tree)


@no_garbage_collection()
@torch.no_grad()
def pack(state: Mapping[str, Any], step: int, *, into: Stored | None = None) -> Stored:
    """Copies everything that makes this rank what it is to host memory (pinned where it comes from a GPU).

    `step`: the number of steps done. `into` lends its memory if its layout is the same; then that is what is
    answered, and nothing is allocated. Raises StateError as `capture` does; `into` holds nothing then.
    """
    if into is not None:
        into.step = -1
    snapshot = capture(state, step)
    if into is None or not _fits(into.layout, snapshot):
        into = room_for(snapshot)
    into.tree, into.generators, into.shards = snapshot.tree, snapshot.generators, _shards(snapshot)
    _copy(into.places, [named.local for named in snapshot.tensors])
    into.step = step
    return into


@no_garbage_collection()
@torch.no_grad()
def unpack(state: Mapping[str, Any], stored: Stored, *, max_bytes: int | None = None) -> int:
    """Makes `state`, and the global generators, what they were when `stored` was packed; answers the step.

    In place, as a transfer does (see `bind`, also for `max_bytes`, and `restore`). Raises StateError if it is
    another build's: nothing is changed then, unless an object's own load_state_dict() refused.
    """
    if stored.step < 0:
        raise StateError("there is no state in this memory; it was given to a snapshot that did not succeed")
    binding = bind(stored.layout, state, max_bytes=max_bytes)
    plain, sources = [], []
    for piece, target, source in zip(stored.layout.pieces, binding.locals, stored.places, strict=True):
        if 0 in target.stride():
            write_in_place(piece.name, target, source)
        else:
            plain.append(target)
            sources.append(source)
    _copy(plain, sources)
    for position, tensor in binding.copies:
        tensor.copy_(stored.places[position])
    restore(state, stored.tree, binding.wholes.__getitem__, stored.generators)
    return stored.step


def room_for(snapshot: Snapshot) -> Stored:
    """Memory for a state like `snapshot`, with nothing in it yet."""
    pinned = any(named.local.device.type == "cuda" for named in snapshot.tensors)
    return _room(layout_of(snapshot), pinned=pinned)


def _room(layout: Layout, *, pinned: bool = False) -> Stored:
    size = _size(layout)
    return Stored(-1, layout, {}, None, [None] * len(layout.pieces), _memory(size, pinned))


def _memory(size: int, pinned: bool) -> torch.Tensor:
    """`size` bytes, all zero, all there: the first copy into them shall not wait for the kernel's pages."""
    if pinned:
        return torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).zero_()


def _starts(layout: Layout) -> Iterator[int]:
    start = 0
    for piece in layout.pieces:
        yield start
        start += -(-piece.nbytes // ALIGNMENT) * ALIGNMENT


def _size(layout: Layout) -> int:
    return sum(-(-piece.nbytes // ALIGNMENT) * ALIGNMENT for piece in layout.pieces)


def _fits(layout: Layout, snapshot: Snapshot) -> bool:
    """True if `layout` is the snapshot's."""
    if len(layout.pieces) != len(snapshot.tensors) or layout.kinds != snapshot.kinds:
        return False
    for piece, named in zip(layout.pieces, snapshot.tensors, strict=True):
        local = named.local
        quickly = (
            piece.name == named.name
            and piece.dtype == local.dtype
            and piece.shape == local.shape
            and piece.stride == local.stride()
            and piece.parameter == named.parameter
            and piece.wrapper == named.wrapper
            and piece.kind == named.kind
            and piece.device == local.device.type
        )
        if not quickly and piece != piece_of(named):
            return False
    return layout.aliases == [(named.name, named.kind, position) for named, position in snapshot.aliases]


def _shards(snapshot: Snapshot) -> list[Json]:
    return [shard_of(named.whole) if named.wrapper else None for named in snapshot.tensors]


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """All copies at once; returns when they are done."""
    pairs = [pair for pair in zip(targets, sources, strict=True) if pair[0].numel()]
    if not pairs:
        return
    torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs], non_blocking=True)
    for device in {t.device for pair in pairs for t in pair if t.device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()


def read_head(text: bytes, *, max_bytes: int, into: Stored | None = None) -> Stored:
    """Memory for the blob that follows a `head()` from elsewhere; its blocks are then to be filled.

    `into` lends its memory if its layout is the same. Raises StateError for whatever is wrong with the head,
    or if the blob is larger than `max_bytes`; nothing has been allocated then.
    """
    return stored_from(read_json(text, "the stored state"), max_bytes=max_bytes, into=into)


def stored_from(content: Mapping[str, Any], *, max_bytes: int, into: Stored | None = None) -> Stored:
    """`read_head` of a head that has been parsed already."""
    if into is not None:
        into.step = -1
    if content.get("version") != _VERSION:
        raise StateError(
            f"the stored state: version {content.get('version')!r}, this side reads {_VERSION}: "
            "use the same tm_slurm everywhere"
        )
    layout = layout_from(content.get("layout"))
    step, tree, shards = content.get("step"), content.get("tree"), content.get("shards")
    size = _size(layout)
    if content.get("blob") != size or content.get("fingerprint") != layout.fingerprint:
        raise StateError("the stored state: its layout is not the one that it was stored with")
    if type(step) is not int or step < 0 or not isinstance(tree, dict):
        raise StateError("the stored state: the step or the tree is missing")
    if not isinstance(shards, list) or len(shards) != len(layout.pieces):
        raise StateError("the stored state: not every piece says which part of a tensor it is")
    if size > max_bytes:
        raise StateError(f"the stored state: {size} bytes, at most {max_bytes} are allowed here")
    if into is None or into.layout.fingerprint != layout.fingerprint:
        into = _room(layout)
    into.step, into.tree, into.generators, into.shards = step, tree, content.get("generators"), shards
    return into


@torch.no_grad()
def replica_key(state: Mapping[str, Any]) -> str:
    """32 hexadecimal digits over parameters and optimizer state: ranks with the same key are replicas of one
    another, so that each can give the other's successor everything but its private state.

    Generators and other objects are not in it, nor are buffers as long as they are small enough to be told
    (`private_buffers`): running statistics that are too large for that make ranks that differ in them no
    replicas. Which part of a tensor a DTensor holds is in it. Where the optimizer alone is sharded (ZeRO),
    the keys differ from the first step on, not before.
    """
    snapshot = capture(state, 0, generators=False)
    tensors = [named.local for named in snapshot.tensors]
    return _key(layout_of(snapshot), tensors, _shards(snapshot), snapshot.tree)


def _key(layout: Layout, tensors: list[torch.Tensor], shards: list[Json], tree: Mapping[str, Json]) -> str:
    hasher = xxhash.xxh3_128()
    rows = zip(layout.pieces, tensors, shards, strict=True)
    untold = _buffer_bytes(layout) > BUFFER_LIMIT_BYTES
    for piece, tensor, shard in sorted(rows, key=lambda row: row[0].name):
        if not piece.is_private or (untold and piece.kind == MODULE):
            header = [piece.name, dtype_name(piece.dtype, piece.name), piece.shape, shard]
            hasher.update(json.dumps(header).encode("ascii") + b"\n")
            hasher.update(value_bytes(tensor))
    rest = {key: canonical(tree[key]) for key, kind in layout.kinds.items() if kind == OPTIMIZER}
    hasher.update(json.dumps(rest, sort_keys=True).encode("ascii"))
    return hasher.hexdigest()


def _buffer_bytes(layout: Layout) -> int:
    """Of the modules' buffers, under all their names."""
    positions = [*range(len(layout.pieces)), *[position for _, _, position in layout.aliases]]
    pieces = [layout.pieces[position] for position in positions]
    return sum(piece.nbytes for piece in pieces if piece.kind == MODULE and piece.is_private)
