"""Of what the buddies of a lost rank hand in, its successor gets the newest that is of use."""

from __future__ import annotations

from typing import Any

import pytest

from tm_slurm.coordinator.wards import Wards


def ward(step: int, buffers: Any = None, epoch: int = 3) -> dict[str, Any]:
    return {"kind": "ward", "epoch": epoch, "rank": 1, "step": step, "private": [step], "buffers": buffers}


ORDER = {"kind": "replace", "rank": 1, "epoch": 3, "target": 7, "sources": []}


@pytest.mark.parametrize(
    ("told", "step", "buffers"),
    [
        ([ward(5), ward(6, "b"), ward(6)], 6, "b"),
        ([ward(6), ward(6, "b")], 6, "b"),
        ([ward(6, "b"), ward(7), ward(8)], 7, None),
        ([ward(9, epoch=2), ward(4)], 4, None),
    ],
)
def test_the_newest_up_to_the_step_with_its_buffers_if_anybody_has_them(
    told: list[dict[str, Any]], step: int, buffers: Any
) -> None:
    wards = Wards()
    assert all(wards.take(message) for message in told)
    found = wards.with_ward(ORDER)
    assert found is not None
    assert (found["private_step"], found["private"], found["private_buffers"]) == (step, [step], buffers)


@pytest.mark.parametrize("told", [[], [ward(8)], [ward(5, epoch=2)]])
def test_nothing_of_use_is_not_an_order(told: list[dict[str, Any]]) -> None:
    wards = Wards()
    for message in told:
        wards.take(message)
    assert wards.with_ward(ORDER) is None
