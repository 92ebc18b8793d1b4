"""What a rank is: its coordinates in the layout. A migration never changes it; only where it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Role:
    """`rank` of `world_size`; `local_rank`: its slot on the node; `coords`: by axis of the layout ("dp");
    `groups`: process groups by axis, empty for the default group alone."""

    rank: int
    world_size: int
    local_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    coords: dict[str, int] = field(default_factory=dict)
    groups: dict[str, Any] = field(default_factory=dict)


def role_of(rank: int, world_size: int, slot: int, ranks_per_node: int = 1) -> Role:
    """The role of a rank in a data-parallel layout, on this process's device; a guest on a node that hosts
    more ranks than it has devices shares one."""
    slot %= ranks_per_node
    device = torch.device("cuda", slot) if torch.cuda.is_available() else torch.device("cpu")
    return Role(rank=rank, world_size=world_size, local_rank=slot, device=device, coords={"dp": rank})
