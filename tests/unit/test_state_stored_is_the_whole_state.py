"""What is stored at a step boundary in host memory brings the rank back to that boundary, bit for bit."""

from __future__ import annotations

import importlib
import json
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from state_examples import train, training
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import tm_slurm.state
from tm_slurm.state import (
    StateError,
    capture,
    digest,
    pack,
    private_buffers,
    read_head,
    replica_key,
    unpack,
)
from tm_slurm.state.stored import Stored

torch.set_num_threads(1)

LIMIT = 1 << 30


def copy_through_bytes(stored: Stored, into: Stored | None = None) -> Stored:
    blocks = [bytes(block) for block in stored.blocks()]
    copy = read_head(stored.head(), max_bytes=LIMIT, into=into)
    for target, block in zip(copy.blocks(), blocks, strict=True):
        target[:] = block
    return copy


def test_every_public_name_is_there() -> None:
    for name in tm_slurm.state.__all__:
        found = getattr(importlib.import_module("tm_slurm.state"), name)
        assert found.__name__.removeprefix("tm_slurm.state.") == name
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = tm_slurm.state.no_such_name


OPTIMIZERS = [
    torch.optim.AdamW,
    torch.optim.SGD,
    lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
    lambda parameters, lr: torch.optim.Adam(parameters, lr=torch.tensor(lr), amsgrad=True),
    torch.optim.RAdam,
]


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS)
@pytest.mark.parametrize("shadow_steps", [0, 2])
@pytest.mark.parametrize("through_bytes", [False, True])
def test_training_goes_on_bit_for_bit(make_optimizer: Any, shadow_steps: int, through_bytes: bool) -> None:
    state = training(1, 3, make_optimizer)
    stored = pack(state, 3)
    losses = [train(state) for _ in range(3)]
    end = digest(state, generators=True)

    other = training(2, shadow_steps, make_optimizer)
    assert unpack(other, copy_through_bytes(stored) if through_bytes else stored) == 3
    assert [train(other) for _ in range(3)] == losses
    assert digest(other, generators=True) == end


def test_a_rank_rolls_itself_back_in_place() -> None:
    state = training(1, 2)
    stored = pack(state, 2)
    addresses = {named.name: named.address for named in capture(state, 0).tensors}
    losses = [train(state) for _ in range(4)]
    assert unpack(state, stored) == 2
    assert {named.name: named.address for named in capture(state, 0).tensors} == addresses
    assert [train(state) for _ in range(4)] == losses


def test_optimizer_state_that_was_not_there_yet_goes_away_again() -> None:
    state = training(1, 0)
    stored = pack(state, 0)
    loss = train(state)
    assert state["optimizer"].state
    assert unpack(state, stored) == 0
    assert not state["optimizer"].state
    assert train(state) == loss


def test_the_memory_is_used_again_and_nothing_is_allocated() -> None:
    state = training(1, 1)
    first = pack(state, 1)
    address, places = first.flat.data_ptr(), [place.data_ptr() for place in first.places]
    for step in range(2, 5):
        train(state)
        again = pack(state, step, into=first)
        assert again is first and again.step == step and again.flat.data_ptr() == address
        assert [place.data_ptr() for place in again.places] == places
        other = training(9, 1)
        assert unpack(other, again) == step and digest(other) == digest(state)
    assert copy_through_bytes(pack(state, 9), into=first) is first


def test_another_layout_gets_other_memory() -> None:
    first = pack(training(1, 1), 1)
    later = training(1, 1, torch.optim.SGD)
    second = pack(later, 2, into=first)
    assert second is not first and first.step == -1
    with pytest.raises(StateError, match="no state in this memory"):
        unpack(training(1, 1), first)
    other = training(2, 0, torch.optim.SGD)
    unpack(other, second)
    assert digest(other) == digest(later)


def test_what_fails_to_be_packed_leaves_no_half_state() -> None:
    class Stubborn:
        broken = False

        def state_dict(self) -> dict[str, Any]:
            if self.broken:
                raise ValueError("not now")
            return {"position": 1}

        def load_state_dict(self, content: dict[str, Any]) -> None:
            pass

    state = training(1, 1) | {"data": Stubborn()}
    stored = pack(state, 1)
    state["data"].broken = True
    with pytest.raises(StateError, match="not now"):
        pack(state, 2, into=stored)
    with pytest.raises(StateError, match="no state in this memory"):
        unpack(state, stored)


def test_tied_strided_and_odd_tensors_come_back() -> None:
    def build(value: float) -> dict[str, Any]:
        module = torch.nn.Module()
        module.a = torch.nn.Parameter(torch.full((5, 3), value))
        module.tied = module.a
        module.register_buffer("turned", torch.full((4, 7), value).t())
        module.register_buffer("spread", torch.full((1, 3), value).expand(4, 3))
        module.register_buffer("nothing", torch.empty(0, 3))
        module.register_buffer("one", torch.tensor(value, dtype=torch.float64))
        module.register_buffer("flags", torch.tensor([value > 1, True, False]))
        module.register_buffer("halves", torch.full((3,), value, dtype=torch.bfloat16))
        module.register_buffer("gaps", torch.full((8, 8), value)[::2, ::3])
        module.register_buffer("complex", torch.full((3,), complex(value, 2), dtype=torch.complex128))
        return {"module": module}

    source, target = build(1.5), build(0.25)
    stored = copy_through_bytes(pack(source, 1))
    unpack(target, stored)
    assert digest(source) == digest(target)
    assert target["module"].tied is target["module"].a


def test_objects_and_generators_come_back() -> None:
    class Data:
        def __init__(self) -> None:
            self.order = np.arange(5000)
            self.rng = np.random.default_rng(1)

        def state_dict(self) -> dict[str, Any]:
            return {"order": self.order, "rng": self.rng.bit_generator.state}

        def load_state_dict(self, content: dict[str, Any]) -> None:
            self.order, self.rng.bit_generator.state = content["order"], content["rng"]

    state = {"data": Data(), "noise": torch.Generator().manual_seed(3), "numpy": np.random.default_rng(4)}
    state["data"].rng.shuffle(state["data"].order)
    stored = copy_through_bytes(pack(state, 5))

    def draw() -> list[Any]:
        order = state["data"].order.tolist()
        drawn = [state["data"].rng.random(), torch.rand(2, generator=state["noise"]).tolist()]
        return [order, *drawn, state["numpy"].random(), torch.rand(2).tolist(), np.random.rand()]

    before = draw()
    state["data"].rng.shuffle(state["data"].order)
    assert draw() != before
    unpack(state, stored)
    assert draw() == before


def test_what_is_wrong_with_a_head_is_found_before_anything_is_allocated() -> None:
    stored = pack(training(1, 1), 1)
    head = stored.head()
    content = json.loads(head)
    with pytest.raises(StateError, match=f"{stored.nbytes} bytes, at most 100"):
        read_head(head, max_bytes=100)
    for change, what in [
        ({"version": 99}, "version 99"),
        ({"blob": stored.nbytes - 16}, "layout is not the one"),
        ({"fingerprint": "0" * 32}, "layout is not the one"),
        ({"step": -1}, "step or the tree"),
        ({"tree": []}, "step or the tree"),
        ({"shards": []}, "which part"),
        ({"layout": None}, "layout"),
    ]:
        with pytest.raises(StateError, match=what):
            read_head(json.dumps(content | change).encode(), max_bytes=LIMIT)
    huge = json.loads(head)
    huge["layout"]["pieces"][0][2] = [1 << 30, 1 << 10]
    with pytest.raises(StateError):
        read_head(json.dumps(huge).encode(), max_bytes=LIMIT)
    with pytest.raises(StateError, match="not JSON"):
        read_head(b"\x80\x04pickle", max_bytes=LIMIT)


def test_another_build_is_refused_and_nothing_is_changed() -> None:
    stored, other = pack(training(1, 1), 1), training(2, 1, width=20)
    before = digest(other, generators=True)
    with pytest.raises(StateError, match="build"):
        unpack(other, stored)
    assert digest(other, generators=True) == before


def test_a_copy_takes_about_as_long_as_the_bytes() -> None:
    parameters = [torch.nn.Parameter(torch.randn(1024, 1024)) for _ in range(24)]
    module = torch.nn.ParameterList(parameters)
    state = {"model": module}
    stored = pack(state, 0)
    target = torch.empty_like(stored.flat)
    ratios = []
    for step in range(7):
        began = time.perf_counter()
        target.copy_(stored.flat)
        plain_s = time.perf_counter() - began
        began = time.perf_counter()
        pack(state, step, into=stored)
        ratios.append((time.perf_counter() - began) / plain_s)
    assert statistics.median(ratios) < 2.0, ratios  # measured: 1.0


# ---- who is whose replica ----


def test_replicas_have_one_key_whatever_is_private_to_them() -> None:
    one, other = training(1, 2), training(1, 2)
    assert replica_key(one) == replica_key(other) == pack(one, 2).replica_key()
    with torch.no_grad():
        other["model"][1].running_mean.add_(1)
    other["noise"].manual_seed(99)
    torch.manual_seed(7)
    assert digest(one) != digest(other) and replica_key(one) == replica_key(other)
    copied = copy_through_bytes(pack(other, 2))
    assert copied.replica_key() == replica_key(one)


def test_ranks_that_differ_in_buffers_which_are_too_large_to_tell_are_no_replicas() -> None:
    one, other = ({"model": torch.nn.BatchNorm1d(40000)} for _ in range(2))
    assert not private_buffers(one) and replica_key(one) == replica_key(other)
    one["model"](torch.ones(2, 40000))
    assert replica_key(one) != replica_key(other)
    assert pack(one, 1).replica_key() == replica_key(one)


@pytest.mark.parametrize("part", ["weight", "moment", "rate"])
def test_one_bit_makes_another_key(part: str) -> None:
    one, other = training(1, 2), training(1, 2)
    parameter = other["model"][0].weight
    if part == "weight":
        parameter.data.view(torch.int32)[0, 0] ^= 1
    elif part == "moment":
        other["optimizer"].state[parameter]["exp_avg"].view(torch.int32)[0, 0] ^= 1
    else:
        other["optimizer"].param_groups[0]["lr"] *= 1.5
    assert replica_key(one) != replica_key(other)


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    dist.destroy_process_group()


def test_shards_differ_even_where_their_numbers_do_not(mesh: Any, monkeypatch: Any) -> None:
    def key(coordinate: tuple[int, int], placements: list[Any]) -> str:
        local = DTensor.from_local(torch.zeros(4, 4), mesh, placements, run_check=False)
        model = torch.nn.ParameterList([torch.nn.Parameter(local)])
        with monkeypatch.context() as patch:
            patch.setattr(type(mesh), "get_coordinate", lambda _: list(coordinate))
            state = {"model": model}
            assert pack(state, 1).replica_key() == replica_key(state)
            return replica_key(state)

    hybrid = [Replicate(), Shard(0)]
    assert key((0, 0), hybrid) != key((0, 1), hybrid)
    assert key((0, 0), hybrid) == key((1, 0), hybrid)
    assert key((0, 0), hybrid) != key((0, 0), [Replicate(), Shard(1)])
    assert len({key((a, b), [Shard(0), Shard(1)]) for a in (0, 1) for b in (0, 1)}) == 4
    assert len({key((a, b), [Replicate(), Replicate()]) for a in (0, 1) for b in (0, 1)}) == 1


def test_stages_of_a_pipeline_differ() -> None:
    def stage(name: str) -> str:
        torch.manual_seed(1)
        return replica_key({"model": torch.nn.ModuleDict({name: torch.nn.Linear(4, 4)})})

    assert stage("layer0") != stage("layer1")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_is_packed_into_pinned_memory_and_none_of_its_own_is_taken() -> None:
    def build(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Dropout(0.1)).cuda()
        state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
        for _ in range(2):
            step(state)
        return state

    def step(state: dict[str, Any]) -> None:
        state["model"](torch.randn(8, 512, device="cuda")).square().mean().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()

    state, other = build(1), build(2)
    stored = pack(state, 2)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    stored = pack(state, 2, into=stored)
    assert torch.cuda.memory_allocated() == before and stored.flat.is_pinned()
    step(state)
    end = digest(state, generators=True)
    assert unpack(other, stored) == 2
    step(other)
    assert digest(other, generators=True) == end
