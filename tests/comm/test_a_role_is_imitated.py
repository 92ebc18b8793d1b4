"""A process that was warm for one rank becomes another one of the same class without computing a step, and
goes on as that one: the same buckets as everybody has, the same optimizer state, the same bits."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gang import Member, gang
from replacement import FIRST, LAST, Training, reference, replaced, run
from test_a_recording_is_played_to_a_joiner import Replicated, StaticGraph, recorded
from test_frameworks_go_on_with_a_replaced_member import Sharded
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tm_slurm import comm
from tm_slurm.sandbox import Call, Recording, Sandbox, find, forget_groups, shape_of
from tm_slurm.sandbox.imitation import can_be_imitated, goes_on_as_it_began

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

SIZE = 3


class Frozen(Replicated):
    """One of its optimizer's parameters never gets a gradient."""

    def build(self) -> None:
        super().build()
        self.unused = nn.Parameter(torch.ones(5))
        self.optimizers[0].add_param_group({"params": [self.unused]})


def state_of(training: Training) -> dict[str, Any]:
    return {"model": training.ddp, "optimizer": training.optimizers[0]}


def joins(
    directory: Path, expected: bool, me: Member, kind: type[Training], linked: list[int]
) -> tuple[str, bool]:
    """Warm for rank 0 after two shadow steps, then what it has to be."""
    peers = me.hear()
    sandbox = Sandbox(me.endpoint)
    comm.register(me.endpoint)

    def become(rank: int) -> Training:
        me.endpoint.configure(rank=rank, epoch=1, term=1, peers=peers)
        dist.init_process_group("tm", store=dist.HashStore(), rank=rank, world_size=len(peers))
        return kind(rank, len(peers), True)

    sandbox.enter(find(directory, 0))
    training = become(0)
    for step in sandbox.shadow_steps(2):
        training.step(step)
    shape = shape_of(state_of(training))
    del training
    forget_groups()
    sandbox.enter(find(directory, me.rank))
    training = become(me.rank)
    assert shape is not None and sandbox.can_imitate(state_of(training))
    assert sandbox.imitate(state_of(training), shape) is expected
    if not expected:
        del training
        forget_groups()
        training = become(me.rank)
        for step in sandbox.shadow_steps(1):
            training.step(step)
        sandbox.rebuild_buckets(state_of(training))
    assert shape_of(state_of(training)) == shape
    assert sandbox.answers().missed == 0
    sandbox.leave()
    me.endpoint.dial(epoch=1, ranks=linked, timeout_s=20)
    me.tell("dialled")
    training.load(me.hear())
    run(training, FIRST, LAST)
    return training.digest(), True


@pytest.mark.parametrize(("kind", "imitated"), [(Replicated, True), (Frozen, False)])
def test_it_goes_on_as_if_it_had_been_there(kind: type[Training], imitated: bool, tmp_path: Path) -> None:
    directory = tmp_path / "recordings"
    with gang() as members:
        for one in members.world(recorded, SIZE, kind, directory):
            one.result()
    joined = functools.partial(joins, directory, imitated)
    assert replaced(kind, SIZE, [SIZE - 1], joined) == reference(kind, SIZE)


def called(step: int, name: str, *sizes: int, peer: int = -1) -> Call:
    return Call(step, name, 0, peer, -1, [torch.zeros(size) for size in sizes])


FIRST_STEP = [called(0, "tm:all_reduce", 5), called(0, "tm:all_reduce", 7), called(0, "tm:broadcast", 2)]
REBUILDS = [called(1, "tm:broadcast", 4), called(1, "tm:broadcast", 3)]
SECOND_STEP = [called(1, "tm:all_reduce", 12), called(1, "tm:broadcast", 2)]


def asks(me: Member) -> dict[str, bool]:
    me.join_world()
    model = nn.Linear(2, 2)
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    hooked = DistributedDataParallel(nn.Linear(2, 2))
    hooked.register_comm_hook(None, lambda _, bucket: bucket.buffer())
    states = {
        "plain": {"model": model, "optimizer": torch.optim.SGD(model.parameters())},
        "ddp": {"model": ddp, "optimizer": torch.optim.SGD(ddp.parameters())},
        "two": {"model": ddp, "other": DistributedDataParallel(nn.Linear(2, 2))},
        "stage": {"model": ddp, "schedule": SimpleNamespace(stage_index=0, num_stages=2)},
        "hook": {"model": hooked},
        "static": {"model": StaticGraph(0, 1, True).ddp},
        "compiled": {"model": DistributedDataParallel(torch.compile(model))},
        "sharded": {"model": Sharded(0, 1, True).modules[0]},
        "closure": {"model": ddp, "optimizer": torch.optim.LBFGS(model.parameters())},
    }
    recording = Recording("only", [0], {}, FIRST_STEP + REBUILDS + SECOND_STEP)
    return {name: can_be_imitated(state, recording) for name, state in states.items()}


def test_only_what_is_known_well_is_imitated() -> None:
    with gang() as members:
        found = members.world(asks, 1)[0].result()
    assert [name for name, can_be in found.items() if can_be] == ["ddp"]


@pytest.mark.parametrize(
    ("calls", "imitated"),
    [
        (FIRST_STEP + REBUILDS + SECOND_STEP, True),
        (FIRST_STEP + SECOND_STEP, False),  # rebuilt within a step, or never
        ([*FIRST_STEP, called(0, "tm:barrier"), *REBUILDS, *SECOND_STEP], False),
        ([*FIRST_STEP, called(0, "tm:all_reduce", 1), *REBUILDS, *SECOND_STEP], False),
        ([called(0, "tm:recv", 3, peer=1), *FIRST_STEP, *REBUILDS, *SECOND_STEP], False),
        ([*FIRST_STEP, *REBUILDS, *SECOND_STEP, called(1, "tm:all_gather", 2)], False),
    ],
)
def test_what_only_the_first_step_does_is_found_in_the_recording(calls: list[Call], imitated: bool) -> None:
    assert goes_on_as_it_began(Recording("only", [0], {}, calls)) is imitated
