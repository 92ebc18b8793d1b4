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

from tm_slurm.comm import UNRECORDED_TAG

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
        stride = ranks_per_node if world_size > ranks_per_node else 1
        away = [n * stride for n in range(1, BUDDIES + 1) if n * stride < world_size]
        self.buddies = [(rank + distance) % world_size for distance in away]
        self.wards = [(rank - distance) % world_size for distance in away]
        self._kept: dict[int, deque[_Told]] = {ward: deque(maxlen=KEPT) for ward in self.wards}

    def exchange(self, step: int, private: Any) -> None:
        """Tell the buddies `private` (JSON-safe) as it is at the beginning of `step`; keep the wards'.

        Raises what a collective raises when a rank has failed."""
        for ward, theirs in self._swap(private).items():
            kept = self._kept[ward]
            while kept and kept[-1].step >= step:  # from before a roll-back
                kept.pop()
            kept.append(_Told(step, theirs))

    def exchange_buffers(self, step: int, buffers: Any) -> None:
        """Tell the buddies the buffers (JSON-safe) as they are before the vote of `step`; keep the wards'."""
        for ward, theirs in self._swap(buffers).items():
            kept = self._kept[ward]
            if kept and kept[-1].step == step:
                kept[-1].buffers = theirs

    def _swap(self, content: Any) -> dict[int, torch.Tensor]:
        """Send to the buddies, receive from the wards."""
        if not self.wards:
            return {}
        told = torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)
        size = torch.tensor([told.numel()])
        sends = [
            dist.isend(part, buddy, tag=UNRECORDED_TAG) for buddy in self.buddies for part in (size, told)
        ]
        received = {}
        for ward in self.wards:
            their_size = torch.empty(1, dtype=torch.int64)
            dist.recv(their_size, ward, tag=UNRECORDED_TAG)
            received[ward] = torch.empty(int(their_size), dtype=torch.uint8)
            dist.recv(received[ward], ward, tag=UNRECORDED_TAG)
        for send in sends:
            if send is not None:
                send.wait()
        return received

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
