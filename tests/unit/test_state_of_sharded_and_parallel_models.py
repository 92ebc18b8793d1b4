"""What FSDP2 and DistributedDataParallel make of a model is moved as this rank's part of it, in place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from state_examples import move
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tm_slurm.state import StateRefused, capture, digest

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def plain(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(16, 33), torch.nn.GELU(), torch.nn.Linear(33, 16))


def sharded(seed: int) -> torch.nn.Module:
    model = plain(seed)
    for part in (model[0], model[2], model):
        fully_shard(part)
    return model


def parallel(seed: int) -> torch.nn.Module:
    return DistributedDataParallel(plain(seed))


def stepped(model: torch.nn.Module, steps: int) -> dict[str, Any]:
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01)}
    for _ in range(steps):
        step(state, torch.randn(4, 16))
    return state


def step(state: dict[str, Any], data: torch.Tensor) -> None:
    state["optimizer"].zero_grad()
    state["model"](data).square().mean().backward()
    state["optimizer"].step()


@pytest.mark.parametrize("make", [sharded, parallel])
@pytest.mark.parametrize("shadow_steps", [0, 1])
def test_training_goes_on_bit_for_bit(make: Any, shadow_steps: int) -> None:
    leaver, joiner = stepped(make(1), 3), stepped(make(2), shadow_steps)
    before = {named.name: named.address for named in capture(joiner, 0).tensors}
    move(leaver, joiner)
    after = {named.name: named.address for named in capture(joiner, 0).tensors}
    assert digest(leaver) == digest(joiner)
    assert all(after[name] == address for name, address in before.items())
    data = torch.randn(4, 16)
    step(leaver, data), step(joiner, data)
    assert digest(leaver) == digest(joiner)


def test_the_moments_of_a_sharded_parameter_are_sharded_too() -> None:
    leaver, joiner = stepped(sharded(1), 1), stepped(sharded(2), 0)
    move(leaver, joiner)
    for parameter in joiner["model"].parameters():
        moment = joiner["optimizer"].state[parameter]["exp_avg"]
        assert type(moment) is type(parameter) and moment.placements == parameter.placements


def test_parameters_that_an_evaluation_left_gathered_are_shards_again() -> None:
    leaver, joiner = stepped(sharded(1), 1), stepped(sharded(2), 1)
    before = digest(leaver)
    with torch.no_grad():
        leaver["model"](torch.randn(4, 16))
    assert digest(leaver) == before
    with torch.no_grad():
        leaver["model"](torch.randn(4, 16))
        joiner["model"](torch.randn(4, 16))
    move(leaver, joiner)
    assert digest(joiner) == before


def test_names_do_not_depend_on_the_parallel_wrapper() -> None:
    leaver, joiner = stepped(parallel(1), 1), stepped(plain(2), 1)
    move(leaver, joiner)
    assert digest(leaver) == digest(joiner)


def test_a_sharded_model_does_not_go_into_a_plain_one() -> None:
    with pytest.raises(StateRefused, match=r"model/0\.weight: dtensor at the sender, a plain tensor here"):
        move(stepped(sharded(1), 0), stepped(plain(1), 0))
