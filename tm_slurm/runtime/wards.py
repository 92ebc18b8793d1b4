"""Private state kept for each other: what no replica has (generators, data position, small buffers) is told
to a buddy on the next node at the beginning of a step, over the data links.

When a rank dies, its buddy still has what it told last, and the steps since then can be worked out again: all
but running statistics, which depend on the parameters of that step. So these are told again before the vote:
whoever sees a vote succeed knows that everybody's are with a buddy.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

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
        self.buddy = (rank + stride) % world_size
        self.ward = (rank - stride) % world_size
        self._alone = world_size == 1
        self._kept: deque[_Told] = deque(maxlen=KEPT)

    def exchange(self, step: int, private: Any) -> None:
        """Tell the buddy `private` (JSON-safe) as it is at the beginning of `step`; keep the ward's.

        Raises what a collective raises when a rank has failed."""
        if self._alone:
            return
        theirs = self._swap(private)
        while self._kept and self._kept[-1].step >= step:  # from before a roll-back
            self._kept.pop()
        self._kept.append(_Told(step, theirs))

    def exchange_buffers(self, step: int, buffers: Any) -> None:
        """Tell the buddy the buffers (JSON-safe) as they are before the vote of `step`; keep the ward's."""
        if self._alone:
            return
        theirs = self._swap(buffers)
        if self._kept and self._kept[-1].step == step:
            self._kept[-1].buffers = theirs

    def _swap(self, content: Any) -> torch.Tensor:
        """Send to the buddy, receive from the ward."""
        told = torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)
        size = torch.tensor([told.numel()])
        their_size = torch.empty(1, dtype=torch.int64)
        sends = [dist.isend(size, self.buddy), dist.isend(told, self.buddy)]
        dist.recv(their_size, self.ward)
        theirs = torch.empty(int(their_size), dtype=torch.uint8)
        dist.recv(theirs, self.ward)
        for send in sends:
            if send is not None:
                send.wait()
        return theirs

    def steps_of(self, rank: int) -> list[int]:
        """At the beginning of which steps this rank's private state was told here, oldest first."""
        return [told.step for told in self._kept] if rank == self.ward and not self._alone else []

    def told(self, rank: int) -> list[dict[str, Any]]:
        """The same as messages for the coordinator."""
        if not self.steps_of(rank):
            return []
        return [
            {
                "kind": "ward",
                "rank": rank,
                "step": told.step,
                "private": _content(told.private),
                "buffers": _content(told.buffers) if told.buffers is not None else None,
            }
            for told in self._kept
        ]


def _content(told: torch.Tensor) -> Any:
    return json.loads(bytes(told.numpy()))
