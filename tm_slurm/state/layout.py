"""What tensors a state has: the part of a transfer that is agreed on before the pause.

A layout comes from the other side of a connection, so reading one checks everything before anything is
allocated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import xxhash

from tm_slurm.state.capturing import NamedTensor, Snapshot
from tm_slurm.state.dtypes import dtype_from_name, dtype_name
from tm_slurm.state.entries import GENERATOR, MODULE, OBJECT, OPTIMIZER
from tm_slurm.state.errors import StateError
from tm_slurm.state.json_object import read_json
from tm_slurm.state.tensors import is_dense

KINDS = (MODULE, OPTIMIZER, GENERATOR, OBJECT)
MAX_DIMENSIONS = 64
MAX_SIZE = 1 << 48


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor as it travels: its elements lie as `stride` says, in one span of memory without gaps."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    kind: str
    device: str  # type at the sender: "cpu", "cuda"
    wrapper: str
    parameter: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_private(self) -> bool:
        """True for what data-parallel replicas need not share: buffers, and tensors of objects."""
        return not (self.kind == OPTIMIZER or (self.kind == MODULE and self.parameter >= 0))

    def describe(self) -> str:
        """ "float32 [3, 4]", for messages."""
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"

    def matches(self, tensor: torch.Tensor) -> bool:
        """True if `tensor` has this shape and dtype."""
        return tensor.dtype == self.dtype and tuple(tensor.shape) == self.shape


@dataclass(frozen=True)
class Layout:
    """Kinds of the entries, pieces of memory, and further names of a piece."""

    kinds: dict[str, str]
    pieces: list[Piece]
    aliases: list[tuple[str, str, int]] = field(default_factory=list)  # name, kind, position of the piece

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    @cached_property
    def text(self) -> bytes:
        """As it travels: compact JSON."""
        rows = [
            [
                piece.name,
                dtype_name(piece.dtype, piece.name),
                piece.shape,
                None if piece.stride == row_major(piece.shape) else piece.stride,
                KINDS.index(piece.kind),
                piece.device,
                piece.wrapper,
                piece.parameter,
            ]
            for piece in self.pieces
        ]
        aliases = [[name, KINDS.index(kind), position] for name, kind, position in self.aliases]
        content = {"kinds": self.kinds, "pieces": rows, "aliases": aliases}
        return json.dumps(content, separators=(",", ":")).encode("ascii")

    @cached_property
    def fingerprint(self) -> str:
        """Equal on both sides exactly if the layouts are."""
        return xxhash.xxh3_128_hexdigest(self.text)


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides, in elements, of a contiguous tensor, as torch numbers them."""
    stride = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def layout_of(snapshot: Snapshot) -> Layout:
    """The layout of a captured state."""
    pieces = [piece_of(named) for named in snapshot.tensors]
    aliases = [(named.name, named.kind, position) for named, position in snapshot.aliases]
    return Layout(dict(snapshot.kinds), pieces, aliases)


def piece_of(named: NamedTensor) -> Piece:
    """How a captured tensor travels."""
    local = named.local
    dtype_name(local.dtype, named.name)
    shape, stride = tuple(local.shape), tuple(local.stride())
    if local.numel() == 0 or not is_dense(shape, stride) or local.is_conj() or local.is_neg():
        stride = row_major(shape)  # a copy travels
    return Piece(
        named.name, local.dtype, shape, stride, named.kind, local.device.type, named.wrapper, named.parameter
    )


def read_layout(text: bytes) -> Layout:
    """The layout in a message from another rank; StateError for whatever is wrong with it."""
    return layout_from(read_json(text, "layout"))


def layout_from(content: Any) -> Layout:
    """The layout in JSON from elsewhere; StateError for whatever is wrong with it."""
    try:
        return _checked_layout(content)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise StateError(
            f"layout: not what a sender of this version says: {type(error).__name__}: {error}"
        ) from None


def _checked_layout(content: Mapping[str, Any]) -> Layout:
    kinds = {_text(key): KINDS[KINDS.index(kind)] for key, kind in content["kinds"].items()}
    pieces = [_checked_piece(row) for row in content["pieces"]]
    aliases = []
    for name, kind, position in content["aliases"]:
        if not 0 <= _number(position) < len(pieces):
            raise StateError(f"{name!r}: alias of piece {position}, but there are {len(pieces)}")
        aliases.append((_text(name), KINDS[_number(kind)], position))
    names = {piece.name for piece in pieces} | {name for name, _, _ in aliases}
    if len(names) != len(pieces) + len(aliases):
        raise StateError("layout: a name occurs twice")
    return Layout(kinds, pieces, aliases)


def _checked_piece(row: Any) -> Piece:
    name, dtype, shape, stride, kind, device, wrapper, parameter = row
    _text(name)
    sizes = tuple(_number(size) for size in shape)
    if len(sizes) > MAX_DIMENSIONS or not all(0 <= size < MAX_SIZE for size in sizes):
        raise StateError(f"{name}: {list(sizes)[:MAX_DIMENSIONS]} is not a shape that a tensor can have")
    steps = row_major(sizes) if stride is None else tuple(_number(step) for step in stride)
    if len(steps) != len(sizes) or not is_dense(sizes, steps):
        raise StateError(f"{name}: strides {list(steps)[:MAX_DIMENSIONS]} leave gaps in shape {list(sizes)}")
    return Piece(
        name,
        dtype_from_name(dtype, name),
        sizes,
        steps,
        KINDS[_number(kind)],
        _text(device),
        _text(wrapper),
        _number(parameter, least=-1),
    )


def _number(value: Any, least: int = 0) -> int:
    if type(value) is not int or value < least:
        raise TypeError(f"a number of at least {least} was expected, found {value!r:.40}")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"a string was expected, found {value!r:.40}")
    return value
