"""What the coordinator decides when a rank or a node dies: who takes its seat, and at which step all go
on."""

from __future__ import annotations

import pytest
from decisions_world import World

from tm_slurm.coordinator.decide import Decisions
from tm_slurm.coordinator.model import JobState


def started(**shape: object) -> World:
    world = World(**shape)  # type: ignore[arg-type]
    world.start()
    return world


def test_a_dead_ranks_seat_goes_to_a_standby_and_its_node_to_the_pool() -> None:
    world = started()
    world.dies("n3")
    assert world.seats() == {0: "n2", 1: "n6", 2: "n4", 3: "n5"} and not world.ends()
    assert world.state.epoch == 1 and world.state.recoveries_done == 1
    assert world.state.nodes["n3"].standing == "standby" and world.state.nodes["n3"].processes
    assert not world.releases()


def test_a_lost_nodes_seat_goes_to_a_standby() -> None:
    world = started()
    world.give({"kind": "node_lost", "node": "n3", "reason": "silent"})
    assert world.seats()[1] == "n6" and world.state.nodes["n3"].standing == "lost"


def test_all_ranks_of_a_node_go_when_one_of_them_dies() -> None:
    world = started(ranks_per_node=2)
    world.dies("n3", slot=1)
    assert [rank for rank, node in world.seats().items() if node == "n6"] == [2, 3]
    assert world.killed == ["n3"]


def test_survivors_that_saw_the_vote_take_the_others_along() -> None:
    world = started()
    world.committed = {0: (8, False), 2: (7, True), 3: (7, True)}
    world.dies("n3")
    assert {tell.message["target"] for tell in world.told("resolve")} == {8}
    assert world.notes("recovered")[0]["step"] == 8


def test_nobody_saw_the_vote_and_the_step_is_done_again() -> None:
    world = started()
    world.committed = {0: (7, True), 2: (7, False), 3: (7, True)}
    world.dies("n3")
    assert {tell.message["target"] for tell in world.told("resolve")} == {7}


def test_survivors_that_cannot_be_at_one_boundary_end_the_job() -> None:
    world = started()
    world.committed = {0: (8, False), 2: (7, False)}
    world.dies("n3")
    assert "do not agree" in world.ends()[0].reason and "rank 2" in world.ends()[0].reason


def test_two_nodes_that_die_together_are_replaced_together() -> None:
    world = started()
    world.hold = {"interrupt"}
    world.dies("n3")
    world.hold, world.held = set(), []
    world.dies("n4")
    assert world.seats() == {0: "n2", 1: "n6", 2: "n1", 3: "n5"} and world.state.recovery is None


def test_a_successor_that_dies_is_replaced_by_another() -> None:
    world = started()
    world.hold = {"replace"}
    world.dies("n3")
    world.hold, world.held = set(), []
    world.dies("n6")
    assert world.seats()[1] in ("n1", "n6") and world.state.recovery is None and not world.ends()


def test_a_successor_that_is_still_starting_is_waited_for() -> None:
    world = started(nodes=5, batch_host=None)
    world.state.nodes["n5"].processes.clear()
    world.dies("n3")
    assert world.state.recovery is not None and not world.told("resolve")
    world.spawn("n5")
    assert world.seats()[2] == "n5"


def test_without_a_standby_the_job_ends_and_says_so() -> None:
    world = started(nodes=4)
    world.dies("n3")
    assert "no standby" in world.ends()[0].reason and "n3" in world.ends()[0].reason


def test_without_a_standby_the_job_is_requeued_if_the_config_says_so() -> None:
    world = started(nodes=4)
    world.plan.on_no_standby = "requeue"
    world.dies("n3")
    assert world.ends()[0].state == "requeue"


def test_a_step_that_kills_ranks_on_different_nodes_eats_no_more_standbys() -> None:
    world = started()
    world.dies("n3")
    world.dies("n6")
    assert "step 7" in world.ends()[0].reason and "2 times" in world.ends()[0].reason


def test_a_failure_gives_up_a_move_in_preparation_and_makes_it_again() -> None:
    world = started()
    world.hold = {"join"}
    world.event("drain", "n2")
    world.hold, world.held = set(), []
    world.dies("n3")
    assert world.notes("cancelled") and not world.ends()
    assert sorted(world.seats().values()).count("n2") == 0 and world.state.nodes["n2"].standing == "released"


def test_a_rank_that_had_finished_and_dies_is_replaced() -> None:
    world = started()
    for rank in (0, 1):
        world.give({"kind": "rank_done", "rank": rank, "step": 7, "digest": "d"})
    world.dies("n3")
    assert 1 not in world.state.done and 0 in world.state.done and world.seats()[1] == "n6"


def test_a_recovery_that_takes_too_long_names_who_is_missing() -> None:
    world = started()
    world.hold = {"interrupt"}
    world.dies("n3")
    late = world.decisions.due(world.clock + world.plan.switch_timeout_s + 1)
    assert [given["kind"] for given in late] == ["recovery_expired"]
    world.give(late[0])
    assert "did not stop" in world.ends()[0].reason and "n2, n4, n5" in world.ends()[0].reason


def test_a_node_that_was_declared_lost_and_comes_back_starts_anew() -> None:
    world = started()
    world.give({"kind": "node_lost", "node": "n3", "reason": "silent"})
    world.give({"kind": "node_joined", "node": "n3"})
    assert world.killed == ["n3"] and world.state.nodes["n3"].standing == "standby"
    assert world.seats()[1] == "n6"


@pytest.mark.parametrize("node", ["n1", "n6"])
def test_a_lost_standby_disturbs_nobody(node: str) -> None:
    world = started()
    world.give({"kind": "node_lost", "node": node, "reason": "silent"})
    assert world.state.epoch == 0 and not world.told("interrupt") and not world.ends()


def test_replaying_the_journal_of_failures_gives_the_same_state() -> None:
    world = started()
    world.dies("n3")
    world.event("drain", "n2")
    world.give({"kind": "node_lost", "node": "n5", "reason": "silent"})
    again = Decisions(JobState.initial(world.plan), "n1")
    for given in world.journal:
        again.handle(given)
    assert repr(again.state) == repr(world.state)


def test_a_new_leader_loses_the_agents_that_do_not_come_back_by_name_of_their_ranks() -> None:
    world = started()
    world.give({"kind": "led", "node": "n2", "term": 2})
    world.give({"kind": "node_lost", "node": "n3", "reason": "never came back"})
    assert world.seats()[1] == "n6"
