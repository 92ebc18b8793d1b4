"""Private state kept for each other: what no replica has (generators, data position, small buffers) is told
to buddies on the next two nodes at the beginning of a step, over the data links.

When a rank dies, a buddy still has what it told last, and the steps since then can be worked out again: all
but running statistics, which depend on the parameters of that step. So these are told again before the vote:
whoever sees a vote succeed knows that everybody's are with its buddies.

A survivor that is to do a lost rank's share cannot work out steps again. Where that may be (`shrink`), ranks
tell all of their private state before the vote, and with it that of the absent ranks whose share they do: it
is what the next step begins with, but for objects that are stepped after the optimizer.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tm_slurm.comm import UNRECORDED_TAG
from tm_slurm.control.frames import MAX_FRAME_BYTES
from tm_slurm.runtime.saying import say
from tm_slurm.state import common_objects

TOLD_LIMIT_BYTES = MAX_FRAME_BYTES - (4 << 20)
"""As JSON. It goes through the coordinator in one frame, together with buffers and a table of peers."""

SIZE_BYTES = 8
LETTER_BYTES = 16 << 10
"""Of the message that every buddy gets, whatever is told: first how many bytes that has, then as much of it
as there is room for (three generators take 14 KB); the rest, if any, follows in another message."""

BUDDIES = 2
"""A rank and its neighbour may be lost at once; and a successor has been told nothing yet."""

KEPT = 3
"""Of one ward: the survivors of a failure may agree on a step before the newest one told."""


@dataclass
class _Told:
    """What a ward has told: at the beginning of `step`, and its buffers before the vote of that step."""

    step: int
    private: torch.Tensor
    buffers: torch.Tensor | None = None


@dataclass
class _Nearly:
    """What a ward has told before the vote of the step before `step`, and what it was told itself then."""

    step: int
    theirs: torch.Tensor
    mine: torch.Tensor


class Wards:
    """Of one rank, at one membership of the job. Every rank of the job calls `exchange` at the same steps."""

    def __init__(self, rank: int, world_size: int, ranks_per_node: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._stride = ranks_per_node if world_size > ranks_per_node else 1
        self._kept: dict[int, deque[_Told]] = {}
        self._nearly: dict[int, deque[_Nearly]] = {}
        self._refused = False
        self.leave_out(())

    def leave_out(self, absent: Collection[int]) -> None:
        """These ranks tell nothing and are told nothing; what is known of them stays."""
        self.buddies = self._next(self._stride, absent)
        self.wards = self._next(-self._stride, absent)

    def _next(self, stride: int, absent: Collection[int]) -> list[int]:
        found: list[int] = []
        rank = (self._rank + stride) % self._world_size
        while rank != self._rank and len(found) < BUDDIES:
            if rank not in absent:
                found.append(rank)
            rank = (rank + stride) % self._world_size
        return found

    def exchange(self, step: int, private: Any) -> None:
        """Tell the buddies `private` (JSON-safe) as it is at the beginning of `step`; keep the wards'. One
        that is too large is not told, and that is said once.

        Raises what a collective raises when a rank has failed."""
        for ward, theirs in self._swap(_packed(private)).items():
            _keep(self._kept, ward, _Told(step, theirs))

    def exchange_buffers(self, step: int, buffers: Any) -> None:
        """Tell the buddies the buffers (JSON-safe) as they are before the vote of `step`; keep the wards'."""
        for ward, theirs in self._swap(_packed(buffers)).items():
            self._keep_buffers(ward, step, theirs)

    def exchange_nearly(self, step: int, told: Mapping[int, Any], *, with_buffers: bool) -> None:
        """Before the vote of `step`, tell the buddies the private states of this rank and of the absent ones
        whose share it does; keep the wards'. `with_buffers`: and take their buffers from there."""
        mine = _packed({str(rank): private for rank, private in told.items()})
        for ward, theirs in self._swap(mine).items():
            if not theirs.numel():
                continue
            _keep(self._nearly, ward, _Nearly(step + 1, theirs, mine))
            if with_buffers:
                self._keep_buffers(ward, step, _packed(_content(theirs)[str(ward)]["buffers"]))

    def keep(self, rank: int, step: int, private: Any) -> None:
        """The private state at the beginning of `step` of a rank whose share this one has done until now."""
        _keep(self._kept, rank, _Told(step, _packed(private)))

    def _keep_buffers(self, ward: int, step: int, buffers: torch.Tensor) -> None:
        kept = self._kept.get(ward)
        if kept and kept[-1].step == step and buffers.numel():
            kept[-1].buffers = buffers

    def _swap(self, told: torch.Tensor) -> dict[int, torch.Tensor]:
        """Send to the buddies, receive from the wards. Nothing stands for what is too large."""
        if told.numel() > TOLD_LIMIT_BYTES:
            self._refuse(told.numel())
            told = told[:0]
        letters = {ward: torch.zeros(LETTER_BYTES, dtype=torch.uint8) for ward in self.wards}
        receives = [dist.irecv(letter, ward, tag=UNRECORDED_TAG) for ward, letter in letters.items()]
        parts = _in_parts(told)
        sends = [dist.isend(part, buddy, tag=UNRECORDED_TAG) for buddy in self.buddies for part in parts]
        _await(receives)
        received = {}
        for ward, letter in letters.items():
            size = int(letter[:SIZE_BYTES].view(torch.int64))
            received[ward] = letter[SIZE_BYTES : SIZE_BYTES + size]
            if size > received[ward].numel():
                rest = torch.empty(size - received[ward].numel(), dtype=torch.uint8)
                dist.recv(rest, ward, tag=UNRECORDED_TAG)
                received[ward] = torch.cat([received[ward], rest])
        _await(sends)
        return received

    def _refuse(self, size: int) -> None:
        if not self._refused:
            self._refused = True
            say(
                f"the private state of rank {self._rank} is {size} bytes, over the limit of "
                f"{TOLD_LIMIT_BYTES}: no other node keeps it, so the loss of this rank takes all back to the "
                "newest snapshot or checkpoint; keep large data out of state_dict, or set policy.snapshots: "
                "always"
            )

    def steps_of(self, rank: int) -> list[int]:
        """At the beginning of which steps this rank's private state was told here, oldest first."""
        return [told.step for told in self._kept.get(rank, ())]

    def told(self, rank: int) -> list[dict[str, Any]]:
        """The same as messages for the coordinator."""
        return [
            {
                "kind": "ward",
                "rank": rank,
                "step": told.step,
                "private": _content(told.private),
                "buffers": _content(told.buffers) if told.buffers is not None else None,
            }
            for told in self._kept.get(rank, ())
        ]

    def told_nearly(self, rank: int) -> list[dict[str, Any]]:
        """Messages with what was told before the vote of the step before; `common`: the objects that were the
        same here, and so are, wherever the rest of that step is done, what they are there."""
        messages = []
        for nearly in (nearly for kept in self._nearly.values() for nearly in kept):
            private = _content(nearly.theirs).get(str(rank))
            if private is not None:
                common = common_objects(private, _content(nearly.mine)[str(self._rank)])
                told = {"kind": "ward", "rank": rank, "step": nearly.step}
                messages.append({**told, "private": private, "common": common})
        return messages


def _keep(known: dict[int, deque[Any]], rank: int, told: _Told | _Nearly) -> None:
    kept = known.setdefault(rank, deque(maxlen=KEPT))
    while kept and kept[-1].step >= told.step:  # from before a roll-back
        kept.pop()
    if not isinstance(told, _Told) or told.private.numel():
        kept.append(told)


def _in_parts(told: torch.Tensor) -> list[torch.Tensor]:
    """The letter, and what it has no room for."""
    letter = torch.zeros(LETTER_BYTES, dtype=torch.uint8)
    letter[:SIZE_BYTES].view(torch.int64)[0] = told.numel()
    fits = min(told.numel(), LETTER_BYTES - SIZE_BYTES)
    letter[SIZE_BYTES : SIZE_BYTES + fits] = told[:fits]
    return [letter, told[fits:]] if fits < told.numel() else [letter]


def _await(works: list[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()


def _packed(content: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)


def _content(told: torch.Tensor) -> Any:
    return json.loads(bytes(told.numpy()))
