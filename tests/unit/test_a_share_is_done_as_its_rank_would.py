"""Inside an adopted share a survivor draws, counts and normalises as the absent rank would have; outside it
is itself."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch

import tm_slurm
from tm_slurm.runtime.sharing import Current, Shares
from tm_slurm.state import common_objects, take_private


class Position:
    """Where a rank is in its data."""

    def __init__(self, rank: int) -> None:
        self.state = {"rank": rank, "read": 0}

    def state_dict(self) -> dict[str, int]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = dict(state)


class Rank:
    """A rank as an undisturbed run has it, or a survivor with the shares of others."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(rank)
        random.seed(rank)
        numpy.random.seed(rank)
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Dropout(0.5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.rank = rank
        self.state: dict[str, Any] = {
            "model": model,
            "optimizer": optimizer,
            "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 2),
            "position": Position(rank),
            "own": torch.Generator().manual_seed(rank),
        }
        self.shares = Shares()
        self.shares.take_role(rank, self.state)
        self.generators = take_private(self.state)

    def work(self) -> list[float]:
        """What a share draws from everything that is a rank's own."""
        state = self.state
        state["position"].state["read"] += 1
        state["model"](torch.rand(4, 3))
        own = float(torch.rand((), generator=state["own"]))
        return [random.random(), float(numpy.random.rand()), float(torch.rand(())), own]

    def step(self) -> dict[int, list[float]]:
        """rank → what was drawn for it in a step."""
        drawn = {}
        self.shares.begin(watched=False)
        for share in self.shares.list():
            with share:
                drawn[share.rank] = self.work()
        self.state["optimizer"].step()
        self.state["schedule"].step()
        self.shares.commit()
        return drawn


def alone(rank: int, steps: int) -> tuple[list[list[float]], Any]:
    """What a rank draws in an undisturbed run, and its private state at the end."""
    undisturbed = Rank(rank)
    drawn = [undisturbed.step()[rank] for _ in range(steps)]
    return drawn, take_private(undisturbed.state)


def adopted_after(steps: int) -> tuple[Rank, list[list[float]]]:
    """Rank 0 with the share of rank 1, after so many steps of both; what it has drawn itself."""
    _, private = alone(1, steps)
    survivor = Rank(0)
    own = [survivor.step()[0] for _ in range(steps)]
    survivor.shares.adopt([], {1: {"private": private, "common": []}})
    return survivor, own


def test_both_ranks_draw_what_they_would_have_drawn() -> None:
    survivor, own = adopted_after(2)
    drawn = [survivor.step() for _ in range(3)]
    assert [step[1] for step in drawn] == alone(1, 5)[0][2:]
    survivor, own = adopted_after(2)
    drawn = [survivor.step() for _ in range(3)]
    assert own + [step[0] for step in drawn] == alone(0, 5)[0]


def test_the_private_state_that_is_handed_back_is_that_of_an_undisturbed_run() -> None:
    survivor, _ = adopted_after(2)
    for _ in range(3):
        survivor.step()
    kept = survivor.shares.at_the_beginning(1)
    expected = alone(1, 5)[1]
    assert kept["entries"] == expected["entries"] and kept["generators"] == expected["generators"]
    assert kept["entries"]["schedule"] != alone(1, 4)[1]["entries"]["schedule"]


def test_a_step_that_is_done_again_draws_the_same() -> None:
    survivor, _ = adopted_after(1)
    first = [
        step for share in survivor.shares.list() if share.rank == 1 for step in [entered(survivor, share)]
    ]
    survivor.shares.rewind()
    again = [
        step for share in survivor.shares.list() if share.rank == 1 for step in [entered(survivor, share)]
    ]
    assert first == again == [alone(1, 2)[0][1]]


def entered(survivor: Rank, share: tm_slurm.Share) -> list[float]:
    with share:
        return survivor.work()


def test_what_is_told_before_the_vote_is_completed_by_the_adopter() -> None:
    """Schedules are stepped after the optimizer: they were the same on both, and are what they are here."""
    lost = Rank(1)
    lost.work()
    at_vote = take_private(lost.state)
    survivor = Rank(0)
    survivor.work()
    common = common_objects(at_vote, take_private(survivor.state))
    assert common == ["schedule"]
    survivor.state["optimizer"].step()
    survivor.state["schedule"].step()
    survivor.shares.adopt([], {1: {"private": at_vote, "common": common}})
    assert survivor.shares.at_the_beginning(1)["entries"] == alone(1, 1)[1]["entries"]


def test_a_rank_that_others_do_from_now_on_is_handed_over_as_it_is() -> None:
    survivor, _ = adopted_after(2)
    given = survivor.shares.adopt([], {})
    assert given[1]["entries"] == alone(1, 2)[1]["entries"] and survivor.shares.adopted == []


def test_gradients_are_not_applied_inside_a_share() -> None:
    shares = Rank(0).shares
    with pytest.raises(RuntimeError, match="after the loop over"), next(shares.list()):
        shares.check_outside()
    shares.check_outside()


def test_a_step_whose_numbers_are_drawn_outside_cannot_be_shared() -> None:
    rank = Rank(0)
    for outside, expected in ((False, ""), (True, "outside the shares")):
        rank.shares.begin(watched=True)
        for share in rank.shares.list():
            with share:
                rank.work()
        if outside:
            random.random()
        assert expected in rank.shares.why_not_shared() and bool(rank.shares.why_not_shared()) is outside
    rank.shares.begin(watched=True)
    rank.work()
    assert "tm_slurm.shares()" in rank.shares.why_not_shared()


@pytest.fixture
def nobody_runs() -> Iterator[None]:
    before, Current.shares = Current.shares, None
    yield
    Current.shares = before


def test_outside_a_job_there_is_one_share(nobody_runs: None) -> None:
    assert [share.rank for share in tm_slurm.shares()] == [0]
