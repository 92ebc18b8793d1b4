"""Private state kept for each other: what no replica has (generators, data position, small buffers) is told
to buddies on the next two nodes at the beginning of a step, over the data links.

When a rank dies, a buddy still has what it told last, and the steps since then can be worked out again: all
but running statistics, which depend on the parameters of that step. So these are told again before the vote:
whoever sees a vote succeed knows that everybody's are with its buddies.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tm_slurm.control.frames import MAX_FRAME_BYTES
from tm_slurm.runtime.saying import say

TOLD_LIMIT_BYTES = MAX_FRAME_BYTES - (4 << 20)
"""As JSON. It goes through the coordinator in one frame, together with buffers and a table of peers."""

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


class Wards:
    """Of one rank, at one membership of the job. Every rank of the job calls `exchange` at the same steps."""

    def __init__(self, rank: int, world_size: int, ranks_per_node: int) -> None:
        self._rank = rank
        stride = ranks_per_node if world_size > ranks_per_node else 1
        away = [n * stride for n in range(1, BUDDIES + 1) if n * stride < world_size]
        self.buddies = [(rank + distance) % world_size for distance in away]
        self.wards = [(rank - distance) % world_size for distance in away]
        self._kept: dict[int, deque[_Told]] = {ward: deque(maxlen=KEPT) for ward in self.wards}
        self._refused = False

    def exchange(self, step: int, private: Any) -> None:
        """Tell the buddies `private` (JSON-safe) as it is at the beginning of `step`; keep the wards'. One
        that is too large is not told, and that is said once.

        Raises what a collective raises when a rank has failed."""
        for ward, theirs in self._swap(json.dumps(private).encode()).items():
            kept = self._kept[ward]
            while kept and kept[-1].step >= step:  # from before a roll-back
                kept.pop()
            if theirs.numel():
                kept.append(_Told(step, theirs))

    def exchange_buffers(self, step: int, buffers: Any) -> None:
        """Tell the buddies the buffers (JSON-safe) as they are before the vote of `step`; keep the wards'."""
        for ward, theirs in self._swap(json.dumps(buffers).encode()).items():
            kept = self._kept[ward]
            if kept and kept[-1].step == step and theirs.numel():
                kept[-1].buffers = theirs

    def _swap(self, content: bytes) -> dict[int, torch.Tensor]:
        """Send to the buddies, receive from the wards. Nothing stands for what is too large."""
        if not self.wards:
            return {}
        if len(content) > TOLD_LIMIT_BYTES:
            self._refuse(len(content))
            content = b""
        told = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0).byte()
        size = torch.tensor([told.numel()])
        sends = [dist.isend(part, buddy) for buddy in self.buddies for part in (size, told)]
        received = {}
        for ward in self.wards:
            their_size = torch.empty(1, dtype=torch.int64)
            dist.recv(their_size, ward)
            received[ward] = torch.empty(int(their_size), dtype=torch.uint8)
            dist.recv(received[ward], ward)
        for send in sends:
            if send is not None:
                send.wait()
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


def _content(told: torch.Tensor) -> Any:
    return json.loads(bytes(told.numpy()))
