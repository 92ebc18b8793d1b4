"""A process that is to have another role keeps nothing of the one before; what somebody else holds of it is
freed as soon as that one lets go."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tm_slurm.sandbox import forget_role


@pytest.fixture(autouse=True)
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    gc.unfreeze()
    if dist.is_initialized():
        dist.destroy_process_group()


def role() -> dict[str, Any]:
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    model(torch.ones(1, 4)).sum().backward()
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "number": 7}


def test_nothing_is_left() -> None:
    state = held = role()
    model = weakref.ref(state["model"])
    frozen = gc.get_freeze_count()
    forget_role(state)
    assert held == {} and model() is None and not dist.is_initialized()
    assert gc.get_freeze_count() > frozen


def test_what_is_held_is_found_later() -> None:
    state = role()
    held = state["model"]
    model, frozen = weakref.ref(held), gc.get_freeze_count()
    forget_role(state)
    assert model() is held and gc.get_freeze_count() == frozen
    del held
    gc.collect()
    assert model() is None
