"""Which entries of the user's mapping are state, and of what kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tm_slurm.state.errors import StateError
from tm_slurm.state.generators import GENERATOR_TYPES

MODULE, OPTIMIZER, GENERATOR, OBJECT = "module", "optimizer", "generator", "object"


def state_entries(state: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """(key, kind, value) of every entry that is state, in the mapping's order.

    State is a module, an optimizer, a generator, or anything else with state_dict() and load_state_dict();
    the other entries (numbers, functions, groups) are left alone.
    """
    for key, value in state.items():
        if isinstance(value, torch.nn.Module):
            kind = MODULE
        elif isinstance(value, Optimizer):
            kind = OPTIMIZER
        elif isinstance(value, GENERATOR_TYPES):
            kind = GENERATOR
        elif callable(getattr(value, "state_dict", None)) and callable(
            getattr(value, "load_state_dict", None)
        ):
            kind = OBJECT
        else:
            continue
        if not isinstance(key, str):
            raise StateError(f"state entry {key!r}: the names of state entries must be strings")
        yield key, kind, value


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The user's module inside DistributedDataParallel and torch.compile, however a rank wraps it."""
    while True:
        inner = (
            module.module
            if isinstance(module, DistributedDataParallel)
            else getattr(module, "_orig_mod", None)
        )
        if not isinstance(inner, torch.nn.Module):
            return module
        module = inner


def inner_optimizer(optimizer: Optimizer) -> Optimizer | None:
    """The optimizer of this rank's own part, if `optimizer` only shares out the work (ZeRO): the state is in
    there."""
    inner = getattr(optimizer, "optim", None)
    if isinstance(inner, Optimizer) and inner.state is not optimizer.state:
        return inner
    return None


def plain_name(name: str) -> str:
    """A parameter's or module's name without the marks of a compiled submodule."""
    return name.replace("_orig_mod.", "").replace("._orig_mod", "")


def reshard(module: torch.nn.Module) -> None:
    """Puts FSDP2 modules that a forward pass left gathered (an evaluation does) back to their shards.

    No collective: only the gathered copies are let go.
    """
    for part in _fsdp_modules(module):
        part.reshard()


def end_broken_passes(module: torch.nn.Module) -> None:
    """Puts FSDP2 modules that a step which was broken off has left in the middle of a forward or backward
    pass back to its beginning. Until then they do not take `reshard` for meant, and keep plain tensors in
    place of their shards. Gradients that were being reduced are lost. No collective."""
    for part in _fsdp_modules(module):
        state = part._get_fsdp_state()
        if state._is_root:
            for group in (group for each in state._state_ctx.all_states for group in each._fsdp_param_groups):
                group._all_gather_result = None  # it would be waited for, and has failed
            part.reset_iter_state()
    reshard(module)


def _fsdp_modules(module: torch.nn.Module) -> Iterator[Any]:
    for part in module.modules():
        if any(base.__name__ == "FSDPModule" for base in type(part).__mro__):
            yield part


def drop_gradients(state: Mapping[str, Any]) -> None:
    """Sets every gradient to None, as `zero_grad()` does. Gradients are not state (see `restore`)."""
    for _, kind, value in state_entries(state):
        if kind == MODULE:
            for parameter in value.parameters():
                parameter.grad = None
        elif kind == OPTIMIZER:
            for group in value.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
