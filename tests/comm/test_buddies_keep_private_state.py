"""What no replica has, every rank tells its buddies on the next nodes."""

from __future__ import annotations

from typing import Any

import pytest
from gang import Member, gang

from tm_slurm.runtime.wards import KEPT, TOLD_LIMIT_BYTES, Wards


def tells_its_buddies(me: Member, steps: int, ranks_per_node: int) -> Any:
    size = me.join_world()
    wards = Wards(me.rank, size, ranks_per_node)
    for step in range(steps):
        wards.exchange(step, {"rank": me.rank, "step": step, "weight": "x" * (10_000 * me.rank + step)})
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


def tells_too_much(me: Member) -> tuple[list[int], list[int]]:
    wards = Wards(me.rank, me.join_world(), 1)
    large = "x" * TOLD_LIMIT_BYTES if me.rank == 1 else "x"
    for step in range(2):
        wards.exchange(step, large)
        wards.exchange_buffers(step, [step])
    steps = wards.steps_of(wards.wards[0])
    wards.exchange(2, "x")  # it has become smaller
    return steps, wards.steps_of(wards.wards[0])


def test_what_the_coordinator_could_not_pass_on_is_not_told() -> None:
    with gang() as members:
        one, other = (member.result() for member in members.world(tells_too_much, 2))
        assert one == ([], [2]), "rank 0 keeps what rank 1 tells"
        assert other == ([0, 1], [0, 1, 2])
