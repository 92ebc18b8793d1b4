"""The policy `shrink`: lost ranks without a place are absent, survivors do their share, a standby takes them
back."""

from __future__ import annotations

import pytest
from decisions_world import World

from tm_slurm.coordinator.decide import Decisions
from tm_slurm.coordinator.model import JobState


def started(nodes: int = 4, *, policies: tuple[str, ...] = ("shrink", "fail"), **settings: int) -> World:
    world = World(nodes=nodes, **settings)
    world.plan.on_no_standby = policies
    return world


def lose(world: World, *nodes: str) -> None:
    for node in nodes:
        world.give({"kind": "node_lost", "node": node, "reason": "silent"})


def adopters(world: World) -> dict[int, int]:
    return {rank: absent.adopter for rank, absent in world.state.absent.items()}


def test_a_survivor_does_the_share_of_a_rank_that_is_lost_without_a_standby() -> None:
    world = started()
    world.start()
    lose(world, "n3")
    assert adopters(world) == {2: 0} and set(world.state.seats) == {0, 1, 3} and not world.ends()
    assert world.state.recovery is None and world.state.epoch == 1
    assert "no node is left for ranks 2: others do their shares" in world.comments()[-1]
    shrunk = {"ranks": [2], "nodes": ["n3"], "adopters": {"2": 0}}
    assert shrunk.items() <= world.notes("shrunk")[0].items()
    for told in world.told("resolve"):
        assert told.message["absent"] == [2] and "2" not in told.message["changes"]
        assert list(told.message["adopt"]) == (["2"] if told.node == "n1" else [])


def test_shares_are_spread_evenly_and_go_on_to_others_when_their_adopter_is_lost() -> None:
    world = started()
    world.start()
    lose(world, "n3", "n4")
    assert adopters(world) == {2: 0, 3: 1}
    lose(world, "n2")
    assert adopters(world) == {1: 0, 2: 0, 3: 0} and not world.ends()
    last = world.told("resolve")[-1].message
    assert last["keep"] == [2] and set(last["adopt"]) == {"1", "3"}


def test_the_last_rank_cannot_be_dropped() -> None:
    world = started(nodes=2, active=2)
    world.start()
    lose(world, "n2", "n1")
    assert "no standby is left for n1" in world.ends()[0].reason
    assert "no rank has survived" in world.notes("cannot_shrink")[0]["why"]


def test_ranks_that_are_no_replicas_are_not_dropped() -> None:
    world = started()
    world.key_of = lambda rank: str(rank % 2)
    world.start()
    lose(world, "n3")
    assert "replicas of each other" in world.notes("cannot_shrink")[0]["why"]
    assert world.ends()[0].state == "failed"


def test_a_script_without_shares_is_left_to_the_next_policy() -> None:
    world = started(policies=("shrink", "double-up", "fail"))
    world.unshared = "its script does not take its work from tm_slurm.shares()"
    world.start()
    lose(world, "n3")
    assert world.unshared in world.notes("cannot_shrink")[0]["why"]
    assert world.notes("double_up") and not world.state.absent and not world.ends()


def test_nobody_is_dropped_whose_private_state_is_lost() -> None:
    world = started()
    world.no_wards = {2}
    world.start()
    lose(world, "n3")
    assert "private state of rank 2" in world.notes("cannot_shrink")[0]["why"] and world.ends()


def test_a_node_that_comes_back_takes_the_absent_rank_back() -> None:
    world = started()
    world.start()
    lose(world, "n3")
    world.give({"kind": "node_joined", "node": "n3"})
    assert world.seats()[2] == "n3" and not world.state.absent and not world.ends()
    assert {"ranks": [2], "nodes": ["n3"], "step": 7}.items() <= world.notes("grown")[0].items()
    assert world.told("resolve")[-1].message["absent"] == []
    assert world.state.nodes["n3"].standing == "active"


def test_all_ranks_of_a_node_come_back_together() -> None:
    world = started(ranks_per_node=2)
    world.start()
    lose(world, "n2")
    assert adopters(world) == {2: 0, 3: 1}
    world.give({"kind": "node_joined", "node": "n2"})
    assert world.seats()[2] == world.seats()[3] == "n2" and not world.state.absent


def test_a_standby_that_is_lost_while_it_takes_a_rank_back_leaves_it_with_its_adopter() -> None:
    world = started()
    world.start()
    lose(world, "n3")
    world.hold = {"replace"}
    world.give({"kind": "node_joined", "node": "n3"})
    assert world.state.recovery is not None and world.state.recovery.places == {2: ("n3", 0)}
    lose(world, "n3")
    assert adopters(world) == {2: 0} and world.state.recovery is None and not world.ends()
    assert world.told("resolve")[-1].message["absent"] == [2]


def test_absent_ranks_come_before_a_node_that_should_be_left() -> None:
    world = started()
    world.start()
    lose(world, "n3")
    world.event("drain", "n2")
    assert world.notes("waiting")[0]["node"] == "n2" and world.state.move is None
    world.give({"kind": "node_joined", "node": "n3"})
    assert not world.state.absent and world.seats()[2] == "n3" and world.seats()[1] == "n2"


def test_when_all_go_back_absent_ranks_are_lost_like_others() -> None:
    world = started()
    world.start()
    lose(world, "n3")
    world.hold = {"interrupt"}
    lose(world, "n4")
    world.committed = {0: (9, False), 1: (7, False)}  # torn apart: rank 1 cannot come to 9
    world.release_held()
    assert "all have to go back" in world.notes("cannot_shrink")[0]["why"]
    assert "n3, n4" in world.ends()[0].reason


def test_an_absent_rank_is_not_started_where_another_one_is_now() -> None:
    world = started(nodes=3, active=3)
    world.start()
    lose(world, "n3")
    world.hold = {"warm"}
    world.give({"kind": "node_joined", "node": "n3"})
    world.hold = set()
    lose(world, "n2")  # before n3 is warm for rank 2: it takes rank 1
    assert world.seats() == {0: "n1", 1: "n3"} and adopters(world) == {2: 0}
    world.no_wards = {1, 2}
    world.adopted.clear()
    lose(world, "n1")
    assert not world.notes("restart") and "no standby is left for n1, n3" in world.ends()[0].reason


def test_the_job_ends_well_with_absent_ranks() -> None:
    world = started()
    world.start()
    lose(world, "n3")
    for rank, (node, slot) in list(world.state.seats.items()):
        process = world.state.nodes[node].processes[slot]
        me = {"node": node, "slot": slot, "incarnation": process.incarnation}
        world.give({"kind": "rank_done", **me, "rank": rank, "step": 9, "digest": "d"})
    assert world.ends()[0].state == "completed"


@pytest.mark.parametrize("policies", [("shrink", "fail"), ("wait", "shrink", "fail")])
def test_replaying_the_journal_gives_the_same_absent_ranks(policies: tuple[str, ...]) -> None:
    world = started(policies=policies)
    world.start()
    lose(world, "n3")
    if "wait" in policies:
        late = world.clock + world.plan.refill_wait_s + 1
        world.give({**world.decisions.due(late)[0], "at": late})
    assert adopters(world) == {2: 0}
    world.give({"kind": "node_joined", "node": "n3"})
    again = Decisions(JobState.initial(world.plan), "n1")
    for given in world.journal:
        again.handle(given)
    assert repr(again.state) == repr(world.state) and not world.state.absent
