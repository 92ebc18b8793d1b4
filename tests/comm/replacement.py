"""A training run undisturbed, and the same one with ranks replaced in the middle: for any kind of training.

A training is a class with `__init__(rank, size, joiner)`, `step(number)`, `warm_up(endpoint)` (a joiner's
shadow step), `modules` and `optimizers`.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from gang import Gang, Member, Process, gang
from torch import nn
from torch.distributed.tensor import DTensor

FIRST, LAST = 3, 6  # the replacement comes before step FIRST


def local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


class Training:
    """What is common to the trainings of the tests."""

    def __init__(self, rank: int, size: int, joiner: bool) -> None:
        torch.manual_seed(0)
        self.rank, self.size, self.joiner = rank, size, joiner
        self.modules: list[nn.Module] = []
        self.optimizers: list[Any] = []
        self.build()

    def build(self) -> None:
        raise NotImplementedError

    def step(self, step: int) -> None:
        raise NotImplementedError

    def warm_up(self, endpoint: Any) -> None:
        endpoint.sandbox = True
        self.step(0)
        endpoint.sandbox = False

    def data(self, step: int, replica: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * step + replica)
        return torch.randn(16, 64, generator=generator), torch.randn(16, 8, generator=generator)

    def tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        for m, module in enumerate(self.modules):
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                yield f"{m}.{name}", local(tensor)
            for o, optimizer in enumerate(self.optimizers):
                inner = getattr(
                    optimizer, "optim", optimizer
                )  # ZeRO keeps its shard in an optimizer of its own
                for name, parameter in module.named_parameters():
                    for key, value in inner.state.get(parameter, {}).items():
                        if isinstance(value, torch.Tensor):
                            yield f"{m}.{name}.{o}.{key}", local(value)

    def state(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.tensors()}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        mine = dict(self.tensors())
        assert mine.keys() == state.keys()
        with torch.no_grad():
            for name, tensor in mine.items():
                tensor.copy_(state[name])

    def digest(self) -> str:
        found = hashlib.sha256()
        for name, tensor in self.tensors():
            found.update(name.encode() + tensor.contiguous().numpy().tobytes())
        return found.hexdigest()


def run(training: Training, first: int, last: int) -> None:
    for step in range(first, last):
        training.step(step)


def groups() -> list[int]:
    return [id(group) for group in dist.distributed_c10d._world.pg_map]


def undisturbed(me: Member, kind: type[Training]) -> str:
    size = me.join_world()
    training = kind(me.rank, size, False)
    run(training, 0, LAST)
    return training.digest()


def member(me: Member, kind: type[Training], leavers: list[int]) -> tuple[str, bool]:
    """A stayer, or a leaver that hands its state over and exits at once."""
    size = me.join_world()
    training = kind(me.rank, size, False)
    run(training, 0, FIRST)
    before = groups()
    if me.rank in leavers:
        me.tell(training.state())
        me.hear()
        os._exit(0)
    me.endpoint.prepare(epoch=1, changes=me.hear())
    me.tell("prepared")
    assert me.endpoint.wait_staged(epoch=1, ranks=leavers, timeout_s=20)
    me.tell("staged")
    me.hear()
    me.endpoint.switch(epoch=1)
    me.tell("switched")
    run(training, FIRST, LAST)
    return training.digest(), groups() == before


def joiner(me: Member, kind: type[Training], linked: list[int]) -> tuple[str, bool]:
    size = me.join_world(epoch=1)
    training = kind(me.rank, size, True)
    training.warm_up(me.endpoint)
    me.endpoint.dial(epoch=1, ranks=linked, timeout_s=20)
    me.tell("dialled")
    training.load(me.hear())
    run(training, FIRST, LAST)
    return training.digest(), True


def prepare(
    members: Gang, world: list[Process], leavers: list[int], worker: Any, *args: Any
) -> tuple[list[Process], list[Process]]:
    """Start joiners for the leavers' ranks and prepare everybody for epoch 1; returns stayers and joiners."""
    stayers = [one for one in world if one.rank not in leavers]
    linked = [stayer.rank for stayer in stayers]
    joiners = [members.start(worker, rank, *args, linked, incarnation=1) for rank in leavers]
    table = members.table(stayers + joiners)
    changes = {one.rank: one.peer for one in joiners}
    for stayer in stayers:
        stayer.tell(changes)
    for one in joiners:
        one.tell(table)
    for stayer in stayers:
        assert stayer.hear() == "prepared"
    for one in joiners:
        assert one.hear() == "dialled"
    for stayer in stayers:
        assert stayer.hear() == "staged"
    return stayers, joiners


@functools.cache
def reference(kind: type[Training], size: int) -> list[str]:
    with gang() as members:
        return [one.result() for one in members.world(undisturbed, size, kind)]


def replaced(kind: type[Training], size: int, leavers: list[int], worker: Any = joiner) -> list[str]:
    """The digests of all ranks of a run whose leavers were replaced before step FIRST. `worker`: what a
    joiner does."""
    with gang() as members:
        world = members.world(member, size, kind, leavers)
        states = {rank: world[rank].hear() for rank in leavers}
        stayers, joiners = prepare(members, world, leavers, worker, kind)
        for one in joiners:
            one.tell(states[one.rank])
        for stayer in stayers:
            stayer.tell("switch")
        for stayer in stayers:
            assert stayer.hear() == "switched"
        for rank in leavers:
            world[rank].tell("exit")
        found = {one.rank: one.result() for one in stayers + joiners}
    assert all(same_groups for _, same_groups in found.values())
    return [found[rank][0] for rank in range(size)]
