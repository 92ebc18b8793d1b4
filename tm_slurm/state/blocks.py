"""How the bytes of a layout are cut and spread over connections; both sides compute the same plan.

Large tensors are cut in blocks, so that one is hashed while it is in the cache and the next one is on its
way. Small tensors share a block: a pack. Each block has one checksum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BLOCK_BYTES = 1 << 20
SMALL_BYTES = 32 << 10  # tensors up to here travel in packs


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes [start, stop) of one piece, or several whole pieces one after the other."""

    pieces: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def plan_streams(sizes: Sequence[int], streams: int, share: tuple[int, int] = (0, 1)) -> list[list[Block]]:
    """The blocks of each of `streams` connections, in order, for pieces of `sizes` bytes.

    `share` (i, n): those of source i of n only, which together send everything; a large piece comes from
    several. Each source, and each of its connections, carries nearly the same number of bytes.
    """
    number, sources = share
    spread: list[list[Block]] = [[] for _ in range(streams)]
    total, before = max(sum(sizes), 1), 0
    for block in _blocks(sizes):
        at = before * sources * streams // total - number * streams
        if 0 <= at < streams:
            spread[at].append(block)
        before += block.nbytes
    return spread


def _blocks(sizes: Sequence[int]) -> list[Block]:
    blocks: list[Block] = []
    pack: list[int] = []
    pack_bytes = 0
    for position, size in enumerate(sizes):
        if size > SMALL_BYTES:
            blocks.extend(
                Block((position,), start, min(start + BLOCK_BYTES, size))
                for start in range(0, size, BLOCK_BYTES)
            )
        elif size:
            pack.append(position)
            pack_bytes += size
            if pack_bytes >= BLOCK_BYTES - SMALL_BYTES:
                blocks.append(Block(tuple(pack), 0, pack_bytes))
                pack, pack_bytes = [], 0
    if pack:
        blocks.append(Block(tuple(pack), 0, pack_bytes))
    return blocks
