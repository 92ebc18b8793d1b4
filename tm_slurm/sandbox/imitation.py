"""What a shadow iteration leaves in a role, without its computing: for a process that was warm for another
role of the same class (TrainMover §6) and is to take this one while a job waits.

Gradients of zero go through DDP, which so makes its buckets, and optimizers apply them and so get their
state. What that does to the state must be overwritten, as with every shadow iteration. Only where it is known
that nothing else comes with the first iteration: no compiled module, no other kind of parallelism, optimizers
of torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer

from tm_slurm.state import StateError, capture

Shape: TypeAlias = list[tuple[str, torch.Size, torch.dtype, torch.device, int]]
"""Of every tensor of a state: its name, what it is like, and which piece of memory it is."""


def shape_of(state: Mapping[str, Any]) -> Shape | None:
    """None for a state that cannot be moved."""
    try:
        named = capture(state, 0, generators=False).all_tensors()
    except StateError:
        return None
    return [(each.name, each.local.shape, each.local.dtype, each.local.device, at) for each, at in named]


def replicated(state: Mapping[str, Any]) -> Iterator[DistributedDataParallel]:
    """The modules of `state`, and parts of them, that are DistributedDataParallel."""
    for module in _of(state, nn.Module):
        yield from (part for part in module.modules() if isinstance(part, DistributedDataParallel))


def can_be_imitated(state: Mapping[str, Any]) -> bool:
    """Whether the first iteration does nothing else to this role."""
    return all(map(_is_plain, _of(state, nn.Module))) and all(map(_is_usual, _of(state, Optimizer)))


def _of(state: Mapping[str, Any], kind: type[Any]) -> Iterator[Any]:
    return (value for value in state.values() if isinstance(value, kind))


def _is_plain(module: nn.Module) -> bool:
    parts = list(module.modules())
    if any(hasattr(part, "_orig_mod") or part._compiled_call_impl is not None for part in parts):
        return False
    if any(type(parameter) is not nn.Parameter for parameter in module.parameters()):
        return False
    return not any(
        part.static_graph or part.find_unused_parameters or part.mixed_precision or part._comm_hooks
        for part in parts
        if isinstance(part, DistributedDataParallel)
    )


def _is_usual(optimizer: Optimizer) -> bool:
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim.") and not issubclass(kind, LBFGS)


def imitate(state: Mapping[str, Any]) -> None:
    """One iteration's gradients, all zero, and what is done with them."""
    for part in replicated(state):
        leaves = [parameter for parameter in part.parameters() if parameter.requires_grad]
        part.reducer.prepare_for_forward()
        part.reducer.prepare_for_backward([])
        torch.autograd.backward(leaves, [torch.zeros_like(leaf) for leaf in leaves])
    for optimizer in _of(state, Optimizer):
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()


def forget_imitation(state: Mapping[str, Any]) -> None:
    """It has left what a real iteration would not: state for parameters that get no gradients, say."""
    for optimizer in _of(state, Optimizer):
        optimizer.state.clear()
