"""What of a rank's state no replica has: random generators, data position, running statistics, other objects.

Parameters and optimizer state of a dead rank can be taken from a data-parallel replica; these cannot. They
are small, so a rank tells them to the coordinator as it goes, and whoever takes its place begins from the
last told. Buffers that are not small are not told; then ranks are replicas only if they have the same in
them (`replica_key`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from tm_slurm.state.entries import GENERATOR, MODULE, OBJECT, state_entries
from tm_slurm.state.errors import StateError
from tm_slurm.state.generators import read_generator, read_generators, write_generator, write_generators
from tm_slurm.state.tree import Json, decode, encode

BUFFER_LIMIT_BYTES = 1 << 18
"""If modules have more bytes in buffers, these are not told, and are part of what makes ranks replicas."""


def private_buffers(state: Mapping[str, Any]) -> list[torch.Tensor]:
    """The modules' buffers, as far as they are small enough to be told: running statistics differ between
    ranks."""
    return told_of([b for _, kind, value in state_entries(state) if kind == MODULE for b in value.buffers()])


def told_of(buffers: list[torch.Tensor]) -> list[torch.Tensor]:
    """All of the modules' buffers, or none, if they are too large together."""
    return buffers if sum(b.numel() * b.itemsize for b in buffers) <= BUFFER_LIMIT_BYTES else []


def take_private(state: Mapping[str, Any]) -> Json:
    """JSON-safe. Raises StateError naming the path of anything that cannot be moved exactly. At the beginning
    of a step `Mark.private` has the same, and has read it already."""
    generators: dict[str, Any] = {}
    objects: dict[str, Any] = {}
    for key, kind, value in state_entries(state):
        if kind == GENERATOR:
            generators[key] = read_generator(value, key)
        elif kind == OBJECT:
            objects[key] = value.state_dict()
    return as_told(generators, objects, read_generators(), private_buffers(state))


def as_told(
    generators: Mapping[str, Any],
    objects: Mapping[str, Any],
    global_ones: Mapping[str, Any],
    buffers: list[torch.Tensor],
) -> Json:
    """What was read of a state, as it is told: by key, what generators and objects are; global generators;
    the buffers that are small enough."""
    read = {**generators, **objects}
    return {
        "entries": {key: encode(content, path=key) for key, content in read.items()},
        "objects": list(objects),
        "generators": encode(global_ones, path="generators"),
        "buffers": encode(buffers, path="buffers"),
    }


def global_generators() -> Json:
    """The states of the global generators, JSON-safe: equal as long as nobody draws."""
    return encode(read_generators(), path="generators")


def common_objects(private: Json, other: Json) -> list[str]:
    """The objects whose states are the same in two ranks' private states."""
    entries, theirs = private["entries"], other["entries"]
    return [key for key in private["objects"] if key in theirs and entries[key] == theirs[key]]


def take_buffers(state: Mapping[str, Any]) -> Json:
    """The modules' buffers alone, JSON-safe."""
    return encode(private_buffers(state), path="buffers")


@torch.no_grad()
def give_buffers(state: Mapping[str, Any], told: Json) -> None:
    """Make the modules' buffers what `take_buffers` saw elsewhere. StateError when it was another build's."""
    try:
        for buffer, content in zip(private_buffers(state), decode(told, path="buffers"), strict=True):
            buffer.copy_(content)
    except (TypeError, ValueError, RuntimeError) as error:
        raise StateError(f"the buffers are another build's: {error}") from None


@torch.no_grad()
def give_private(state: Mapping[str, Any], private: Json) -> None:
    """Make `state`'s generators, objects and buffers, and the global generators, what `take_private` saw
    elsewhere.

    Raises StateError when it was another build's."""
    try:
        entries = private["entries"]
        for key, kind, value in state_entries(state):
            if kind == GENERATOR:
                write_generator(value, decode(entries[key], path=key), key)
            elif kind == OBJECT:
                value.load_state_dict(copy.deepcopy(decode(entries[key], path=key)))
        give_buffers(state, private["buffers"])
        write_generators(decode(private["generators"], path="generators"))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise StateError(f"the private state is another build's: {error}") from None
