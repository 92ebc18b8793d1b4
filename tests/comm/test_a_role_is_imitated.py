"""A process that was warm for one rank becomes another one of the same class without computing a step, and
goes on as that one: the same buckets as everybody has, the same optimizer state, the same bits."""

from __future__ import annotations

import functools
from pathlib import Path
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
from tm_slurm.sandbox import Sandbox, find, forget_groups, shape_of
from tm_slurm.sandbox.imitation import can_be_imitated

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
        sandbox.enter(find(directory, rank))
        me.endpoint.configure(rank=rank, epoch=1, term=1, peers=peers)
        dist.init_process_group("tm", store=dist.HashStore(), rank=rank, world_size=len(peers))
        return kind(rank, len(peers), True)

    training = become(0)
    for step in sandbox.shadow_steps(2):
        training.step(step)
    shape = shape_of(state_of(training))
    del training
    forget_groups()
    training = become(me.rank)
    assert shape is not None
    imitated = sandbox.imitate(state_of(training), shape)
    assert imitated is expected
    if not imitated:
        for step in sandbox.shadow_steps(1):
            training.step(step)
    assert shape_of(state_of(training)) == shape
    assert not imitated or sandbox.answers().missed == 0
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


def asks(me: Member) -> dict[str, bool]:
    me.join_world()
    model = nn.Linear(2, 2)
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    hooked = DistributedDataParallel(nn.Linear(2, 2))
    hooked.register_comm_hook(None, lambda _, bucket: bucket.buffer())
    states = {
        "plain": {"model": model, "optimizer": torch.optim.SGD(model.parameters())},
        "ddp": {"model": ddp},
        "hook": {"model": hooked},
        "static": {"model": StaticGraph(0, 1, True).ddp},
        "compiled": {"model": torch.compile(model)},
        "sharded": {"model": Sharded(0, 1, True).modules[0]},
        "closure": {"optimizer": torch.optim.LBFGS(model.parameters())},
    }
    return {name: can_be_imitated(state) for name, state in states.items()}


def test_only_what_is_known_well_is_imitated() -> None:
    with gang() as members:
        found = members.world(asks, 1)[0].result()
    assert [name for name, can_be in found.items() if can_be] == ["plain", "ddp"]
