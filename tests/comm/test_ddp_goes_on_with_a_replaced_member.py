"""DDP with members replaced between steps, or killed within one, ends bit for bit as undisturbed."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Any, ClassVar

import pytest
import replacement
import torch
import torch.distributed as dist
from gang import Member, gang
from replacement import FIRST, LAST, Training, replaced, run
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from tm_slurm import comm


class Plain(Training):
    options: ClassVar[dict[str, Any]] = {}

    def build(self) -> None:
        model = nn.Sequential(
            nn.Linear(64, 256),
            nn.BatchNorm1d(256),
            nn.ReLU(),
            nn.Linear(256, 256),
            nn.ReLU(),
            nn.Linear(256, 8),
        )
        self.ddp = DistributedDataParallel(
            model, bucket_cap_mb=0.2, init_sync=not self.joiner, **self.options
        )
        self.modules = [model]
        self.optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3)]

    def step(self, step: int) -> None:
        inputs, targets = self.data(step, self.rank)
        self.optimizers[0].zero_grad(set_to_none=True)
        (self.ddp(inputs) - targets).square().mean().backward()
        self.optimizers[0].step()

    def warm_up(self, endpoint: Any) -> None:
        """Three shadow steps: by then DDP, static graph or not, has laid its buckets out as others have."""
        for _ in range(3):
            super().warm_up(endpoint)


class StaticGraph(Plain):
    options: ClassVar[dict[str, Any]] = {"static_graph": True}


class BucketView(Plain):
    options: ClassVar[dict[str, Any]] = {"gradient_as_bucket_view": True}


class Accumulating(Plain):
    def step(self, step: int) -> None:
        self.optimizers[0].zero_grad(set_to_none=True)
        for part in range(3):
            inputs, targets = self.data(step * 10 + part, self.rank)
            with self.ddp.no_sync() if part < 2 else contextlib.nullcontext():
                (self.ddp(inputs) - targets).square().mean().backward()
        self.optimizers[0].step()


class CompressedHook(Plain):
    def build(self) -> None:
        super().build()
        self.ddp.register_comm_hook(None, fp16_compress_hook)


def python_hook(state, bucket):  # DDP compares annotations as objects: none here
    """A hook that waits for another collective in its callback."""
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()

    def divided(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        count = torch.ones(1)
        dist.all_reduce(count, group=state)
        return done.value()[0].div_(count.item())

    return future.then(divided)


class PythonHook(Plain):
    def build(self) -> None:
        super().build()
        self.ddp.register_comm_hook(dist.new_group(), python_hook)


@pytest.mark.parametrize(("size", "leavers"), [(3, [1]), (3, [0]), (4, [0, 2])])
def test_planned_replacement_changes_no_bit(size: int, leavers: list[int]) -> None:
    assert replaced(Plain, size, leavers) == replacement.reference(Plain, size)


@pytest.mark.parametrize("kind", [StaticGraph, BucketView, Accumulating, CompressedHook, PythonHook])
def test_with_ddps_options(kind: type[Plain]) -> None:
    assert replaced(kind, 3, [2]) == replacement.reference(kind, 3)


def dies_in_backward(me: Member, victim: int) -> tuple[str, str]:
    size = me.join_world()
    training = Plain(me.rank, size, False)
    run(training, 0, FIRST)
    if me.rank == 0:
        me.tell(training.state())
    if me.rank == victim:
        next(iter(training.modules[0].parameters())).register_hook(lambda _: os._exit(1))
        training.step(FIRST)
    kept = training.state()
    # Not everybody talks to the dead one: who does not waits until told so, as by the coordinator.
    told = threading.Thread(target=lambda: me.endpoint.interrupt(epoch=me.hear()))
    told.start()
    try:
        training.step(FIRST)
        raised = "nothing"
    except (comm.PeerLost, comm.GroupInterrupted) as error:
        raised = type(error).__name__
    told.join()
    training.load(kept)  # batch norm has counted the lost step
    me.endpoint.prepare(epoch=1, changes=me.hear())
    me.tell("prepared")
    assert me.endpoint.wait_staged(epoch=1, ranks=[victim], timeout_s=20)
    me.tell("staged")
    me.endpoint.switch(epoch=1)
    run(training, FIRST, LAST)
    return training.digest(), raised


def test_a_member_that_dies_in_backward_is_replaced_and_the_step_redone() -> None:
    size, victim = 3, 2
    with gang() as members:
        world = members.world(dies_in_backward, size, victim)
        state = world[0].hear()
        world[victim].process.join(20)
        for survivor in world[:2]:
            survivor.tell(0)
        stayers, joiners = replacement.prepare(members, world, [victim], replacement.joiner, Plain)
        joiners[0].tell(state)
        results = [one.result() for one in stayers]
        digests = [digest for digest, _ in results] + [joiners[0].result()[0]]
    assert digests == replacement.reference(Plain, size)
    assert {raised for _, raised in results} <= {"PeerLost", "GroupInterrupted"}
