"""A loop that somebody else owns, taken one step at a time: a failure in the middle leaves a void step, and
no step is done twice or left out."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tm_slurm.comm import PeerLost
from tm_slurm.integrations.batches import StepBatches
from tm_slurm.integrations.framework_loop import FrameworkLoop, current_loop
from tm_slurm.runtime import Role
from tm_slurm.runtime.vote import Ballot, Vote

ROLE = Role(rank=0, world_size=1)


@pytest.fixture(autouse=True)
def what_torchrun_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is as before afterwards."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")


class Framework:
    """Twenty lines of a loop, with what frameworks have in theirs. `fails`: a place that fails once."""

    def __init__(self, fails: str | None = None, *, per_step: int = 1, with_closure: bool = False) -> None:
        self.fails = fails
        self.per_step = per_step
        self.with_closure = with_closure
        self.model = nn.Linear(1, 1, bias=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.seen: list[float] = []
        self.ended = self.unwound = False

    def fail(self, place: str) -> None:
        if self.fails == place:
            self.fails = None
            raise RuntimeError("backward has failed") from PeerLost("rank 1 is gone")

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.fail("forward")
        self.seen.append(float(batch.sum()))
        loss: torch.Tensor = self.model(batch).sum()
        loss.backward()
        return loss.detach()

    def fit(self, role: Role) -> None:
        loop = current_loop()
        torch.nn.init.zeros_(self.model.weight)
        data = TensorDataset(torch.arange(1.0, 9.0).reshape(8, 1))
        batches = StepBatches(data, role, batch_size=1, shuffle=False, per_step=self.per_step)
        loop.holds({"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule})
        loop.contain_optimizer(self.optimizer)
        loop.contain_schedule(self.schedule)
        forward = loop.contained(self.forward, otherwise=lambda: torch.zeros(()))
        try:
            for number, (batch,) in enumerate(batches, 1):
                if self.with_closure:
                    self.optimizer.step(lambda batch=batch: self.closure(forward, batch))  # type: ignore[misc]
                else:
                    forward(batch)
                    if number % self.per_step == 0:
                        self.optimizer.step()
                if number % self.per_step == 0:
                    self.schedule.step()
                    self.optimizer.zero_grad()
                    loop.report({"loss": number})
            self.ended = True
        finally:
            self.unwound = True

    def closure(self, forward: Any, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = forward(batch)
        return loss


def drive(framework: Framework, steps: Iterator[int] | range, *, vote: Any = None) -> FrameworkLoop:
    """As the runtime does: a failed step is done again."""
    loop = FrameworkLoop(framework.fit)
    state = loop.build(ROLE)
    watching = Vote(Ballot())
    watching.watch(state)
    if vote is not None:
        watching.hold = vote  # type: ignore[method-assign]
    for step in steps:
        while True:
            watching.open()
            watching.is_open = vote is not None
            try:
                loop.do(step)
                break
            except RuntimeError:
                framework.optimizer.zero_grad()
    return loop


@pytest.mark.parametrize(("per_step", "with_closure"), [(1, False), (2, False), (1, True)])
def test_a_step_that_fails_is_void_and_done_again(per_step: int, with_closure: bool) -> None:
    calm, struck = (
        Framework(fails, per_step=per_step, with_closure=with_closure) for fails in (None, "forward")
    )
    for framework in (calm, struck):
        drive(framework, range(4)).finish()
        assert framework.ended
    assert struck.seen == calm.seen
    assert struck.model.weight.item() == calm.model.weight.item()
    assert struck.schedule.last_epoch == calm.schedule.last_epoch == 4


def test_a_vote_that_fails_inside_the_optimizer_changes_nothing() -> None:
    framework, failed = Framework(), []

    def vote(*, applying: bool = False) -> None:
        if not failed:
            failed.append(framework.model.weight.item())
            raise PeerLost("rank 1 is gone")

    drive(framework, range(2), vote=vote).finish()
    calm = Framework()
    drive(calm, range(2)).finish()
    assert failed == [0.0] and framework.model.weight.item() == calm.model.weight.item()


def test_a_closure_is_computed_before_the_vote() -> None:
    framework, order = Framework(with_closure=True), []

    def vote(*, applying: bool = False) -> None:
        order.append(("vote", len(framework.seen), framework.model.weight.item()))

    drive(framework, range(1), vote=vote).finish()
    assert order == [("vote", 1, 0.0)] and framework.model.weight.item() != 0.0


def test_the_next_step_is_whichever_is_due() -> None:
    framework = Framework()
    drive(framework, iter([0, 1, 2, 1, 7, 8])).finish()
    assert framework.seen == [1.0, 2.0, 3.0, 2.0, 8.0, 1.0]


def test_a_role_that_is_no_more_is_unwound() -> None:
    framework = Framework()
    loop = drive(framework, range(2))
    loop.end()
    assert framework.unwound and not framework.ended


def test_a_mistake_of_the_user_s_ends_the_loop_with_it() -> None:
    class Broken(Framework):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            raise KeyError("no such column")

    loop = FrameworkLoop(Broken().fit)
    loop.build(ROLE)
    with pytest.raises(KeyError, match="no such column"):
        loop.do(0)


@pytest.mark.parametrize("in_sandbox", [False, True])
def test_in_the_sandbox_any_error_is_a_void_step(in_sandbox: bool) -> None:
    class Broken(Framework):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            raise KeyError("made up")

    framework = Broken()
    loop = FrameworkLoop(framework.fit)
    loop.in_sandbox = lambda: in_sandbox
    loop.build(ROLE)
    with pytest.raises(KeyError):
        loop.do(0)
    assert framework.unwound is not in_sandbox
    loop.end()


def test_a_fit_without_steps_is_told() -> None:
    with pytest.raises(ValueError, match=r"fit\(\) has returned without a step"):
        FrameworkLoop(lambda role: None).build(ROLE)


def test_too_few_samples_are_told() -> None:
    with pytest.raises(ValueError, match=r"expected at least 8 samples \(batch_size 4 on 2 ranks\), found 7"):
        StepBatches(TensorDataset(torch.zeros(7)), Role(rank=0, world_size=2), batch_size=4)


def test_ranks_and_epochs_see_different_batches_and_jumps_draw_nothing() -> None:
    data = TensorDataset(torch.arange(8))
    loop = FrameworkLoop(lambda role: None)

    def at(rank: int, number: int) -> list[int]:
        batches = StepBatches(data, Role(rank=rank, world_size=2), batch_size=2, seed=3)
        return [int(value) for value in batches._number(number)[0]]

    before = torch.get_rng_state()
    first = [at(rank, number) for number in range(2) for rank in range(2)]
    assert sorted(chain(*first)) == list(range(8))
    again = [at(rank, number) for number in range(2, 4) for rank in range(2)]
    assert sorted(chain(*again)) == list(range(8)) and again != first
    assert torch.equal(before, torch.get_rng_state()) and loop is not None


def test_what_the_rest_of_a_void_step_draws_is_taken_back() -> None:
    class Drawing(Framework):
        drawn: float

        def closure(self, forward: Any, batch: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = forward(batch)
            self.drawn = float(torch.rand(1))  # as a hook may, in the rest of a void step as well
            return loss

    before = torch.get_rng_state()
    framework = Drawing("forward", with_closure=True)
    loop = FrameworkLoop(framework.fit)
    loop.build(ROLE)
    loop.rewind = lambda: torch.set_rng_state(before)
    with pytest.raises(RuntimeError):
        loop.do(0)
    loop.do(0)
    torch.set_rng_state(before)
    assert framework.drawn == float(torch.rand(1))
    loop.end()


def test_a_trainer_that_ends_in_a_shadow_step_ends_the_standby() -> None:
    """Before it says that it is warm; what comes after is told as what it is."""

    class Strict(Framework):
        def fit(self, role: Role) -> None:
            loop = current_loop()
            loop.holds({"model": self.model})
            loop.begin_step()
            raise FloatingPointError("a callback has found NaN")

    loop = FrameworkLoop(Strict().fit)
    loop.in_sandbox = lambda: True
    loop.build(ROLE)
    with pytest.raises(SystemExit, match="ended in a shadow step"):
        loop.do(0)
    with pytest.raises(RuntimeError, match="was ended by what was raised in it before"):
        loop.do(0)
