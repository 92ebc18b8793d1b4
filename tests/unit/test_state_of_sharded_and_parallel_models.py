"""What FSDP2 and DistributedDataParallel make of a model is moved as this rank's part of it, in place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from state_examples import move
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tm_slurm.state import StateRefused, capture, digest, mark, pack, replica_key, unpack

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


class Breaking(torch.nn.Module):
    """Breaks a step off, in the middle of a pass."""

    where = ""

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        if self.where == "forward":
            raise InterruptedError
        if self.where == "backward":
            data.register_hook(self._in_backward)
        return data

    def _in_backward(self, gradient: torch.Tensor) -> torch.Tensor:
        raise InterruptedError


@pytest.mark.parametrize("reshards", [True, False])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_that_was_broken_off_leaves_shards_and_is_done_again(where: str, reshards: bool) -> None:
    def training() -> tuple[dict[str, Any], Breaking]:
        breaking = Breaking()
        model = torch.nn.Sequential(torch.nn.Linear(16, 33), breaking, torch.nn.Linear(33, 16))
        model.load_state_dict(plain(1).state_dict(), strict=False)
        for part in (model[0], model):  # the rest is the root's own, gathered when the step breaks off
            fully_shard(part, reshard_after_forward=reshards)
        return stepped(model, 1), breaking

    torch.manual_seed(5)
    disturbed, breaking = training()
    torch.manual_seed(5)
    undisturbed, _ = training()
    data = torch.randn(4, 16)
    begun, before = mark(disturbed), digest(disturbed)
    breaking.where = where
    with pytest.raises(InterruptedError):
        step(disturbed, data)
    begun.rewind()
    assert digest(disturbed) == before
    assert all(type(each).__name__ == "DTensor" for each in parameters_of(disturbed))
    breaking.where = ""
    step(disturbed, data), step(undisturbed, data)
    assert digest(disturbed) == digest(undisturbed)


def parameters_of(state: dict[str, Any]) -> list[torch.Tensor]:
    return [each.data for each in state["model"].parameters()]


def test_names_do_not_depend_on_the_parallel_wrapper() -> None:
    leaver, joiner = stepped(parallel(1), 1), stepped(plain(2), 1)
    move(leaver, joiner)
    assert digest(leaver) == digest(joiner)


def test_a_sharded_model_does_not_go_into_a_plain_one() -> None:
    with pytest.raises(StateRefused, match=r"model/0\.weight: dtensor at the sender, a plain tensor here"):
        move(stepped(sharded(1), 0), stepped(plain(1), 0))


def zero(seed: int, steps: int, rank: int = 0, world_size: int = 1) -> dict[str, Any]:
    """A rank's part of a model whose optimizer state is spread over the ranks; the others only pretend."""
    if world_size > 1:
        dist.destroy_process_group()
        dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=world_size)
    model = plain(seed)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    state = {"model": model, "optimizer": optimizer}
    for number in range(steps):
        step(state, torch.full((4, 16), 0.1 + number))
    return state


@pytest.mark.parametrize("shadow_steps", [0, 1])
@pytest.mark.parametrize("way", ["moved", "stored"])
def test_the_state_of_a_shared_out_optimizer_comes_along(shadow_steps: int, way: str) -> None:
    leaver, joiner = zero(1, 3), zero(2, shadow_steps)
    leaver["optimizer"].param_groups[0]["lr"] = 0.02
    assert any("exp_avg" in named.name for named in capture(leaver, 0).tensors)
    if way == "moved":
        move(leaver, joiner)
    else:
        unpack(joiner, pack(leaver, 3))
    assert digest(leaver) == digest(joiner)
    data = torch.randn(4, 16)
    step(leaver, data), step(joiner, data)
    assert digest(leaver) == digest(joiner)


def test_parts_of_a_shared_out_optimizer_are_no_replicas() -> None:
    keys = [[replica_key(zero(1, steps, rank, 2)) for rank in (0, 1)] for steps in (0, 2)]
    assert keys[0][0] == keys[0][1]  # nothing has been shared out yet
    assert keys[1][0] != keys[1][1]


def test_a_shared_out_optimizer_does_not_go_into_a_plain_one() -> None:
    with pytest.raises(StateRefused, match=r"optimizer: one that shares out the work \(ZeRO\) at the sender"):
        move(zero(1, 0), stepped(plain(1), 0))
    with pytest.raises(
        StateRefused, match=r"optimizer: none that shares out the work \(ZeRO\) at the sender"
    ):
        move(stepped(plain(1), 0), zero(1, 0))
