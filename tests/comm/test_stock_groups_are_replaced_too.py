"""GroupStrategy: the same promise over a stock backend inside; gloo here, NCCL by the same code."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gang import Member, gang
from test_ddp_goes_on_with_a_replaced_member import Plain

from tm_slurm import comm
from tm_slurm.comm.group_strategy import GroupStrategy

FIRST, LAST = 3, 6


def join_world(me: Member, directory: str, size: int, epoch: int = 0) -> GroupStrategy:
    store = dist.FileStore(os.path.join(directory, "store"), -1)
    strategy = GroupStrategy(store=store, timeout_s=20)
    strategy.configure(epoch=epoch)
    strategy.register()
    dist.init_process_group(
        "tm_gloo", store=dist.HashStore(), rank=me.rank, world_size=size, timeout=timedelta(seconds=20)
    )
    return strategy


def trains(me: Member, directory: str, size: int, leaver: int | None) -> str:
    me.hear()
    strategy = join_world(me, directory, size)
    untouched = dist.new_group([0, 1])  # has no leaver
    training = Plain(me.rank, size, False)
    if leaver is None:
        for step in range(LAST):
            training.step(step)
        return training.digest()
    for step in range(FIRST):
        training.step(step)
    if me.rank == leaver:
        me.tell(training.state())
        me.hear()
        os._exit(0)
    group = dist.distributed_c10d._get_default_group()
    inner = [of._get_backend(torch.device("cpu")).inner() for of in (group, untouched)]
    strategy.prepare(epoch=1, changes=[leaver])
    for _ in range(3):  # phase 1 disturbs nothing
        dist.all_reduce(torch.ones(1000), group=untouched)
    me.tell("prepared")
    assert strategy.wait_staged(epoch=1, timeout_s=20)
    me.tell("staged")
    me.hear()
    start = time.perf_counter()
    strategy.switch(epoch=1)
    assert time.perf_counter() - start < 0.05
    now = [of._get_backend(torch.device("cpu")).inner() for of in (group, untouched)]
    assert now[0] is not inner[0]
    assert now[1] is inner[1]
    assert group is dist.distributed_c10d._get_default_group()
    for step in range(FIRST, LAST):
        training.step(step)
    return training.digest()


def joins(me: Member, directory: str, size: int) -> str:
    me.hear()
    strategy = join_world(me, directory, size, epoch=1)
    training = Plain(me.rank, size, True)
    training.warm_up(strategy)
    me.tell("joined")
    training.load(me.hear())
    for step in range(FIRST, LAST):
        training.step(step)
    return training.digest()


@pytest.fixture
def directory() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as made:
        yield made


def interrupted(me: Member, directory: str, size: int) -> float:
    me.hear()
    strategy = join_world(me, directory, size)
    dist.all_reduce(torch.ones(10))
    if me.rank == 2:
        me.tell("freeze me")
        threading.Event().wait(60)
    tensor = torch.full((1 << 20,), 5.0)
    works: list[Any] = [dist.all_reduce(tensor, async_op=True)]
    heard = torch.full((10,), 6.0)
    works.append(dist.irecv(heard, 2))
    me.tell("in flight")
    me.hear()
    start = time.perf_counter()
    waiters = [threading.Thread(target=_expect_interrupt, args=(work,)) for work in works]
    for waiter in waiters:
        waiter.start()
    strategy.interrupt(epoch=0)
    for waiter in waiters:
        waiter.join(5)
        assert not waiter.is_alive()
    delay = time.perf_counter() - start
    with pytest.raises(comm.GroupInterrupted):
        dist.all_reduce(torch.ones(1))
    me.tell("interrupted")
    me.hear()
    strategy.prepare(epoch=1, changes=[2])
    assert strategy.wait_staged(epoch=1, timeout_s=20)
    strategy.switch(epoch=1)
    total = torch.ones(1000)
    dist.all_reduce(total)
    assert torch.equal(total, torch.full((1000,), 3.0))
    # Whatever the abandoned group does now, the tensors of the step that was given up are not its any more.
    assert torch.equal(tensor, torch.full((1 << 20,), 5.0))
    assert torch.equal(heard, torch.full((10,), 6.0))
    me.tell("done")
    return delay


def _expect_interrupt(work: Any) -> None:
    with pytest.raises(comm.GroupInterrupted):
        work.wait()


def joins_after_interrupt(me: Member, directory: str, size: int) -> None:
    me.hear()
    join_world(me, directory, size, epoch=1)
    total = torch.ones(1000)
    dist.all_reduce(total)
    assert torch.equal(total, torch.full((1000,), 3.0))


def reference(directory: str) -> list[str]:
    with gang() as members:
        return [one.result() for one in members.world(trains, 3, directory, 3, None)]


def test_training_over_gloo_goes_on_with_a_replaced_member(directory: str) -> None:
    with tempfile.TemporaryDirectory() as other:
        expected = reference(other)
    with gang() as members:
        world = members.world(trains, 3, directory, 3, 2)
        state = world[2].hear()
        joiner = members.start(joins, 2, directory, 3, incarnation=1)
        members.table([joiner])
        joiner.tell("go")
        for stayer in world[:2]:
            assert stayer.hear() == "prepared"
        for stayer in world[:2]:
            assert stayer.hear() == "staged"
        assert joiner.hear() == "joined"
        for stayer in world[:2]:
            stayer.tell("switch")
        world[2].tell("exit")
        joiner.tell(state)
        assert [one.result() for one in [*world[:2], joiner]] == expected


def test_an_interrupt_frees_everybody_from_a_frozen_peer(directory: str) -> None:
    with gang() as members:
        world = members.world(interrupted, 3, directory, 3)
        assert world[2].hear() == "freeze me"
        world[2].freeze()
        for member in world[:2]:
            assert member.hear() == "in flight"
        for member in world[:2]:
            member.tell("interrupt")
        for member in world[:2]:
            assert member.hear() == "interrupted"
        joiner = members.start(joins_after_interrupt, 2, directory, 3, incarnation=1)
        members.table([joiner])
        joiner.tell("go")
        for member in world[:2]:
            member.tell("prepare")
        joiner.result()
        for member in world[:2]:
            assert member.hear() == "done"
        world[2].kill()
        assert max(member.result() for member in world[:2]) < 0.5


def alone(me: Member, directory: str) -> None:
    me.hear()
    strategy = join_world(me, directory, 1)
    with pytest.raises(RuntimeError, match="not after the current epoch 0"):
        strategy.prepare(epoch=0, changes=[0])
    assert not strategy.wait_staged(epoch=1, timeout_s=0)
    strategy.interrupt(epoch=0)
    with pytest.raises(RuntimeError, match=r"call prepare\(\)"):
        strategy.switch(epoch=1)
    strategy.prepare(epoch=1, changes=[])
    assert strategy.wait_staged(epoch=1, timeout_s=10)
    strategy.cancel(epoch=1)
    strategy.prepare(epoch=2, changes=[])
    assert strategy.wait_staged(epoch=2, timeout_s=10)
    strategy.switch(epoch=2)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.ones(3))


def test_calls_out_of_order_are_refused(directory: str) -> None:
    with gang() as members:
        members.world(alone, 1, directory)[0].result()
