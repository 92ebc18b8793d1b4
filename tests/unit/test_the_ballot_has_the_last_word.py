"""The trigger rank alone decides whether a cancellation comes before the vote."""

from __future__ import annotations

from tm_slurm.runtime.vote import Ballot


def test_an_armed_epoch_is_carried() -> None:
    ballot = Ballot()
    assert ballot.carry() == 0
    ballot.arm(1)
    assert ballot.carry() == 1


def test_an_epoch_can_be_taken_back_before_the_vote_only() -> None:
    ballot = Ballot()
    ballot.arm(1)
    assert ballot.withdraw(1) and ballot.carry() == 0
    ballot.arm(2)
    ballot.carry()
    assert not ballot.withdraw(2)


def test_a_repeated_order_does_not_carry_a_past_epoch_again() -> None:
    ballot = Ballot()
    ballot.arm(1)
    ballot.carry()
    ballot.arm(1)
    assert not ballot.withdraw(1)
