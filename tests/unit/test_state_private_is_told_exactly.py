"""What no replica has arrives exactly: generators, data position, running statistics."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy
import pytest
import torch

from tm_slurm.state import StateError, digest, give_buffers, give_private, mark, take_buffers, take_private


class Position:
    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, content: dict[str, int]) -> None:
        self.at = content["at"]


def build() -> dict[str, Any]:
    return {"model": torch.nn.BatchNorm1d(4), "data": Position(), "noise": torch.Generator()}


def test_everything_private_is_the_same_afterwards_and_nothing_else() -> None:
    theirs, ours = build(), build()
    theirs["model"](torch.randn(8, 4))
    theirs["data"].at = 5
    torch.rand(3, generator=theirs["noise"])
    private = json.loads(json.dumps(take_private(theirs)))
    expected = (torch.rand(2), random.random(), numpy.random.rand(), torch.rand(2, generator=theirs["noise"]))
    with torch.no_grad():
        ours["model"].weight.fill_(3.0)
    give_private(ours, private)
    found = (torch.rand(2), random.random(), numpy.random.rand(), torch.rand(2, generator=ours["noise"]))
    assert (
        torch.equal(expected[0], found[0])
        and expected[1:3] == found[1:3]
        and torch.equal(expected[3], found[3])
    )
    assert ours["data"].at == 5 and torch.equal(ours["model"].running_mean, theirs["model"].running_mean)
    assert float(ours["model"].weight[0].detach()) == 3.0


def test_a_mark_tells_what_was_there_when_it_was_made() -> None:
    state = build()
    state["model"](torch.randn(8, 4))
    state["data"].at = 5
    made, private = mark(state), take_private(state)
    state["model"](torch.randn(8, 4))
    state["data"].at = 6
    assert made.private() == private != take_private(state) and made.tells_buffers
    assert not mark({"model": torch.nn.Linear(2, 2)}).tells_buffers


def test_another_builds_private_state_is_refused() -> None:
    with pytest.raises(StateError, match="another build"):
        give_private({"other": Position()}, take_private(build()))
    assert digest(build()) == digest(build())


def test_buffers_can_be_told_alone() -> None:
    ours = {"model": torch.nn.BatchNorm1d(4)}
    ours["model"](torch.randn(8, 4))
    theirs = {"model": torch.nn.BatchNorm1d(4)}
    give_buffers(theirs, json.loads(json.dumps(take_buffers(ours))))
    for mine, other in zip(ours["model"].buffers(), theirs["model"].buffers(), strict=True):
        assert torch.equal(mine, other)
    with pytest.raises(StateError, match="another build's"):
        give_buffers({"model": torch.nn.BatchNorm1d(5)}, take_buffers(ours))
