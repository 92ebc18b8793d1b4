"""What the collectives of one rank answered in the first steps of a job, good for every rank of its class."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash


@dataclass(frozen=True)
class Call:
    """One collective or receive. `step`: -1 while the role was built; `name`: as in a profile
    ("tm:all_reduce"); `group`: the how-manieth group of its process, 0 the default one; `peer`, `source`: how
    many ranks further on in the group, negative when it had none; `outputs`: on the CPU, none if it did not
    end."""

    step: int
    name: str
    group: int
    peer: int
    source: int
    outputs: Sequence[torch.Tensor | None]


@dataclass(frozen=True)
class Recording:
    """`ranks`: all of the class; `layout`: what must be the same where it is played (see `layout_of`)."""

    role_class: str
    ranks: Sequence[int]
    layout: dict[str, Any]
    calls: Sequence[Call] = field(default_factory=tuple)

    @property
    def steps(self) -> int:
        """How many steps were recorded."""
        return max((call.step for call in self.calls), default=-1) + 1

    @property
    def nbytes(self) -> int:
        """Bytes of all outputs, each counted as often as it was an output."""
        return sum(t.nbytes for call in self.calls for t in call.outputs if t is not None)


def layout_of(world_size: int, role_class: str) -> dict[str, Any]:
    """What a recording depends on besides its class, with a fingerprint of it all."""
    layout = {"world_size": world_size, "role_class": role_class, "torch": torch.__version__}
    text = json.dumps(layout, sort_keys=True)
    return {**layout, "fingerprint": xxhash.xxh3_64_hexdigest(text.encode())}
