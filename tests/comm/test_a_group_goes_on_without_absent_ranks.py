"""Ranks may be absent for an epoch: groups keep their ranks and sizes; those present go on without them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from one_process import World, world
from torch.distributed import AllreduceOptions, BroadcastOptions, ReduceOp, ReduceOptions


def without(made: World, absent: set[int], epoch: int = 1) -> list[int]:
    """The present ranks, which have switched."""
    present = [rank for rank in made.ranks if rank not in absent]
    for rank in present:
        made.endpoints[rank].prepare(epoch=epoch, changes={}, absent=absent)
        made.endpoints[rank].switch(epoch=epoch)
    return present


def summed(made: World, ranks: list[int], elements: int) -> list[torch.Tensor]:
    tensors = {rank: torch.arange(elements, dtype=torch.float64) + rank for rank in ranks}
    for work in [made.backends[rank].allreduce([tensors[rank]], ReduceOp.SUM) for rank in ranks]:
        work.wait()
    return [tensors[rank] for rank in ranks]


@pytest.mark.parametrize("absent", [{0}, {2}, {1, 3}, {0, 1, 2}])
@pytest.mark.parametrize("elements", [3, 100_000])  # by doubling, in a ring
def test_all_reduce_goes_over_those_present(absent: set[int], elements: int) -> None:
    with world(4) as made:
        present = without(made, absent)
        expected = torch.arange(elements, dtype=torch.float64) * len(present) + sum(present)
        assert all(torch.equal(found, expected) for found in summed(made, present, elements))
        assert [of.size() for of in made.backends] == [4] * 4


def test_an_average_is_over_the_ranks_of_the_group() -> None:
    with world(4) as made:
        present = without(made, {3})
        tensors = {rank: torch.ones(2) for rank in present}
        options = AllreduceOptions()
        options.reduceOp = ReduceOp(ReduceOp.AVG)
        for work in [made.backends[rank].allreduce([tensors[rank]], options) for rank in present]:
            work.wait()
        assert all(torch.equal(found, torch.full((2,), 0.75)) for found in tensors.values())


@pytest.mark.parametrize(("absent", "root", "sender"), [({0}, 0, 1), ({1}, 3, 3), ({0, 1}, 1, 2)])
def test_the_lowest_rank_present_stands_in_for_an_absent_root(
    absent: set[int], root: int, sender: int
) -> None:
    with world(4) as made:
        present = without(made, absent)
        options = BroadcastOptions()
        options.rootRank = root
        tensors = {rank: torch.full((5,), float(rank)) for rank in present}
        for work in [made.backends[rank].broadcast([tensors[rank]], options) for rank in present]:
            work.wait()
        assert all(torch.equal(found, torch.full((5,), float(sender))) for found in tensors.values())


def test_reduce_and_barrier_go_over_those_present() -> None:
    with world(4) as made:
        present = without(made, {1})
        options = ReduceOptions()
        options.rootRank = 2
        tensors = {rank: torch.full((5,), float(rank)) for rank in present}
        for work in [made.backends[rank].reduce([tensors[rank]], options) for rank in present]:
            work.wait()
        assert torch.equal(tensors[2], torch.full((5,), 5.0))
        for work in [made.backends[rank].barrier() for rank in present]:
            work.wait()


def calls(of: Any) -> dict[str, Any]:
    one, many = torch.zeros(2), [torch.zeros(2) for _ in range(3)]
    return {
        "allgather": lambda: of.allgather([many], [one]),
        "allgather_into_tensor": lambda: of._allgather_base(torch.zeros(6), one),
        "reduce_scatter": lambda: of.reduce_scatter([one], [many]),
        "alltoall": lambda: of.alltoall(many, [torch.zeros(2) for _ in range(3)]),
        "gather": lambda: of.gather([many], [one]),
        "scatter": lambda: of.scatter([one], [many]),
        "send": lambda: of.send([one], 1, 0),
        "recv": lambda: of.recv([one], 1, 0),
    }


def test_what_needs_every_ranks_part_says_who_is_absent() -> None:
    with world(3) as made:
        without(made, {1})
        for name, call in calls(made.backends[0]).items():
            with pytest.raises(RuntimeError, match=f"{name}: .*rank 1 .*dropped"):
                call()


def test_a_rank_comes_back_at_a_later_epoch() -> None:
    with world(3) as made:
        without(made, {1})
        made.replace(1, 2)
        expected = torch.arange(3, dtype=torch.float64) * 3 + 3
        assert all(torch.equal(found, expected) for found in summed(made, made.ranks, 3))


def test_a_group_made_while_ranks_are_absent_goes_on_without_them_too() -> None:
    with world(3) as made:
        present = without(made, {0})
        late = {rank: made.group([0, 1, 2], "late")[rank] for rank in present}
        tensors = {rank: torch.ones(1) for rank in present}
        for work in [late[rank].allreduce([tensors[rank]], ReduceOp.SUM) for rank in present]:
            work.wait()
        assert all(float(found) == 2.0 for found in tensors.values())
