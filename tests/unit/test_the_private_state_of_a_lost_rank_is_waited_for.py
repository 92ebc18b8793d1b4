"""An order to take a lost rank waits for the rank's private state, and not for ever."""

from __future__ import annotations

from tm_slurm.coordinator.actions import Tell
from tm_slurm.coordinator.wards import HELD_S, Wards

ORDER = Tell("n6", 0, {"kind": "replace", "epoch": 3, "rank": 1, "target": 7, "sources": [["n2", 1]]})


def ward(epoch: int, step: int) -> dict[str, object]:
    return {"kind": "ward", "epoch": epoch, "rank": 1, "step": step, "private": {"at": step}}


def test_it_goes_out_when_a_private_state_that_fits_has_come() -> None:
    wards = Wards()
    assert wards.with_ward(ORDER.message) is None
    wards.hold(ORDER, 10.0)
    for late in (ward(2, 7), ward(3, 8)):
        assert wards.take(late)
        assert wards.complete() == []
    wards.take(ward(3, 6))
    (order,) = wards.complete()
    assert (order.node, order.slot) == ("n6", 0) and order.message["private"] == {"at": 6}
    assert wards.complete() == [] and wards.overdue(1000.0) == []


def test_it_is_given_up_after_a_while() -> None:
    wards = Wards()
    wards.hold(ORDER, 10.0)
    assert wards.overdue(10.0 + HELD_S - 0.1) == []
    assert wards.overdue(10.0 + HELD_S + 0.1) == [ORDER]
    wards.take(ward(3, 6))
    assert wards.complete() == []
