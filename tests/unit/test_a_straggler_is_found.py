"""A rank that is slower than its replicas is found from what ranks say of their own work, within few steps,
and nobody else is, however restless the machine."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from decisions_world import World

from tm_slurm.config.model import ImpossibleValue, PolicyConfig
from tm_slurm.coordinator.stragglers import KEPT_STEPS, UNSETTLED, Straggler, Stragglers

SLOWER, STEPS = 0.1, 20


def watched(groups: list[set[int]]) -> Stragglers:
    return Stragglers(
        slower=SLOWER, steps=STEPS, replicas=lambda rank: next((g for g in groups if rank in g), set())
    )


def play(
    stragglers: Stragglers, ranks: int, steps: range, seconds: Callable[[int, int], float]
) -> Straggler | None:
    """Every rank tells of every step; what is found first."""
    for step in steps:
        for rank in range(ranks):
            found = stragglers.worked(rank, step, seconds(rank, step))
            if found is not None:
                return found
    return None


def test_a_rank_that_is_slow_by_a_fifth_is_found_within_few_steps() -> None:
    chance = random.Random(3)
    stragglers = watched([{0, 1, 2, 3}])

    def seconds(rank: int, step: int) -> float:
        slow = 1.25 if rank == 2 and step >= 100 else 1.0
        return slow * chance.uniform(0.95, 1.05)

    found = play(stragglers, 4, range(400), seconds)
    assert found is not None and found.rank == 2 and found.ratio == pytest.approx(1.25, rel=0.05)
    assert 100 + STEPS - 2 <= found.step <= 100 + STEPS + 2


@pytest.mark.parametrize(("slower", "steps"), [(3.0, 20), (1.2, 20), (1.15, 39), (1.12, 95), (1.1, None)])
def test_the_slower_the_sooner_but_no_sooner_than_after_so_many_steps(
    slower: float, steps: int | None
) -> None:
    found = play(watched([{0, 1}]), 2, range(1000), lambda rank, step: slower if rank == 1 else 1.0)
    assert (found.step + 1 if found is not None else None) == steps


def test_good_steps_take_from_what_bad_ones_have_shown() -> None:
    """One that is slow in every second step is as often not slow."""
    slow_now_and_then = lambda rank, step: 3.0 if rank == 1 and step % 2 else 1.0  # noqa: E731
    assert play(watched([{0, 1}]), 2, range(1000), slow_now_and_then) is None
    mostly_slow = lambda rank, step: 3.0 if rank == 1 and step % 4 else 1.0  # noqa: E731
    assert play(watched([{0, 1}]), 2, range(1000), mostly_slow) is not None


@pytest.mark.parametrize("seed", range(5))
def test_nobody_is_called_slow_in_a_thousand_restless_steps(seed: int) -> None:
    """Now and then one is held up for a few steps, and one is always 5 % slower."""
    chance = random.Random(seed)
    held = {rank: 0 for rank in range(8)}

    def seconds(rank: int, step: int) -> float:
        if chance.random() < 0.01:
            held[rank] = chance.randrange(1, 8)
        held[rank] -= held[rank] > 0
        return (1.05 if rank == 5 else 1.0) * (2.0 if held[rank] else 1.0) * chance.lognormvariate(0, 0.05)

    assert play(watched([set(range(8))]), 8, range(1000), seconds) is None


def test_ranks_are_compared_with_their_replicas_alone() -> None:
    """The last stage of a pipeline has more to do than the first, and is not slow."""
    assert play(watched([{0, 1}, {2, 3}]), 4, range(100), lambda rank, step: 2.0 if rank > 1 else 1.0) is None
    slow = play(watched([{0, 1}, {2, 3}]), 4, range(100), lambda rank, step: 1.3 if rank == 3 else 1.0)
    assert slow is not None and slow.rank == 3
    assert play(watched([{0}, {1}]), 2, range(100), lambda rank, step: 1.0 + rank) is None


def test_an_interruption_explains_slow_steps() -> None:
    stragglers = watched([{0, 1}])
    assert play(stragglers, 2, range(STEPS - 1), lambda rank, step: 1.0 + rank) is None
    stragglers.disturbed()
    later = range(STEPS, STEPS + UNSETTLED + STEPS - 2)
    assert play(stragglers, 2, later, lambda rank, step: 1.0 + rank) is None
    assert play(stragglers, 2, range(later.stop, later.stop + 2), lambda rank, step: 1.0 + rank) is not None


def test_a_rank_that_does_not_tell_holds_nothing_up() -> None:
    stragglers = watched([{0, 1, 2}])
    for step in range(1000):
        stragglers.worked(0, step, 1.0)
        stragglers.worked(1, step, 1.0)
    assert len(stragglers._told) <= KEPT_STEPS


def test_ranks_that_report_at_different_times_are_compared() -> None:
    """Short steps: each heartbeat tells of many, and another rank's of the same ones comes later."""
    stragglers, at_once = watched([{0, 1}]), 40
    for first in range(0, 400, at_once):
        told = [(rank, first + n - at_once * rank) for rank in (0, 1) for n in range(at_once)]
        if any(stragglers.worked(rank, step, 1.3 if rank else 1.0) for rank, step in told if step >= 0):
            return
    pytest.fail("nobody was found")


def test_a_few_long_steps_do_not_make_a_rank_slow_that_is_not() -> None:
    """Every fourth step takes twice as long, the others are hardly slower."""
    found = play(
        watched([set(range(8))]),
        8,
        range(3000),
        lambda rank, step: (2.0 if step % 4 == 0 else 1.05) if rank == 3 else 1.0,
    )
    assert found is None


def test_a_straggler_is_left_like_a_drained_node_and_told_in_words() -> None:
    world = World()
    world.start()
    world.give({"kind": "straggler", "rank": 1, "step": 77, "ratio": 1.25})
    assert world.seats()[1] == "n6" and [r.node for r in world.releases()] == ["n3"]
    [event] = world.notes("event_straggler")
    assert event["node"] == "n3" and event["source"] == "agent" and "1.25 times" in event["reason"]
    world.give({"kind": "straggler", "rank": 99, "step": 78, "ratio": 2.0})  # no such rank
    assert len(world.notes("event_straggler")) == 1


def test_a_rank_that_is_slow_wherever_it_is_costs_one_node() -> None:
    """It has more to do than its replicas (it writes the checkpoints, say): no standby helps."""
    world = World()
    world.start()
    for step in (77, 177, 277):
        world.give({"kind": "straggler", "rank": 1, "step": step, "ratio": 1.25})
    assert [release.node for release in world.releases()] == ["n3"]
    assert world.notes("slow_everywhere")[0]["nodes"] == ["n3", "n6"]
    world.give({"kind": "straggler", "rank": 2, "step": 300, "ratio": 1.25})
    assert [release.node for release in world.releases()] == ["n3", "n4"]


def test_steps_that_are_done_again_are_judged() -> None:
    """A job that goes back a long way does not wait until it is there again."""
    stragglers = watched([{0, 1}])
    play(stragglers, 2, range(1000), lambda rank, step: 1.0)
    stragglers.disturbed()
    found = play(stragglers, 2, range(100, 100 + 2 * STEPS), lambda rank, step: 1.0 + rank)
    assert found is not None and found.rank == 1


def test_it_is_off_by_default_and_nonsense_is_refused() -> None:
    assert PolicyConfig().straggler_slower is None
    for wrong in ({"straggler_slower": 0.0}, {"straggler_steps": 4}):
        with pytest.raises(ImpossibleValue):
            PolicyConfig(**wrong)  # type: ignore[arg-type]
