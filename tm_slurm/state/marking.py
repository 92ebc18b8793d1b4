"""The start of a step, kept so that the step can be done again: what gradients change besides the gradients.

A step that fails before its vote has changed no parameter and no optimizer state, but it has drawn random
numbers, moved the data position and updated running statistics (buffers). Those are kept here, cheaply enough
for every step.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tm_slurm.state.entries import (
    GENERATOR,
    MODULE,
    OBJECT,
    drop_gradients,
    end_broken_passes,
    state_entries,
)
from tm_slurm.state.errors import StateError
from tm_slurm.state.generators import read_generator, read_generators, write_generator, write_generators
from tm_slurm.state.private import as_told, told_of
from tm_slurm.state.tree import Json


@dataclass
class Mark:
    """What `mark` kept. Valid until the next parameter update; it can be rewound any number of times."""

    _state: Mapping[str, Any]
    _globals: dict[str, Any]
    _generators: list[tuple[str, Any, Any]]
    _objects: list[tuple[str, Any, Any]]
    _buffers: list[torch.Tensor]
    _kept: list[torch.Tensor] = field(repr=False)

    @property
    def tells_buffers(self) -> bool:
        """Whether the modules' buffers, if there are any, are small enough to be told."""
        return bool(told_of(self._buffers))

    def private(self) -> Json:
        """What `take_private` would have found at the start of the step."""
        generators = {key: content for key, _, content in self._generators}
        objects = {key: content for key, _, content in self._objects}
        return as_told(generators, objects, self._globals, told_of(self._kept))

    def rewind(self) -> None:
        """Puts generators, data objects and buffers back to the start of the step, and drops the gradients.

        Gradients become None: a loop that accumulates them over micro-batches does so inside one step.
        Raises StateError if an object's load_state_dict() fails.
        """
        drop_gradients(self._state)  # of gathered parameters too, where the step was broken off
        for _, kind, value in state_entries(self._state):
            if kind == MODULE:
                end_broken_passes(value)  # on all ranks alike, or they would not gather together again
        drop_gradients(self._state)
        with torch.no_grad():
            if self._buffers:
                torch._foreach_copy_(self._buffers, self._kept)
        for key, value, content in self._objects:
            try:
                value.load_state_dict(copy.deepcopy(content))
            except Exception as error:  # whatever the user's object raises: the message must say whose it was
                raise StateError(
                    f"{key}: its load_state_dict() failed with {type(error).__name__}: {error}"
                ) from error
        for key, value, content in self._generators:
            write_generator(value, content, key)
        write_generators(self._globals)


def mark(state: Mapping[str, Any], previous: Mark | None = None) -> Mark:
    """Keeps the start of a step: generators, objects with a state_dict, and module buffers; not parameters or
    optimizers.

    `previous`, the mark of the step before, lends its memory for the buffers and is not valid any longer.
    Raises StateError if an object's state_dict() fails.
    """
    generators: list[tuple[str, Any, Any]] = []
    objects: list[tuple[str, Any, Any]] = []
    buffers: list[torch.Tensor] = []
    for key, kind, value in state_entries(state):
        if kind == MODULE:
            buffers.extend(value.buffers())
        elif kind == GENERATOR:
            generators.append((key, value, read_generator(value, key)))
        elif kind == OBJECT:
            try:
                objects.append((key, value, copy.deepcopy(value.state_dict())))
            except Exception as error:  # whatever the user's object raises: the message must say whose it was
                raise StateError(
                    f"{key}: its state_dict() failed with {type(error).__name__}: {error}"
                ) from error
    return Mark(state, read_generators(), generators, objects, buffers, _keep(buffers, previous))


@torch.no_grad()
def _keep(buffers: list[torch.Tensor], previous: Mark | None) -> list[torch.Tensor]:
    if not buffers:
        return []
    same = previous is not None and len(previous._buffers) == len(buffers)
    if same and previous is not None and all(a is b for a, b in zip(previous._buffers, buffers, strict=True)):
        kept = previous._kept
    else:
        kept = [torch.empty_like(buffer) for buffer in buffers]
    torch._foreach_copy_(kept, buffers)
    return kept
