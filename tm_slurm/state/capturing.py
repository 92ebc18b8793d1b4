"""Naming everything that makes a rank what it is, without copying any of it (paper section 7)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch

from tm_slurm.state.collecting import no_garbage_collection
from tm_slurm.state.entries import (
    GENERATOR,
    MODULE,
    OBJECT,
    OPTIMIZER,
    inner_optimizer,
    plain_name,
    reshard,
    state_entries,
    unwrapped,
)
from tm_slurm.state.errors import StateError
from tm_slurm.state.generators import read_generator, read_generators
from tm_slurm.state.tensors import local_parts, same_memory_key
from tm_slurm.state.tree import Json, encode


@dataclass(slots=True)
class NamedTensor:
    """One tensor of the state: `local` is what this process holds of `whole` (itself, unless a DTensor)."""

    name: str
    local: torch.Tensor
    whole: torch.Tensor
    kind: str  # of the entry that it belongs to
    wrapper: str = ""  # "dtensor", another class, or "" for a plain tensor
    parameter: int = -1  # the number of a parameter, or of the one that optimizer state is for; else -1
    address: int = 0

    @property
    def nbytes(self) -> int:
        return self.local.numel() * self.local.itemsize


@dataclass(slots=True)
class Snapshot:
    """A rank's state at a step boundary. The tensors are the live ones: send or hash them before they change.

    `tensors` holds each piece of memory once; `aliases` are the further names of a piece (tied weights), with
    its position in `tensors`. `tree` is JSON-safe: per entry what is not a tensor, with `{"$tensor":
    position}` where one is.
    """

    step: int
    kinds: dict[str, str] = field(default_factory=dict)
    tensors: list[NamedTensor] = field(default_factory=list)
    aliases: list[tuple[NamedTensor, int]] = field(default_factory=list)
    tree: dict[str, Json] = field(default_factory=dict)
    generators: Json = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, each piece of memory counted once."""
        return sum(named.nbytes for named in self.tensors)

    def all_tensors(self) -> Iterator[tuple[NamedTensor, int]]:
        """Every name with its position in `tensors`, aliases last."""
        yield from ((named, position) for position, named in enumerate(self.tensors))
        yield from self.aliases


class _Naming:
    """Collects tensors, each piece of memory once."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.kind = OBJECT
        self._snapshot = snapshot
        self._names: set[str] = set()
        self._by_object: dict[int, int] = {}
        self._by_address: dict[int, list[int]] = {}

    def add(self, name: str, tensor: torch.Tensor, parameter: int = -1) -> int:
        """Names `tensor`; answers the position of its (first) piece."""
        first = -1
        for part_name, part, wrapper in local_parts(tensor, name):
            position = self._add_part(NamedTensor(part_name, part, tensor, self.kind, wrapper, parameter))
            first = position if first < 0 else first
        return first

    def _add_part(self, named: NamedTensor) -> int:
        base, count = named.name, 1
        while named.name in self._names:  # dots inside dictionary keys: the same on every rank
            count += 1
            named.name = f"{base}~{count}"
        self._names.add(named.name)
        named.address = named.local.data_ptr()
        known = self._position_of(named)
        if known is not None:
            self._snapshot.aliases.append((named, known))
            return known
        position = len(self._snapshot.tensors)
        self._snapshot.tensors.append(named)
        self._by_object[id(named.local)] = position
        self._by_address.setdefault(named.address, []).append(position)
        return position

    def _position_of(self, named: NamedTensor) -> int | None:
        local = named.local
        position = self._by_object.get(id(local))
        if position is not None:
            return position
        candidates = self._by_address.get(named.address)
        if not candidates or local.numel() == 0:
            return None
        key = same_memory_key(local)
        return next(
            (at for at in candidates if same_memory_key(self._snapshot.tensors[at].local) == key), None
        )


@no_garbage_collection()
@torch.no_grad()
def capture(state: Mapping[str, Any], step: int, *, generators: bool = True) -> Snapshot:
    """Names every tensor of `state` and encodes the rest; nothing is copied, gradients are not state.

    `step` is the number of steps done. With `generators` the global random generators are in it as well.
    Raises StateError naming the path of anything that cannot be moved exactly. Call it between steps.
    """
    snapshot = Snapshot(step)
    naming = _Naming(snapshot)
    for key, kind, value in state_entries(state):
        snapshot.kinds[key] = naming.kind = kind
        if kind == MODULE:
            reshard(value)
            snapshot.tree[key] = _capture_module(key, unwrapped(value), naming)
        elif kind == OPTIMIZER:
            snapshot.tree[key] = _capture_optimizer(key, value, naming)
        elif kind == GENERATOR:
            snapshot.tree[key] = encode(read_generator(value, key), path=key)
        else:
            snapshot.tree[key] = _capture_object(key, value, naming)
    if generators:
        snapshot.generators = encode(read_generators(), path="generators")
    return snapshot


def _capture_module(key: str, module: torch.nn.Module, naming: _Naming) -> Json:
    """Parameters and all buffers as tensors; in the tree what else a module carries of its own."""
    evaluating: list[str] = []
    frozen: list[str] = []
    extra: dict[str, Json] = {}
    numbers = count()
    for prefix, part in module.named_modules(remove_duplicate=False):
        if isinstance(getattr(part, "_orig_mod", None), torch.nn.Module):
            continue  # a compiled submodule shows its inside as `_orig_mod` too
        path = plain_name(prefix)
        dotted = f"{key}/{path}." if path else f"{key}/"
        for name, parameter in part._parameters.items():
            if parameter is not None:
                naming.add(dotted + name, parameter, next(numbers))
                if not parameter.requires_grad:
                    frozen.append(f"{path}.{name}" if path else name)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                naming.add(dotted + name, buffer)
        if not part.training:
            evaluating.append(path)
        if type(part).get_extra_state is not torch.nn.Module.get_extra_state:
            extra[path] = encode(part.get_extra_state(), path=f"{dotted}extra_state", tensors=naming.add)
    return {"evaluating": evaluating, "frozen": frozen, "extra": extra}


def _capture_optimizer(key: str, optimizer: torch.optim.Optimizer, naming: _Naming) -> Json:
    """State by the number of its parameter, as in `Optimizer.state_dict`; all groups' hyper-parameters.

    Of ZeRO's what it says itself, and in "inner" the optimizer that has this rank's part."""
    numbers: dict[int, int] = {}
    groups: list[Json] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            numbers[id(parameter)] = len(numbers)
        rest = {name: value for name, value in group.items() if name != "params"}
        groups.append(
            {
                "size": len(group["params"]),
                "rest": encode(rest, path=f"{key}/groups.{len(groups)}", tensors=naming.add),
            }
        )
    states: list[Json] = []
    shared: list[Json] = []
    for owner, values in optimizer.state.items():
        if not values:
            continue  # looked at, never stepped: the same as none
        if isinstance(owner, torch.Tensor):
            number = numbers.get(id(owner))
            if number is None:
                raise StateError(
                    f"{key}: it keeps state for a tensor that is in none of its param_groups; remove that "
                    "state"
                )

            def sink(path: str, tensor: torch.Tensor, parameter: int = number) -> int:
                return naming.add(path, tensor, parameter)

            states.append([number, encode(values, path=f"{key}/state.{number}", tensors=sink)])
        else:
            path = f"{key}/state.{owner!r}"
            shared.append([encode(owner, path=path), encode(values, path=path, tensors=naming.add)])
    tree = {"groups": groups, "states": states, "shared": shared}
    inner = inner_optimizer(optimizer)
    if inner is not None:
        tree["inner"] = _capture_optimizer(f"{key}/inner", inner, naming)
    return tree


def _capture_object(key: str, value: Any, naming: _Naming) -> Json:
    try:
        content = value.state_dict()
    except Exception as error:  # whatever the user's object raises: the message must say whose it was
        raise StateError(f"{key}: its state_dict() failed with {type(error).__name__}: {error}") from error
    return encode(content, path=f"{key}/", tensors=naming.add)
