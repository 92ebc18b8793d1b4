"""A step that failed before its vote can be done again, with the same random numbers and the same data."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest
import torch
from state_examples import training

from tm_slurm.state import StateError, capture, digest, mark

torch.set_num_threads(1)


class Position:
    def __init__(self) -> None:
        self.inside = {"at": [0]}

    def state_dict(self) -> dict[str, Any]:
        return self.inside  # the live dictionary, as careless objects do

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inside = state

    def take(self) -> int:
        self.inside["at"][0] += 1
        return self.inside["at"][0]


def gradients(state: dict[str, Any]) -> list[bytes]:
    """The first half of a step: all that draws random numbers and moves positions; no update."""
    data = torch.randn(8, 24, generator=state["noise"]) + torch.randn(8, 24) * state["data"].take()
    data = data * random.random() + float(np.random.random())
    state["model"](data).square().mean().backward()
    return [parameter.grad.numpy().tobytes() for parameter in state["model"].parameters()]


def test_a_rewound_step_gives_the_same_gradients_any_number_of_times() -> None:
    state = training(1, 2) | {"data": Position()}
    state["optimizer"].zero_grad()
    kept = mark(state)
    before = digest(state, generators=True)
    first = gradients(state)
    assert digest(state, generators=True) != before
    for _ in range(2):
        kept.rewind()
        assert digest(state, generators=True) == before
        assert all(parameter.grad is None for parameter in state["model"].parameters())
        assert gradients(state) == first


def test_a_mark_of_a_later_step_reuses_the_memory_of_the_former() -> None:
    state = training(1, 2) | {"data": Position()}
    first = mark(state)
    gradients(state)
    second = mark(state, first)
    before = digest(state, generators=True)
    assert [a.data_ptr() for a in second._kept] == [b.data_ptr() for b in first._kept]
    gradients(state)
    second.rewind()
    assert digest(state, generators=True) == before


def test_parameters_are_not_copied() -> None:
    state = {"model": torch.nn.Linear(1000, 1000)}
    kept = mark(state)
    assert kept._kept == []
    weight = state["model"].weight
    kept.rewind()
    assert state["model"].weight is weight


def test_an_object_that_cannot_go_back_is_named() -> None:
    state = {"data": Position()}
    kept = mark(state)
    state["data"].load_state_dict = None
    with pytest.raises(StateError, match="data: its load_state_dict"):
        kept.rewind()


def test_a_mark_is_cheap_enough_for_every_step() -> None:
    state = training(1, 1) | {"data": Position()}
    kept = mark(state)
    best = min(_seconds(lambda: mark(state, kept)) for _ in range(50))
    assert best < 2e-3  # measured: 0.1 ms
    assert capture(state, 0).step == 0


def _seconds(work: Any) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
