"""A digest is equal exactly if the state is: the yardstick of "bit for bit"."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from state_examples import move, training

from tm_slurm.state import digest

torch.set_num_threads(1)


def weight(state: dict[str, Any]) -> torch.Tensor:
    return state["model"][0].weight.data


def flip(tensor: torch.Tensor, bit: int = 0) -> None:
    tensor.view(torch.int32).view(-1)[3] ^= 1 << bit


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "one bit of a weight": lambda state: flip(weight(state)),
    "one bit of a running mean": lambda state: flip(state["model"][1].running_mean),
    "one bit of an Adam moment": lambda state: flip(
        state["optimizer"].state[state["model"][4].bias]["exp_avg_sq"]
    ),
    "an optimizer's step": lambda state: state["optimizer"].state[state["model"][4].bias]["step"].add_(1),
    "a learning rate": lambda state: state["optimizer"].param_groups[0].update(lr=0.1),
    "a beta": lambda state: state["optimizer"].param_groups[0].update(betas=(0.9, 0.99900000001)),
    "a schedule's position": lambda state: setattr(state["schedule"], "last_epoch", 9),
    "a generator": lambda state: torch.rand(1, generator=state["noise"]),
    "a missing moment": lambda state: state["optimizer"].state.pop(state["model"][4].bias),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_small_change_changes_the_digest(change: Callable[[dict[str, Any]], Any]) -> None:
    state = training(1, 2)
    before = digest(state)
    assert digest(state) == before
    change(state)
    assert digest(state) != before


def test_signed_zeros_and_nan_payloads_differ() -> None:
    seen = set()
    for bits in (0, -(1 << 31), 0x7FC00000, 0x7FC00001):
        module = torch.nn.Module()
        module.register_buffer("x", torch.tensor([bits], dtype=torch.int32).view(torch.float32))
        seen.add(digest({"model": module}))
    assert len(seen) == 4


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(4), torch.zeros(4, dtype=torch.int32)),
        (torch.zeros(0), torch.zeros(0, 1)),
    ],
)
def test_shapes_and_dtypes_count(left: torch.Tensor, right: torch.Tensor) -> None:
    states = []
    for value in (left, right):
        module = torch.nn.Module()
        module.register_buffer("x", value)
        states.append({"model": module})
    assert digest(states[0]) != digest(states[1])


def test_memory_order_wrappers_modes_gradients_and_order_do_not_count() -> None:
    state = training(1, 2)
    before = digest(state)
    other = training(2, 2)
    other["model"][0].weight.data = torch.empty(24, 48).t()
    other = {key: other[key] for key in reversed(other)}
    move(state, other)
    assert other["model"][0].weight.stride() != state["model"][0].weight.stride()
    other["model"].eval()
    other["optimizer"].zero_grad()
    assert digest(other) == before


def test_step_and_global_generators_count_when_asked() -> None:
    state = training(1, 1)
    assert digest(state, 1) != digest(state, 2) != digest(state)
    plain, with_generators = digest(state), digest(state, generators=True)
    torch.rand(1)
    assert digest(state) == plain
    assert digest(state, generators=True) != with_generators


def test_another_process_finds_the_same_digest() -> None:
    program = "from state_examples import training; from tm_slurm.state import digest; import torch;"
    program += "torch.set_num_threads(1); print(digest(training(1, 2), 2))"
    found = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"PYTHONHASHSEED": "7", "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert found.stdout.strip() == digest(training(1, 2), 2)
    assert len(found.stdout.strip()) == 32
