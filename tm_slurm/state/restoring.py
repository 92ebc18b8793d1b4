"""Making a rank's objects be what a tree and its tensors say, without replacing anything that is in use.

Parameters, buffers and optimizer state keep their storage, so DistributedDataParallel, compiled code and the
optimizer go on holding the right tensors. Gradients are not state: they are set to None, so that those of a
shadow step cannot leak into the first real one. A loop that accumulates gradients over micro-batches does so
inside one step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tm_slurm.state.entries import (
    GENERATOR,
    MODULE,
    OPTIMIZER,
    drop_gradients,
    inner_optimizer,
    plain_name,
    state_entries,
    unwrapped,
)
from tm_slurm.state.errors import StateError
from tm_slurm.state.generators import write_generator, write_generators
from tm_slurm.state.tree import Json, TensorSource, decode


@torch.no_grad()
def restore(
    state: Mapping[str, Any], tree: Mapping[str, Json], tensors: TensorSource, generators: Json = None
) -> None:
    """Applies `tree` (of `capture`) to the live objects of `state`; `tensors` answers the tensor of each
    number.

    Modules first, then optimizers (hyper-parameters patched in place, state that is not in the tree removed),
    then load_state_dict() of everything else, generators last. Raises StateError if an object refuses, or if
    the tree is not one that fits: the objects are then half restored and must be restored again from
    elsewhere.
    """
    try:
        _restore(state, tree, tensors, generators)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise StateError(f"the state's tree does not fit: {type(error).__name__}: {error}") from error


def _restore(
    state: Mapping[str, Any], tree: Mapping[str, Json], tensors: TensorSource, generators: Json
) -> None:
    def copies(position: int) -> torch.Tensor:
        return tensors(position).detach().clone()

    entries = list(state_entries(state))
    for key, kind, value in entries:
        if kind == MODULE:
            _restore_module(key, value, tree[key], copies)
        elif kind == OPTIMIZER:
            _restore_optimizer(key, value, tree[key], tensors)
    drop_gradients(state)
    for key, kind, value in entries:
        if kind not in (MODULE, OPTIMIZER, GENERATOR):
            content = decode(tree[key], path=f"{key}/", tensors=copies)
            try:
                value.load_state_dict(content)
            except Exception as error:  # whatever the user's object raises: the message must say whose it was
                raise StateError(
                    f"{key}: its load_state_dict() failed with {type(error).__name__}: {error}"
                ) from error
    for key, kind, value in entries:
        if kind == GENERATOR:
            write_generator(value, decode(tree[key], path=key), key)
    if generators is not None:
        write_generators(decode(generators, path="generators"))


def _restore_module(key: str, module: torch.nn.Module, tree: Json, tensors: TensorSource) -> None:
    content = decode({name: tree[name] for name in ("evaluating", "frozen")}, path=key)
    evaluating, frozen = set(content["evaluating"]), set(content["frozen"])
    root = unwrapped(module)
    for prefix, part in root.named_modules(remove_duplicate=False):
        path = plain_name(prefix)
        part.training = path not in evaluating
        if isinstance(getattr(part, "_orig_mod", None), torch.nn.Module):
            continue
        for name, parameter in part._parameters.items():
            if parameter is not None:
                learning = (f"{path}.{name}" if path else name) not in frozen
                if parameter.requires_grad != learning:
                    parameter.requires_grad_(learning)
        if path in tree["extra"]:
            part.set_extra_state(
                decode(tree["extra"][path], path=f"{key}/{path}.extra_state", tensors=tensors)
            )
    while module is not root:
        module.training = root.training
        module = module.module if hasattr(module, "module") else module._orig_mod  # type: ignore[assignment]


def _restore_optimizer(key: str, optimizer: torch.optim.Optimizer, tree: Json, tensors: TensorSource) -> None:
    groups = tree["groups"]
    sizes_there = [group["size"] for group in groups]
    sizes_here = [len(group["params"]) for group in optimizer.param_groups]
    if sizes_there != sizes_here:
        raise StateError(
            f"{key}: parameters per group are {sizes_there} at the sender, {sizes_here} here; build() "
            "must make the same optimizer"
        )
    for number, (group, live) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        rest = decode(group["rest"], path=f"{key}/groups.{number}", tensors=tensors)
        for name in [name for name in live if name != "params" and name not in rest]:
            del live[name]
        for name, value in rest.items():
            _patch(live, name, value)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    there: dict[Any, Any] = {}
    for number, values in tree["states"]:
        there[parameters[number]] = decode(values, path=f"{key}/state.{number}", tensors=tensors)
    for owner, values in tree["shared"]:
        there[decode(owner, path=f"{key}/state")] = decode(values, path=f"{key}/state", tensors=tensors)
    for owner in [owner for owner in optimizer.state if owner not in there]:
        del optimizer.state[owner]
    for owner, values in there.items():
        live_values = optimizer.state.get(owner)
        if not isinstance(live_values, dict) or not isinstance(values, dict):
            optimizer.state[owner] = values
            continue
        for name in [name for name in live_values if name not in values]:
            del live_values[name]
        for name, value in values.items():
            _patch(live_values, name, value)
    inner = inner_optimizer(optimizer)
    if (inner is None) != ("inner" not in tree):
        there_is, here_is = ("none", "one") if "inner" not in tree else ("one", "none")
        raise StateError(
            f"{key}: {there_is} that shares out the work (ZeRO) at the sender, {here_is} here; build() must "
            "make the same optimizer"
        )
    if inner is not None:
        _restore_optimizer(f"{key}/inner", inner, tree["inner"], tensors)


def _patch(live: dict[Any, Any], name: Any, value: Any) -> None:
    """Sets one value; a tensor that was received in place stays, and a float becomes the same float again."""
    if name not in live or live[name] is not value:
        live[name] = value
