"""After a transfer a joiner has what the leaver had, bit for bit, in the storage that it already used."""

from __future__ import annotations

import collections
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from state_examples import connected, move, same, train, training

from tm_slurm.state import Receiver, Sender, StateError, capture, digest
from tm_slurm.state.generators import read_generators, write_generators

torch.set_num_threads(1)

OPTIMIZERS = {
    "adamw": torch.optim.AdamW,
    "adamw-tensor-lr": lambda parameters, lr: torch.optim.AdamW(
        parameters, lr=torch.tensor(lr), foreach=False
    ),
    "amsgrad": lambda parameters, lr: torch.optim.Adam(parameters, lr=lr, amsgrad=True),
    "sgd": torch.optim.SGD,
    "sgd-momentum": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9, nesterov=True),
    "adagrad": torch.optim.Adagrad,
    "rmsprop-centered": lambda parameters, lr: torch.optim.RMSprop(
        parameters, lr=lr, centered=True, momentum=0.5
    ),
}


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("shadow_steps", [0, 2])
def test_training_goes_on_as_if_nothing_had_happened(make_optimizer: Any, shadow_steps: int) -> None:
    leaver = training(1, 4, make_optimizer)
    joiner = training(2, shadow_steps, make_optimizer)
    _, report = move(leaver, joiner, step=4)
    assert report.step == 4
    assert digest(joiner) == digest(leaver)
    generators = read_generators()  # one process has one set of them: each side gets the same
    moved_on = [train(joiner) for _ in range(3)]
    write_generators(generators)
    stayed = [train(leaver) for _ in range(3)]
    assert moved_on == stayed
    assert digest(joiner) == digest(leaver)


def test_generators_travel_without_the_user_asking() -> None:
    source = {
        "mine": torch.Generator().manual_seed(5),
        "numpy": np.random.default_rng(5),
        "python": random.Random(5),
    }
    target = {"mine": torch.Generator(), "numpy": np.random.default_rng(), "python": random.Random()}

    def draw(state: dict[str, Any]) -> list[Any]:
        return [
            random.random(),
            random.gauss(0, 1),
            np.random.standard_normal(),
            torch.rand(1).item(),
            torch.rand(1, generator=state["mine"]).item(),
            state["numpy"].random(),
            state["python"].random(),
        ]

    random.gauss(0, 1)  # leaves half a pair behind, which is state too
    np.random.standard_normal()
    with connected() as (senders, receivers), ThreadPoolExecutor(1) as pool:
        snapshot = capture(source, 1)
        expected = draw(source)
        received = pool.submit(Receiver(receivers, target).receive, timeout_s=10)
        Sender(senders).send(snapshot, timeout_s=10)
        received.result(10)
    assert draw(target) == expected


def test_live_tensors_keep_their_storage() -> None:
    leaver, joiner = training(1, 3), training(2, 1)
    before = {named.name: (named.whole, named.address) for named, _ in capture(joiner, 0).all_tensors()}
    sent, report = move(leaver, joiner)
    after = {named.name: (named.whole, named.address) for named, _ in capture(joiner, 0).all_tensors()}
    assert after.keys() == before.keys()
    assert all(after[name][0] is before[name][0] and after[name][1] == before[name][1] for name in before)
    assert report.allocated_bytes == 0
    assert report.prepared and sent.prepared and report.acknowledged
    assert sent.bytes == report.bytes == capture(leaver, 0).nbytes


def test_optimizer_state_that_the_sender_has_not_is_removed() -> None:
    leaver, joiner = training(1, 0), training(2, 3)
    assert joiner["optimizer"].state
    move(leaver, joiner)
    assert not joiner["optimizer"].state
    assert digest(joiner) == digest(leaver)


def test_hyper_parameters_are_patched_in_place() -> None:
    leaver, joiner = training(1, 2), training(2, 1)
    leaver["optimizer"].param_groups[0].update(lr=0.125, betas=(0.5, 0.75), note=None)
    joiner["optimizer"].param_groups[0]["stale"] = 1
    group = joiner["optimizer"].param_groups[0]
    move(leaver, joiner)
    assert joiner["optimizer"].param_groups[0] is group
    assert group["lr"] == 0.125 and group["betas"] == (0.5, 0.75)
    assert "note" in group and "stale" not in group


def test_gradients_of_a_shadow_step_do_not_leak() -> None:
    leaver, joiner = training(1, 2), training(2, 1)
    assert any(parameter.grad is not None for parameter in joiner["model"].parameters())
    move(leaver, joiner)
    assert all(parameter.grad is None for parameter in joiner["model"].parameters())


def test_modes_and_frozen_parameters_travel() -> None:
    leaver, joiner = training(1, 1), training(2, 1)
    leaver["model"][1].eval()
    leaver["model"][0].weight.requires_grad_(False)
    joiner["model"][3].eval()
    move(leaver, joiner)
    assert [part.training for part in joiner["model"]] == [True, False, True, True, True]
    assert not joiner["model"][0].weight.requires_grad and joiner["model"][0].bias.requires_grad


class Odd(torch.nn.Module):
    """Tensors of every kind that a module can hold."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).mul(100).to(dtype)

        self.tied = torch.nn.Parameter(values(40, 30))
        self.also_tied = self.tied
        self.transposed = torch.nn.Parameter(values(300, 200).t())
        self.images = torch.nn.Parameter(values(2, 3, 4, 5).to(memory_format=torch.channels_last))
        self.sliced = torch.nn.Parameter(values(10, 10)[::2, 1:7])
        self.scalar = torch.nn.Parameter(values(1).reshape(()))
        self.nothing = torch.nn.Parameter(torch.empty(0, 7))
        self.one_wide = torch.nn.Parameter(values(5, 1, 6).transpose(0, 1))
        for dtype in (
            torch.bfloat16,
            torch.float16,
            torch.float64,
            torch.int64,
            torch.int8,
            torch.uint8,
            torch.bool,
        ):
            self.register_buffer(f"as_{dtype}".replace(".", "_"), values(3, 5, dtype=dtype))
        self.register_buffer("complex", torch.complex(values(4, 4), values(4, 4)))
        self.register_buffer("conjugated", torch.complex(values(4, 4), values(4, 4)).conj())
        self.register_buffer("unsigned", values(6).abs().to(torch.int32).view(torch.uint32))
        self.register_buffer("eighths", values(6).to(torch.float8_e4m3fn))
        self.register_buffer("expanded", values(5, 1).expand(5, 8))
        self.register_buffer("passing", values(3), persistent=False)
        self.register_buffer("absent", None)
        flat = values(64)
        self.register_buffer("flat", flat)
        self.register_buffer("head", flat[:16].view(4, 4))
        special = torch.tensor([0x7FC00001, 0xFFC12345, 0x80000000, 0x7F800000, 1], dtype=torch.int64)
        self.register_buffer(
            "special", special.to(torch.int32).view(torch.float32) if seed == 1 else torch.zeros(5)
        )


@pytest.mark.parametrize("connections", [1, 2, 3])
def test_odd_tensors_arrive(connections: int) -> None:
    leaver, joiner = {"odd": Odd(1)}, {"odd": Odd(2)}
    assert digest(leaver) != digest(joiner)
    sent, _ = move(leaver, joiner, connections=connections)
    assert digest(leaver) == digest(joiner)
    for name, value in leaver["odd"].state_dict(keep_vars=True).items():
        assert same(value, joiner["odd"].state_dict(keep_vars=True)[name]), name
    assert same(leaver["odd"].passing, joiner["odd"].passing)
    assert joiner["odd"].also_tied is joiner["odd"].tied
    assert sent.connections == connections


def test_tied_weights_are_sent_once() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(64, 32)
            self.head = torch.nn.Linear(32, 64, bias=False)
            self.head.weight = self.embedding.weight

    leaver, joiner = {"model": Tied()}, {"model": Tied()}
    sent, _ = move(leaver, joiner)
    assert sent.bytes == 64 * 32 * 4
    assert digest(leaver) == digest(joiner)
    joiner["model"].head.weight = torch.nn.Parameter(torch.zeros(64, 32))
    move(leaver, joiner)  # untied here: both are written
    assert same(joiner["model"].head.weight, leaver["model"].embedding.weight)
    with pytest.raises(StateError, match=r"embedding\.weight.*share memory here"):
        move({"model": joiner["model"]}, {"model": Tied()})


def test_other_memory_orders_are_converted() -> None:
    leaver = {"model": torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)}
    joiner = {"model": torch.nn.Conv2d(3, 8, 3)}
    strides = joiner["model"].weight.stride()
    move(leaver, joiner)
    assert joiner["model"].weight.stride() == strides
    assert same(leaver["model"].weight, joiner["model"].weight)


class Data:
    """A data source in the way of stateful loaders: its position is nested, and it has large arrays."""

    def __init__(self, seed: int) -> None:
        generator = np.random.default_rng(seed)
        self.content: dict[Any, Any] = {
            "order": generator.permutation(5000),
            "small": generator.random(3, dtype=np.float32),
            "positions": [(0, 3), (1, np.int64(2**60))],
            ("worker", 1): collections.OrderedDict(b=float("nan"), a=-0.0),
            "seen": torch.arange(seed),
            "raw": b"\0\xff",
            "big": 2**200,
        }

    def state_dict(self) -> dict[Any, Any]:
        return self.content

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        self.content = state


def test_any_object_with_a_state_dict_is_state() -> None:
    leaver, joiner = {"data": Data(1), "sizes": [1, 2]}, {"data": Data(2), "sizes": [3]}
    move(leaver, joiner)
    assert same(leaver["data"].content, joiner["data"].content)
    assert joiner["sizes"] == [3]
    leaver["data"].content["order"][0] += 1
    assert not np.array_equal(leaver["data"].content["order"], joiner["data"].content["order"])


class Counting(torch.nn.Module):
    """A module with extra state."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = (count, torch.full((3,), count))

    def get_extra_state(self) -> Any:
        return self.count

    def set_extra_state(self, state: Any) -> None:
        self.count = state


def test_extra_state_of_modules_travels() -> None:
    leaver = {"model": torch.nn.Sequential(torch.nn.Linear(2, 2), Counting(5))}
    joiner = {"model": torch.nn.Sequential(torch.nn.Linear(2, 2), Counting(1))}
    move(leaver, joiner)
    assert same(joiner["model"][1].count, (5, torch.full((3,), 5)))


def test_state_of_lists_in_an_optimizer_travels() -> None:
    def lbfgs(seed: int, steps: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        weight = torch.nn.Parameter(torch.randn(6))
        optimizer = torch.optim.LBFGS([weight], lr=0.1, max_iter=3)
        module = torch.nn.Module()
        module.weight = weight

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (weight - torch.arange(6)).pow(4).sum()
            loss.backward()
            return loss

        for _ in range(steps):
            optimizer.step(closure)
        return {"model": module, "optimizer": optimizer, "step": lambda: optimizer.step(closure)}

    leaver, joiner = lbfgs(1, 4), lbfgs(2, 1)
    move(leaver, joiner)
    assert digest(leaver) == digest(joiner)
    leaver["step"](), joiner["step"]()
    assert digest(leaver) == digest(joiner)


def test_a_compiled_or_parallel_wrapper_makes_no_difference() -> None:
    plain, compiled = training(1, 2), training(2, 2)
    compiled["model"] = torch.compile(compiled["model"], backend="eager")
    assert {named.name for named, _ in capture(plain, 0).all_tensors()} == {
        named.name for named, _ in capture(compiled, 0).all_tensors()
    }
    move(plain, compiled)
    assert digest(plain) == digest(compiled)
    inner = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    partly = torch.nn.Sequential(inner[0], torch.compile(inner[1], backend="eager"))
    assert digest({"model": inner}) == digest({"model": partly})


def test_a_layout_that_changed_after_preparation_is_agreed_on_again() -> None:
    leaver, joiner = training(1, 0), training(2, 0)
    with connected() as (senders, receivers), ThreadPoolExecutor(1) as pool:
        sender, receiver = Sender(senders), Receiver(receivers, joiner)
        ready = pool.submit(receiver.prepare, timeout_s=10)
        sender.prepare(capture(leaver, 0), timeout_s=10)
        ready.result(10)
        train(leaver)  # makes the optimizer's state
        train(joiner)
        with torch.no_grad():
            joiner["model"][0].weight.data = torch.zeros_like(joiner["model"][0].weight)  # other storage
        received = pool.submit(receiver.receive, timeout_s=10)
        sent = sender.send(capture(leaver, 1), timeout_s=10)
        assert not sent.prepared and not received.result(10).prepared
        assert digest(leaver) == digest(joiner)
        train(leaver)
        received = pool.submit(receiver.receive, timeout_s=10)  # and once more over the same connection
        assert sender.send(capture(leaver, 2), timeout_s=10).prepared
        assert received.result(10).step == 2
        assert digest(leaver) == digest(joiner)


def test_connections_may_be_accepted_in_any_order() -> None:
    leaver, joiner = {"model": torch.nn.Linear(700, 700)}, {"model": torch.nn.Linear(700, 700)}
    with connected(3) as (senders, receivers), ThreadPoolExecutor(1) as pool:
        shuffled = [receivers[2], receivers[0], receivers[1]]
        received = pool.submit(Receiver(shuffled, joiner).receive, timeout_s=10)
        Sender(senders).send(capture(leaver, 1), timeout_s=10)
        received.result(10)
        assert all(sock.gettimeout() is None for sock in senders)
    assert digest(leaver) == digest(joiner)


def test_the_order_of_entries_does_not_matter() -> None:
    leaver, joiner = training(1, 2), training(2, 2)
    reordered = {key: joiner[key] for key in ("noise", "schedule", "optimizer", "model")}
    move(leaver, reordered)
    assert digest(leaver) == digest(reordered)
