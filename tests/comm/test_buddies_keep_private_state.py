"""What no replica has, every rank tells its buddies on the next nodes."""

from __future__ import annotations

from typing import Any

import pytest
from gang import Member, gang

from tm_slurm.runtime.wards import KEPT, Wards


def tells_its_buddies(me: Member, steps: int, ranks_per_node: int) -> Any:
    size = me.join_world()
    wards = Wards(me.rank, size, ranks_per_node)
    for step in range(steps):
        wards.exchange(step, {"rank": me.rank, "step": step, "weight": "x" * (1000 * me.rank + step)})
        if step < steps - 1:
            wards.exchange_buffers(step, [me.rank, step])
    others = [wards.told(rank) for rank in range(size) if rank not in wards.wards]
    return wards.buddies, {ward: wards.told(ward) for ward in wards.wards}, others


@pytest.mark.parametrize(("size", "ranks_per_node", "away"), [(4, 2, [2]), (4, 1, [1, 2]), (3, 1, [1, 2])])
def test_the_buddies_know_the_newest_steps_of_their_wards_alone(
    size: int, ranks_per_node: int, away: list[int]
) -> None:
    with gang() as members:
        world = members.world(tells_its_buddies, size, 6, ranks_per_node)
        for rank, member in enumerate(world):
            buddies, told, others = member.result()
            assert buddies == [(rank + distance) % size for distance in away]  # on other nodes
            assert list(told) == [(rank - distance) % size for distance in away]
            for ward, entries in told.items():
                assert [entry["step"] for entry in entries] == [3, 4, 5] and len(entries) == KEPT
                assert all(entry["private"]["rank"] == entry["rank"] == ward for entry in entries)
                assert [entry["buffers"] for entry in entries] == [[ward, 3], [ward, 4], None]
            assert not any(others)


def goes_back(me: Member) -> list[int]:
    wards = Wards(me.rank, me.join_world(), 1)
    for step in (0, 1, 2, 1, 2):
        wards.exchange(step, step)
    return wards.steps_of(wards.wards[0])


def test_what_was_told_before_a_roll_back_is_forgotten() -> None:
    with gang() as members:
        for member in members.world(goes_back, 2):
            assert member.result() == [0, 1, 2]
