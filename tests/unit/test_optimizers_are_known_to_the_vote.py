"""Whose step the vote is held for: optimizers of the state, with all that they use for it, and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tm_slurm.runtime.vote import Ballot, Vote


class Nested(torch.optim.Optimizer):
    """As ZeroRedundancyOptimizer: another one does the step."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})
        self.inner = torch.optim.SGD(parameters, lr=0.5)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        return self.inner.step(closure) if closure is not None else self.inner.step()


class Held(Vote):
    """A vote that everybody joins at once."""

    def __init__(self) -> None:
        super().__init__(Ballot())
        self.held = 0

    def hold(self, *, applying: bool = False) -> None:
        self.held += self.is_open
        self.is_open = False


@pytest.fixture
def model() -> nn.Linear:
    return nn.Linear(1, 1)


def of(state: dict[str, Any]) -> Held:
    vote = Held()
    vote.watch(state)
    vote.open()
    return vote


@pytest.mark.parametrize("with_closure", [False, True])
def test_what_an_optimizer_uses_for_its_step_is_its_own_affair(model: nn.Linear, with_closure: bool) -> None:
    optimizer = Nested(list(model.parameters()))
    vote = of({"model": model, "optimizer": optimizer})

    def closure() -> torch.Tensor:
        loss: torch.Tensor = model(torch.ones(1)).sum()
        loss.backward()
        return loss

    before = model.weight.item()
    if not with_closure:
        closure()
    optimizer.step(closure if with_closure else None)
    assert vote.held == 1 and model.weight.item() == before - 0.5


def test_another_one_is_not_let_through_by_that(model: nn.Linear) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    vote = of({"model": model, "optimizer": optimizer})
    optimizer.step(lambda: 0.0)
    vote.open()
    with pytest.raises(ValueError, match=r"that build\(\) has not returned"):
        torch.optim.SGD(model.parameters(), lr=0.5).step()


def test_an_argument_that_is_no_closure_stays_as_it_is(model: nn.Linear) -> None:
    class Scaled(torch.optim.SGD):
        def step(self, scale: float) -> float:  # type: ignore[override]
            return scale

    optimizer = Scaled(model.parameters(), lr=0.5)
    vote = of({"model": model, "optimizer": optimizer})
    assert optimizer.step(2.0) == 2.0 and vote.held == 1
