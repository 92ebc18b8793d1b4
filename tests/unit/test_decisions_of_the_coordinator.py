"""What the coordinator decides, without a network: each test is one promise about drains, standbys and the
end."""

from __future__ import annotations

from typing import Any

import pytest
from decisions_world import World

from tm_slurm.coordinator.decide import Decisions, UnknownInput
from tm_slurm.coordinator.model import JobState, Plan


def started(**shape: object) -> World:
    world = World(**shape)  # type: ignore[arg-type]
    world.start()
    assert world.state.started
    return world


def test_the_batch_host_and_the_last_node_start_as_standbys() -> None:
    plan = Plan([f"n{i}" for i in range(1, 7)], "n1", 4, 1)
    assert plan.first_standbys() == ["n1", "n6"]
    assert started().seats() == {0: "n2", 1: "n3", 2: "n4", 3: "n5"}


def test_an_early_spare_does_not_take_the_place_of_a_slower_node() -> None:
    world = World()
    world.start(without=("n3",))
    assert not world.state.started and world.seats()[1] == "n3"
    world.give({"kind": "node_joined", "node": "n3"})
    world.spawn("n3")
    assert world.state.started and world.seats()[1] == "n3"


def test_a_node_that_never_starts_is_replaced_at_the_limit() -> None:
    world = World()
    world.start(without=("n3",))
    world.give({"kind": "start_expired"})
    assert world.state.started and world.seats()[1] == "n6"


def test_a_job_without_enough_nodes_fails_with_the_name_of_the_missing_one() -> None:
    world = World(nodes=4, active=4)
    world.start(without=("n3",))
    world.give({"kind": "start_expired"})
    assert world.ends()[0].exit_code == 1 and "n3" in world.ends()[0].reason


def test_a_drained_node_is_left_and_given_back() -> None:
    world = started()
    world.event("drain", "n3")
    assert world.seats() == {0: "n2", 1: "n6", 2: "n4", 3: "n5"}
    assert [r.node for r in world.releases()] == ["n3"]
    assert world.state.nodes["n3"].standing == "released" and world.state.epoch == 1


@pytest.mark.parametrize("kind", ["drain", "fail", "down", "reboot", "maintenance", "unhealthy", "straggler"])
def test_every_kind_of_notice_moves_the_ranks(kind: str) -> None:
    world = started()
    world.event(kind, "n2")
    assert world.seats()[0] == "n6"


def test_only_ranks_with_a_link_to_the_leaver_are_told_to_prepare() -> None:
    world = started()
    world.event("drain", "n2")  # rank 0: linked to rank 1 alone
    assert [tell.node for tell in world.told("prepare")] == ["n3"]
    [news] = world.spread("peers")
    assert not world.told("peers") and list(news.message["changes"]) == ["0"]


def test_two_nodes_drained_at_once_are_one_epoch() -> None:
    world = started()
    world.event("drain", "n2", "n5")
    assert world.state.epoch == 1 and world.seats() == {0: "n6", 1: "n3", 2: "n4", 3: "n1"}
    assert sorted(r.node for r in world.releases()) == ["n2", "n5"]


def test_drains_that_come_during_a_move_are_moved_next() -> None:
    world = started()
    world.hold = {"go"}
    world.event("drain", "n2")
    world.event("drain", "n3")
    assert world.state.move is not None and world.state.move.leavers() == ["n2"]
    world.release_held()
    assert sorted(r.node for r in world.releases()) == ["n2", "n3"]
    assert world.state.moves_done == 2


def test_resume_before_the_switch_cancels_the_move() -> None:
    world = started()
    world.hold = {"join"}
    world.event("drain", "n3")
    world.event("resume", "n3")
    assert world.state.move is None and world.seats()[1] == "n3" and not world.releases()
    assert {tell.node for tell in world.told("cancel")} == {"n2", "n3", "n4", "n6"}
    world.hold, world.held = set(), []
    world.event("drain", "n3")
    assert world.seats()[1] == "n6" and world.state.epoch == 2  # an epoch given up is never used again


def test_resume_after_the_trigger_was_armed_asks_it_to_stop() -> None:
    world = started()
    world.hold = {"go"}
    world.event("drain", "n3")
    assert world.state.move is not None and world.state.move.phase == "armed"
    world.event("resume", "n3")
    assert world.state.move is None and world.seats()[1] == "n3"


def test_resume_after_the_vote_is_too_late_and_the_node_becomes_a_standby() -> None:
    world = started()
    world.hold = {"go"}
    world.event("drain", "n3")
    world.switching.add(1)  # the vote has carried the epoch, the news of it has not come yet
    world.event("resume", "n3")
    assert world.notes("too_late") and world.state.move is not None
    world.release_held()
    assert world.seats()[1] == "n6" and not world.releases()
    assert world.state.nodes["n3"].standing == "standby" and world.state.nodes["n3"].processes


def test_a_drained_standby_is_given_back_and_training_does_not_stop() -> None:
    world = started()
    world.event("drain", "n6")
    assert [r.node for r in world.releases()] == ["n6"]
    assert world.state.epoch == 0 and not world.notes("prepare")


def test_more_drains_than_standbys_go_on_where_they_are_and_say_so() -> None:
    world = started()
    for name in ("n2", "n3", "n4"):
        world.event("drain", name)
    assert world.seats()[2] == "n4" and not world.ends()
    assert [fields["node"] for fields in world.notes("waiting")] == ["n4"]
    assert "n4" in world.comments()[-1] and "state=resume" in world.comments()[-1]


def test_a_waiting_node_is_left_as_soon_as_a_standby_appears() -> None:
    world = started(nodes=5)
    world.event("drain", "n2")
    assert world.seats()[0] == "n1"
    world.event("request", "n3", source="user")
    assert world.notes("waiting")[0]["node"] == "n3"


def test_a_drained_batch_host_is_emptied_but_kept() -> None:
    world = started(nodes=6, active=5, batch_host="n1")  # one standby: the batch host
    world.event("drain", "n2")
    assert world.seats()[0] == "n1"
    world.event("request", "n3", source="user")
    world.event("drain", "n1")
    assert world.seats()[0] == "n1" and world.notes("waiting")


def test_a_drained_batch_host_without_ranks_is_kept_and_explained() -> None:
    world = started()
    world.event("drain", "n1")
    assert world.state.nodes["n1"].standing == "kept" and not world.releases()
    assert "batch host" in world.comments()[-1] and "scancel --signal=USR2" in world.comments()[-1]
    world.event("resume", "n1")
    assert world.state.nodes["n1"].standing == "standby" and world.state.nodes["n1"].processes


def test_a_requested_move_leaves_the_node_as_a_standby() -> None:
    world = started()
    world.event("request", "n3", source="user")
    assert world.seats()[1] == "n6" and not world.releases()
    assert world.state.nodes["n3"].free_to_join()
    world.event("request", "n6", source="user")
    assert world.seats()[1] == "n3"


def test_the_leader_hands_over_before_its_own_node_is_given_back() -> None:
    world = started(batch_host=None)
    world.decisions.leader_node = "n6"
    world.event("drain", "n6")
    assert world.leader_at != "n6"
    assert [r.node for r in world.releases()] == ["n6"]


def test_a_joiner_that_dies_while_preparing_is_replaced_by_another() -> None:
    world = started()
    world.hold = {"join"}
    world.event("drain", "n3")
    world.hold = set()
    world.held.clear()
    dead = world.state.nodes["n6"].processes[0]
    exited = {"slot": 0, "incarnation": dead.incarnation, "code": -9, "how": "signal SIGKILL"}
    world.give({"kind": "process_exited", "node": "n6", **exited})
    assert world.seats()[1] in ("n1", "n6") and world.state.move is None
    assert [r.node for r in world.releases()] == ["n3"]


def test_a_joiner_whose_process_comes_up_during_the_move_warms_up_for_the_right_rank() -> None:
    world = started(nodes=5, active=4, batch_host=None)
    world.state.nodes["n5"].processes.clear()
    world.event("drain", "n3")
    assert world.state.move is not None and world.state.move.joiners() == ["n5"]
    world.spawn("n5")
    assert world.seats()[2] == "n5"


def test_a_standby_that_keeps_failing_is_not_used() -> None:
    world = started(nodes=5, active=4, batch_host=None)
    for _ in range(3):
        process = world.state.nodes["n5"].processes[0]
        exited = {"slot": 0, "incarnation": process.incarnation, "code": 1, "how": "exit code 1"}
        world.give({"kind": "process_exited", "node": "n5", **exited})
    assert not world.state.nodes["n5"].free_to_join()
    world.event("drain", "n1")
    assert world.notes("waiting")


def test_a_preparation_that_takes_too_long_is_given_up() -> None:
    world = started()
    world.hold = {"join"}
    world.event("drain", "n3")
    assert not world.decisions.due(world.clock)
    late = world.decisions.due(world.clock + world.plan.prepare_timeout_s + 1)
    assert [given["kind"] for given in late] == ["prepare_expired"]
    world.hold, world.held = set(), []
    world.give(late[0])
    assert world.seats()[1] == "n1"  # the other standby, the first has failed once


def test_the_job_ends_when_all_ranks_are_done_and_no_spare_keeps_it_alive() -> None:
    world = started()
    for rank in range(4):
        assert not world.ends()
        world.give({"kind": "rank_done", "rank": rank, "step": 10, "digest": "d"})
    assert (world.ends()[0].state, world.ends()[0].exit_code) == ("completed", 0)


def test_a_move_in_preparation_does_not_hold_up_the_end() -> None:
    world = started()
    world.hold = {"join"}
    world.event("drain", "n3")
    for rank in range(4):
        world.give({"kind": "rank_done", "rank": rank, "step": 10, "digest": "d"})
    assert world.ends()[0].state == "completed" and world.notes("cancelled")


def test_a_script_that_never_calls_run_ends_the_job_at_once() -> None:
    world = World()
    world.give({"kind": "node_joined", "node": "n3"})
    exited = {"slot": 0, "incarnation": 5, "code": 0, "how": "exit code 0", "log": "x.log"}
    world.give({"kind": "process_exited", "node": "n3", **exited})
    assert "n3" in world.ends()[0].reason and "tm_slurm.run" in world.ends()[0].reason


def test_news_of_an_earlier_incarnation_changes_nothing() -> None:
    world = started()
    exited = {"slot": 0, "incarnation": -1, "code": -9, "how": "signal SIGKILL"}
    world.give({"kind": "process_exited", "node": "n3", **exited})
    assert not world.ends() and world.state.nodes["n3"].processes


def test_an_unknown_input_is_refused_and_changes_nothing() -> None:
    world = started()
    before = repr(world.state)
    with pytest.raises(UnknownInput, match="abracadabra"):
        world.decisions.handle({"kind": "abracadabra", "at": 1.0})
    assert repr(world.state) == before


def test_replaying_the_journal_gives_the_same_state() -> None:
    world = started(ranks_per_node=2)
    for kind, node in (
        ("drain", "n3"),
        ("request", "n2"),
        ("resume", "n3"),
        ("drain", "n1"),
        ("drain", "n6"),
    ):
        world.event(kind, node)
    again = Decisions(JobState.initial(world.plan), "n1")
    for given in world.journal:
        again.handle(given)
    assert repr(again.state) == repr(world.state)


def test_two_ranks_of_a_node_move_together() -> None:
    world = started(ranks_per_node=2)
    world.event("drain", "n3")
    assert world.seats() == {0: "n2", 1: "n2", 2: "n6", 3: "n6", 4: "n4", 5: "n4", 6: "n5", 7: "n5"}


def test_a_node_drained_before_the_start_is_swapped_without_a_move() -> None:
    world = World()
    world.event("drain", "n3")
    world.start()
    assert world.state.started and world.seats()[1] == "n6" and not world.notes("prepare")


def test_the_comment_says_how_things_stand_and_forgets_what_is_over() -> None:
    world = started(nodes=5)
    for name in ("n2", "n3", "n4"):
        world.event("drain", name)
    assert "n3,n4 should be left" in world.comments()[-1]
    for name in ("n3", "n4"):
        world.event("resume", name)
    assert "should be left" not in world.comments()[-1] and "training" in world.comments()[-1]


def test_a_standby_that_warms_up_for_another_rank_joins_only_when_it_is_the_right_one() -> None:
    """Drain one node, resume it, request another: the standby was warm for that one's rank, and no longer
    is."""
    world = started(nodes=5, batch_host=None)  # ranks 0 to 3 on n1 to n4, the standby n5 is warm for rank 0
    world.hold = {"warm"}
    world.event("drain", "n2")
    world.event("resume", "n2")
    world.event("request", "n1", source="user")
    assert not world.told("join")
    world.release_held()
    (join,) = world.told("join")
    assert join.message["rank"] == 0 and world.state.nodes["n5"].processes[0].warm_for == 0
    assert world.seats()[0] == "n5"


def test_a_joiner_drained_in_mid_switch_takes_the_ranks_and_hands_them_on() -> None:
    world = started()
    world.hold = {"go"}
    world.event("drain", "n3")
    world.event("drain", "n6")  # the joiner
    assert world.state.move is not None and not world.told("retire")
    world.release_held()
    assert not world.ends() and world.seats()[1] == "n1"
    assert sorted(r.node for r in world.releases()) == ["n3", "n6"]


def test_a_joiner_drained_when_armed_leaves_if_the_move_is_given_up() -> None:
    world = started()
    world.hold = {"go"}
    world.event("drain", "n3")
    world.event("drain", "n6")
    world.event("resume", "n3")
    assert world.state.move is None and [r.node for r in world.releases()] == ["n6"]


def test_a_leader_that_cannot_hand_over_asks_another() -> None:
    world = started(batch_host=None)
    world.decisions.leader_node = "n6"
    world.resigns_to_nobody = {"n5"}
    world.event("drain", "n6")
    assert world.leader_at not in ("n5", "n6") and [r.node for r in world.releases()] == ["n6"]


def test_a_lost_standby_that_is_drained_is_given_back_without_its_agent() -> None:
    world = started()
    world.give({"kind": "node_lost", "node": "n6", "reason": "agent killed"})
    world.event("drain", "n6")
    assert [r.node for r in world.releases()] == ["n6"]


def test_a_node_whose_agent_dies_while_leaving_is_given_back() -> None:
    world = started()
    world.hold = {"retire"}
    world.event("drain", "n6")
    world.give({"kind": "node_lost", "node": "n6", "reason": "agent killed"})
    assert [r.node for r in world.releases()] == ["n6"]


def test_a_process_that_comes_up_on_a_leaving_node_is_sent_away() -> None:
    world = World(ranks_per_node=2)
    world.start(without=("n6",))
    world.give({"kind": "node_joined", "node": "n6"})
    ready = {"slot": 0, "incarnation": 901, "host": "n6", "port": 1}
    world.give({"kind": "process_ready", "node": "n6", **ready})
    world.hold = {"retire"}
    world.event("drain", "n6")
    world.give({"kind": "process_ready", "node": "n6", **ready, "slot": 1, "incarnation": 902})
    world.release_held()
    assert [r.node for r in world.releases()] == ["n6"]


def test_a_rank_that_hangs_after_the_last_step_does_not_hold_the_nodes() -> None:
    world = World()
    world.start()
    world.hold = {"finish"}
    for rank in range(4):
        world.give({"kind": "rank_done", "rank": rank, "step": 9, "digest": "d"})
    (_, *others), world.hold = world.held, set()
    for tell in others:
        world._act(tell)
    limit = world.plan.finish_timeout_s
    assert world.decisions.due(world.clock + limit - 10) == []
    assert world.decisions.due(world.clock + limit + 1) == [{"kind": "finish_expired"}]
    world.give({"kind": "finish_expired"})
    (end,) = world.ends()
    assert end.state == "completed" and "ranks [0] on n2 did not end within 600 s" in end.reason


def test_the_processes_of_a_standby_hear_of_each_other() -> None:
    world = World(ranks_per_node=2)
    world.start()
    standby = next(node for node in world.state.nodes.values() if node.standing == "standby")

    def heard() -> dict[int | None, Any]:
        return {tell.slot: tell.message["at"] for tell in world.told("mates") if tell.node == standby.name}

    def listening() -> dict[str, Any]:
        return {str(slot): [p.host, p.port, p.incarnation] for slot, p in standby.processes.items()}

    before = listening()
    assert heard() == {0: before, 1: before}
    world.dies(standby.name, 1)
    assert heard() == {0: listening(), 1: listening()} and listening() != before
    assert not [tell for tell in world.told("mates") if tell.node in world.seats().values()]
