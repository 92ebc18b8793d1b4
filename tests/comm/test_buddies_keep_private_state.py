"""What no replica has, every rank tells its buddy on the next node."""

from __future__ import annotations

from typing import Any

from gang import Member, gang

from tm_slurm.runtime.wards import KEPT, Wards


def tells_its_buddy(me: Member, steps: int, ranks_per_node: int) -> Any:
    size = me.join_world()
    wards = Wards(me.rank, size, ranks_per_node)
    for step in range(steps):
        wards.exchange(step, {"rank": me.rank, "step": step, "weight": "x" * (1000 * me.rank + step)})
        if step < steps - 1:
            wards.exchange_buffers(step, [me.rank, step])
    others = [wards.told(rank) for rank in range(size) if rank != wards.ward]
    return wards.buddy, wards.ward, wards.told(wards.ward), others


def test_the_buddy_knows_the_newest_steps_of_its_ward_alone() -> None:
    with gang() as members:
        world = members.world(tells_its_buddy, 4, 6, 2)
        for rank, member in enumerate(world):
            buddy, ward, told, others = member.result()
            assert (buddy, ward) == ((rank + 2) % 4, (rank - 2) % 4)  # on the other node
            assert [entry["step"] for entry in told] == [3, 4, 5] and len(told) == KEPT
            assert all(entry["private"]["rank"] == entry["rank"] == ward for entry in told)
            assert [entry["buffers"] for entry in told] == [[ward, 3], [ward, 4], None]
            assert not any(others)


def goes_back(me: Member) -> list[int]:
    wards = Wards(me.rank, me.join_world(), 1)
    for step in (0, 1, 2, 1, 2):
        wards.exchange(step, step)
    return wards.steps_of(wards.ward)


def test_what_was_told_before_a_roll_back_is_forgotten() -> None:
    with gang() as members:
        for member in members.world(goes_back, 2):
            assert member.result() == [0, 1, 2]
