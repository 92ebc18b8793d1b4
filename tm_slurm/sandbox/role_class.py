"""Role classes: ranks whose part of the model has the same shapes and whose collectives come in the same
order (TrainMover §6). Data and tensor parallel ranks are symmetric; pipeline stages are first, middle or
last."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn

NAME_KEY = "role_class"
"""An entry of what `build` returns by which users name a class themselves."""

LONGEST_NAME = 40
_PIPELINE = re.compile(r"(^|[_\W])(pp|pipe|pipeline|stage)([_\W]|$)")


def role_class_of(state: Mapping[str, Any]) -> str:
    """The class of the role that was built last in this process, good as the name of a folder: "only",
    "first", "middle", "last", or what the user calls it, and a fingerprint of shapes and groups."""
    named = state.get(NAME_KEY)
    name = named if isinstance(named, str) and named else stage_name(*(stage_of(state) or (0, 1)))
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-")[:LONGEST_NAME] or "named"
    text = repr((list(_shapes(state)), list(_group_sizes())))
    return f"{name}-{xxhash.xxh3_64_hexdigest(text.encode())[:12]}"


def stage_name(index: int, count: int) -> str:
    """The class of stage `index` of `count`."""
    if count == 1:
        return "only"
    return "first" if index == 0 else "last" if index == count - 1 else "middle"


def stage_of(state: Mapping[str, Any]) -> tuple[int, int] | None:
    """(index, count) of this rank's pipeline stage: of a stage or schedule in the state, else its place in a
    group that a device mesh made for a dimension called pp."""
    for value in state.values():
        stage = getattr(value, "_stage", value)
        index, count = getattr(stage, "stage_index", None), getattr(stage, "num_stages", None)
        if isinstance(index, int) and isinstance(count, int):
            return index, count
    for group in _groups():
        if group.size() > 1 and _PIPELINE.search(group.group_desc.removeprefix("mesh_")):
            return group.rank(), group.size()
    return None


def _groups() -> Iterator[Any]:
    yield from dist.distributed_c10d._world.pg_map


def _group_sizes() -> Iterator[int]:
    for group in _groups():
        yield group.size()


def _shapes(state: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...], str]]:
    for key, value in state.items():
        if not isinstance(value, nn.Module):
            continue
        for kind in (value.parameters(), value.buffers()):
            for tensor in kind:
                own = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                yield key, tuple(own.shape), str(own.dtype)


def agree(role_class: str, size: int) -> list[int]:
    """All ranks of the same class as this one; a collective of all ranks. Raises what a collective raises
    when a rank has failed."""
    width = 64
    told = role_class.encode("ascii")[:width].ljust(width, b"\0")
    mine = torch.frombuffer(bytearray(told), dtype=torch.uint8)
    everybody = [torch.empty(width, dtype=torch.uint8) for _ in range(size)]
    dist.all_gather(everybody, mine)
    return [rank for rank, theirs in enumerate(everybody) if torch.equal(theirs, mine)]
