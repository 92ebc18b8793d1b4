"""What a shadow iteration leaves in a role, without its computing: for a process that was warm for another
role of the same class (TrainMover §6) and is to take this one while a job waits.

Gradients of zero go through DDP, which so makes its buckets, and optimizers apply them and so get their
state. What that does to the state must be overwritten, as with every shadow iteration. Only where it is known
that nothing else comes with the first iteration: one DDP, no compiled module, no other kind of parallelism,
optimizers of torch; and the recording shows that the job's second step did what the first one had done.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer

from tm_slurm.sandbox.recording import Call, Recording
from tm_slurm.sandbox.role_class import stage_of
from tm_slurm.state import capture

BROADCAST, ALL_REDUCE = "tm:broadcast", "tm:all_reduce"
Lanes: TypeAlias = defaultdict[tuple[int, int], list[Call]]
"""(group, peer) → the calls there, in order."""

Shape: TypeAlias = list[tuple[str, torch.Size, torch.dtype, torch.device, int]]
"""Of every tensor of a state: its name, what it is like, and which piece of memory it is."""


def shape_of(state: Mapping[str, Any]) -> Shape | None:
    """None for a state that cannot be moved."""
    try:
        named = capture(state, 0, generators=False).all_tensors()
        return [(each.name, each.local.shape, each.local.dtype, each.local.device, at) for each, at in named]
    except Exception:  # what a user's state_dict() raises; whoever moves the state will hear of it
        return None


def replicated(state: Mapping[str, Any]) -> Iterator[DistributedDataParallel]:
    """The modules of `state`, and parts of them, that are DistributedDataParallel."""
    for module in _of(state, nn.Module):
        yield from (part for part in module.modules() if isinstance(part, DistributedDataParallel))


def can_be_imitated(state: Mapping[str, Any], recording: Recording) -> bool:
    """Whether the first iteration does nothing else to this role."""
    return (
        len(list(replicated(state))) == 1
        and stage_of(state) is None
        and all(map(_is_plain, _of(state, nn.Module)))
        and all(map(_is_usual, _of(state, Optimizer)))
        and goes_on_as_it_began(recording)
    )


def goes_on_as_it_began(recording: Recording) -> bool:
    """Whether the second recorded step has the calls of the first, and before them nothing but those in which
    DDP tells its new buckets. How many all-reduces there are depends on the buckets; how much they reduce
    does not."""
    first: Lanes = defaultdict(list)
    second: Lanes = defaultdict(list)
    for call in recording.calls:
        if call.step in (0, 1):
            (second if call.step else first)[call.group, call.peer].append(call)
    told = 0
    for lane in first.keys() | second.keys():
        before, after = first[lane], second[lane]
        if _about(before) == _about(after):
            continue
        if [call.name for call in after[:2]] != 2 * [BROADCAST] or _about(before) != _about(after[2:]):
            return False
        told += 1
    return told == 1


def _about(calls: list[Call]) -> tuple[list[tuple[str, list[Any]]], Counter[Any]]:
    """The calls with their shapes, in order, but for all-reduces; and how many elements these have."""
    others: list[tuple[str, list[Any]]] = []
    reduced: Counter[Any] = Counter()
    for call in calls:
        outputs = [None if each is None else (each.dtype, each.shape) for each in call.outputs]
        if call.name != ALL_REDUCE or None in outputs:
            others.append((call.name, outputs))
            continue
        for output in call.outputs:
            assert output is not None
            reduced[output.dtype] += output.numel()
    return others, reduced


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
