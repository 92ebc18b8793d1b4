"""What the coordinator decides when a rank or a node dies: who takes its seat, and at which step all go
on."""

from __future__ import annotations

import pytest
from decisions_world import World

from tm_slurm.coordinator.decide import Decisions
from tm_slurm.coordinator.model import JobState


def joining_fails_twice(world: World, why: str) -> None:
    """Whoever is to be rank 1 cannot have its state, and the next one neither."""
    for _ in range(2):
        tell = world.held.pop()
        failed = {"epoch": tell.message["epoch"], "rank": 1, "why": why}
        world.give({"kind": "join_failed", "node": tell.node, **failed})


def started(**shape: object) -> World:
    world = World(**shape)  # type: ignore[arg-type]
    world.start()
    return world


def with_snapshot(*, step: int) -> World:
    """A job whose ranks all have parameters of their own, and a snapshot of them."""
    world = World()
    world.key_of = str
    world.start()
    for name in world.plan.order:
        world.give({"kind": "vault", "node": name, "host": name, "port": 9})
    snapshot(world, step=step, epoch=0)
    return world


def snapshot(world: World, *, step: int, epoch: int) -> None:
    """Every rank has stored its part with the keeper that it was last told."""
    keepers = {tell.node: tell.message["keeper"] for tell in world.told("duties")}
    for rank, name in world.seats().items():
        stored = {"rank": rank, "step": step, "epoch": epoch, "keeper": keepers[name]}
        world.give({"kind": "snapshot_stored", "node": name, **stored})


def checkpoint(world: World, *, step: int, older: tuple[int, ...] = ()) -> None:
    """Rank 0 has made one visible; `older` are those that were not removed."""
    published = {"step": step, "path": f"step-{step}", "older": [[s, f"step-{s}"] for s in older]}
    world.give({"kind": "checkpoint_published", "node": world.seats()[0], **published})


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
    assert "n3" in world.killed


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
    reason = world.ends()[0].reason
    assert "rank 2 has committed 7 steps, another 8" in reason and "no snapshot" in reason


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
    world.give({"kind": "node_lost", "node": "n3", "reason": "silent"})
    assert "no standby" in world.ends()[0].reason and "n3" in world.ends()[0].reason


def test_without_a_standby_the_job_is_requeued_if_the_config_says_so() -> None:
    world = started(nodes=4)
    world.plan.on_no_standby = ("requeue",)
    world.give({"kind": "node_lost", "node": "n3", "reason": "silent"})
    assert world.ends()[0].state == "requeue"


def test_a_step_that_kills_ranks_on_different_nodes_eats_no_more_standbys() -> None:
    world = started()
    world.dies("n3")
    world.dies("n6")
    assert "step 7" in world.ends()[0].reason and "2 times" in world.ends()[0].reason


@pytest.mark.parametrize("held", ["interrupt", "replace"])
def test_a_rank_that_is_killed_while_another_is_replaced_is_replaced_too(held: str) -> None:
    world = started()
    world.hold = {held}
    world.dies("n3")
    world.hold, world.held = set(), []
    world.dies("n4")
    assert not world.ends() and world.state.recovery is None
    assert world.seats() == {0: "n2", 1: "n6", 2: "n1", 3: "n5"}


def test_a_rank_that_had_stopped_already_has_not_died_of_the_step() -> None:
    world = started()
    world.state.nodes["n6"].processes.clear()
    world.state.nodes["n1"].processes.clear()
    world.dies("n3", code=1)
    world.dies("n4", code=1)
    assert not world.ends() and len(world.state.crashes) == 1
    world.spawn("n6")
    world.spawn("n1")
    assert world.seats() == {0: "n2", 1: "n6", 2: "n1", 3: "n5"} and not world.ends()


def test_a_step_that_fails_at_a_survivor_too_as_it_goes_on_has_failed_twice() -> None:
    world = started()
    world.hold = {"replace"}
    world.dies("n3", code=1)
    world.hold, world.held = set(), []
    world.dies("n4", code=1)
    assert "ranks died 2 times at step 7" in world.ends()[0].reason


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
    assert world.decisions.due(world.clock + 300) == []  # it may be evaluating
    late = world.decisions.due(world.clock + 601)
    assert [given["kind"] for given in late] == ["recovery_expired"]
    world.give(late[0])
    assert "did not stop" in world.ends()[0].reason and "n2, n4, n5" in world.ends()[0].reason


def test_a_node_that_was_declared_lost_and_comes_back_starts_anew() -> None:
    world = started()
    world.give({"kind": "node_lost", "node": "n3", "reason": "silent"})
    world.give({"kind": "node_joined", "node": "n3"})
    assert "n3" in world.killed and world.state.nodes["n3"].standing == "standby"
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
    world.leads("n2", without=("n3",))
    world.give({"kind": "node_lost", "node": "n3", "reason": "never came back"})
    assert world.seats()[1] == "n6"


def test_a_standby_that_has_not_come_to_the_new_leader_gets_no_rank_while_another_is_there() -> None:
    world = started()
    world.leads("n2", without=("n6",))
    world.dies("n3")
    assert world.seats()[1] == "n1" and world.state.recovery is None


def test_a_standby_is_told_to_take_a_rank_when_it_can_hear_it() -> None:
    world = started(nodes=5, batch_host=None)
    world.give({"kind": "agent_away", "node": "n5"})
    world.hold = {"replace"}
    world.dies("n3")
    assert world.state.recovery is not None and not world.told("replace"), "it would not hear it"
    world.give({"kind": "node_joined", "node": "n5"})
    assert [tell.node for tell in world.told("replace")] == ["n5"]


def test_a_chosen_standby_that_stays_away_gives_way_to_one_that_comes() -> None:
    world = started()
    for name in ("n1", "n6"):
        world.give({"kind": "agent_away", "node": name})
    world.dies("n3")
    assert world.state.recovery is not None and not world.told("replace")
    world.give({"kind": "node_joined", "node": "n1"})
    assert world.seats()[1] == "n1" and world.state.recovery is None


def test_without_a_standby_a_rank_starts_again_where_it_was() -> None:
    world = started(nodes=4)
    world.dies("n3")
    assert world.seats()[2] == "n3" and world.state.nodes["n3"].standing == "active" and not world.ends()
    assert world.state.epoch == 1 and world.state.recovery is None


def test_without_a_standby_a_surviving_node_hosts_the_ranks_of_a_lost_one_until_another_comes() -> None:
    world = started(nodes=4)
    world.plan.on_no_standby = ("double-up", "fail")
    world.give({"kind": "node_lost", "node": "n3", "reason": "silent"})
    host, slot = world.state.seats[2]
    assert host in ("n1", "n2", "n4") and slot == 1 and not world.ends()
    assert len(set(world.state.seats.values())) == 4
    world.give({"kind": "node_joined", "node": "n3"})
    assert world.state.seats[2] == ("n3", 0) and world.state.nodes["n3"].standing == "active"
    assert world.state.nodes[host].standing == "active" and set(world.state.nodes[host].processes) == {0}


def test_a_lost_rank_waits_for_a_node_if_the_config_says_so() -> None:
    world = started(nodes=4)
    world.plan.on_no_standby = ("wait", "fail")
    world.give({"kind": "node_lost", "node": "n3", "reason": "silent"})
    assert world.state.recovery is not None and not world.ends() and not world.told("resolve")
    world.give({"kind": "node_joined", "node": "n3"})
    assert world.seats()[2] == "n3" and world.state.recovery is None


def test_nobody_waits_for_a_node_for_ever() -> None:
    world = started(nodes=4)
    world.plan.on_no_standby = ("wait", "fail")
    world.give({"kind": "node_lost", "node": "n3", "reason": "silent"})
    late = world.decisions.due(world.clock + world.plan.refill_wait_s + 1)
    assert [given["kind"] for given in late] == ["refill_expired"]
    world.give({**late[0], "at": world.clock + world.plan.refill_wait_s + 1})
    assert "no standby" in world.ends()[0].reason


@pytest.mark.parametrize("lost", ["n6", "n2", "n4"], ids=["joiner", "leaver", "stayer"])
def test_a_failure_in_the_middle_of_a_switch_loses_nothing(lost: str) -> None:
    world = started()
    world.hold = {"go"}
    world.event("drain", "n2")
    world.give({"kind": "switching", "node": "n2", "epoch": 1, "step": 7})
    world.hold, world.held = set(), []
    world.give({"kind": "node_lost", "node": lost, "reason": "power"})
    assert not world.ends() and world.state.recovery is None and world.state.move is None
    assert len(set(world.state.seats.values())) == 4 and lost not in world.seats().values()
    assert "n2" not in world.seats().values() or world.notes("waiting")


def test_a_joiner_that_has_the_state_already_keeps_it() -> None:
    world = started(ranks_per_node=1)
    world.hold = {"go"}
    world.event("drain", "n2")
    world.give({"kind": "switching", "node": "n2", "epoch": 1, "step": 7})
    world.seated["n6", 0] = 0  # it has resumed, the news of it has not come
    world.hold, world.held = set(), []
    world.give({"kind": "node_lost", "node": "n2", "reason": "power"})
    assert world.seats()[0] == "n6" and not world.told("replace") and not world.ends()
    assert world.state.recovery is None and world.state.epoch == 2


def test_of_a_pair_with_two_ranks_the_leaver_keeps_both_if_only_one_has_moved() -> None:
    world = started(ranks_per_node=2)
    world.hold = {"go"}
    world.event("drain", "n2")
    world.give({"kind": "switching", "node": "n2", "epoch": 1, "step": 7})
    world.seated["n6", 0] = 0
    world.hold, world.held = {"join"}, []
    world.give({"kind": "node_lost", "node": "n5", "reason": "power"})
    assert world.state.recovery is None and not world.ends()
    assert world.state.seats[0][0] == world.state.seats[1][0] == "n2" and "n6" in world.killed


def test_a_broken_link_that_nothing_else_explains_costs_the_accused_its_seat() -> None:
    world = started()
    for rank in (0, 2):
        world.give({"kind": "broken", "node": "n2", "rank": rank, "lost": 1, "why": "silent"})
    assert world.decisions.due(world.clock - 1) == []
    assert world.decisions.due(world.clock + 1) == [{"kind": "accusations_due"}]
    world.give({"kind": "accusations_due"})
    assert world.seats()[1] == "n6" and "n3" in world.killed


def test_a_link_that_closed_while_its_process_took_a_role_is_not_held_against_it() -> None:
    world = started()
    world.hold = {"replace"}
    world.dies("n3")
    broken = {"epoch": 1, "rank": 0, "lost": 1, "why": "closed by the other side"}
    world.give({"kind": "broken", "node": "n2", **broken})
    world.release_held()
    assert world.state.recovery is None
    world.give({"kind": "accusations_due"})
    assert world.seats()[1] == "n6" and "n6" not in world.killed, "it is well"
    assert world.state.recoveries_done == 2, "and who has stopped goes on"


def test_a_broken_link_that_a_death_explains_is_forgotten() -> None:
    world = started()
    world.give({"kind": "broken", "node": "n2", "rank": 0, "lost": 1, "why": "reset"})
    world.dies("n3")
    assert world.decisions.due(world.clock + 1) == [] and world.state.recoveries_done == 1


def test_collectives_that_fail_without_anybody_to_blame_are_done_again() -> None:
    world = started()
    world.give({"kind": "broken", "node": "n2", "rank": 0, "lost": None, "why": "timeout"})
    world.give({"kind": "accusations_due"})
    assert world.state.epoch == 1 and len(world.told("resolve")) == 4 and not world.told("replace")


def test_a_rank_without_a_replica_takes_everybody_back_to_the_snapshot() -> None:
    world = World()
    world.key_of = str  # every rank has parameters of its own
    world.start()
    for name in world.plan.order:
        world.give({"kind": "vault", "node": name, "host": name, "port": 9})
    duties = {tell.node: tell.message for tell in world.told("duties")}
    assert duties["n3"]["keeper"] == "n4" and duties["n3"]["snapshots"] and duties["n3"]["owner"] == 1
    for rank, name in world.seats().items():
        stored = {"rank": rank, "step": 5, "epoch": 0, "keeper": duties[name]["keeper"]}
        world.give({"kind": "snapshot_stored", "node": name, **stored})
    assert len(world.told("snapshot_complete")) == 4
    world.dies("n3")
    assert {tell.message["target"] for tell in world.told("resolve")} == {5}
    assert world.told("replace")[0].message["back_to"] == {
        "source": "snapshot",
        "step": 5,
        "vault": ["n4", 9],
    }
    assert world.seats()[1] == "n6" and world.state.recovery is None


def test_a_rank_that_starts_again_where_it_was_hears_where_its_snapshots_go() -> None:
    world = World(nodes=4, active=4, batch_host=None)
    world.start()
    for name in world.plan.order:
        world.give({"kind": "vault", "node": name, "host": name, "port": 9})
    before = len(world.told("duties"))
    world.dies("n3")
    assert world.seats()[2] == "n3"
    assert [tell.node for tell in world.told("duties")[before:]] == ["n3"]


def test_warm_standbys_have_memory_ready_when_there_will_be_snapshots() -> None:
    world = with_snapshot(step=5)
    assert sorted(tell.node for tell in world.told("reserve")) == ["n1", "n6"]
    world.dies("n3")  # it comes back as a standby
    assert [tell.node for tell in world.told("reserve")][2:] == ["n3"]
    replicas = World()
    replicas.start()
    assert replicas.told("duties") and not replicas.told("reserve")


def test_a_former_keeper_is_told_to_forget_and_all_of_the_new_epoch() -> None:
    world = with_snapshot(step=5)
    ranks = {tell.node: tell.message["ranks"] for tell in world.told("keep")}
    assert ranks == {"n1": [], "n2": [], "n3": [0], "n4": [1], "n5": [2], "n6": [3]}
    world.dies("n3")
    assert {tell.node: tell.message["epoch"] for tell in world.told("epoch")} == dict.fromkeys(ranks, 1)
    before = len(world.told("keep"))
    snapshot(world, step=9, epoch=1)
    ranks = {tell.node: tell.message["ranks"] for tell in world.told("keep")[before:]}
    assert ranks == {"n1": [1], "n2": [], "n3": [0], "n4": [], "n5": [2], "n6": [3]}


def test_after_going_back_further_the_next_snapshot_is_the_newest() -> None:
    world = with_snapshot(step=9)
    checkpoint(world, step=4)
    for node in ("n3", "n4"):  # both of them had the only two copies of rank 1's part
        world.state.nodes[node].vault = None
    world.dies("n3")
    assert world.notes("recovered")[0]["step"] == 4 and world.state.snapshot is None
    snapshot(world, step=6, epoch=1)
    assert world.state.snapshot is not None and world.state.snapshot.step == 6


def test_a_snapshot_whose_keeper_died_with_the_rank_is_no_snapshot() -> None:
    world = World()
    world.key_of = str
    world.start()
    for name in world.plan.order:
        world.give({"kind": "vault", "node": name, "host": name, "port": 9})
    duties = {tell.node: tell.message for tell in world.told("duties")}
    for rank, name in world.seats().items():
        stored = {"rank": rank, "step": 5, "epoch": 0, "keeper": duties[name]["keeper"]}
        world.give({"kind": "snapshot_stored", "node": name, **stored})
    world.hold = {"interrupt"}
    world.give({"kind": "node_lost", "node": "n4", "reason": "power"})
    world.hold, world.held = set(), []
    world.dies("n3")
    assert "no replica of rank 1" in world.ends()[0].reason and "no snapshot" in world.ends()[0].reason


def test_a_checkpoint_is_the_last_resort() -> None:
    world = World()
    world.key_of = str
    world.start()
    for rank, name in world.seats().items():
        world.give({"kind": "checkpoint_written", "node": name, "rank": rank, "step": 4, "epoch": 0})
    world.give({"kind": "checkpoint_published", "step": 4, "path": "x"})
    world.dies("n3")
    assert world.told("replace")[0].message["back_to"]["source"] == "checkpoint"
    assert world.notes("recovered")[0]["step"] == 4


def test_a_damaged_checkpoint_gives_way_to_the_one_before_it() -> None:
    world = World()
    world.key_of = str
    world.start()
    checkpoint(world, step=5, older=(2,))
    world.hold = {"replace"}
    world.dies("n3")
    joining_fails_twice(world, "checksum")
    assert [fields["step"] for fields in world.notes("resolve")] == [5, 5, 2]
    assert world.held.pop().message["back_to"]["path"] == "step-2" and not world.ends()
    checkpoint(world, step=8, older=(5, 2))
    assert [older.step for older in world.state.older_checkpoints] == [2]
    checkpoint(world, step=5, older=(2,))  # written again
    assert world.state.checkpoint is not None and world.state.checkpoint.step == 5


@pytest.mark.parametrize("older", [(2,), ()])
def test_survivors_that_cannot_go_back_to_a_checkpoint_name_it(older: tuple[int, ...]) -> None:
    """All of them refuse it at once, and that is one refusal. Nobody begins anew when none is left."""
    world = World()
    world.key_of = str
    world.start()
    checkpoint(world, step=5, older=older)
    world.dies("n3")
    in_place = len(world.told("resolve"))
    for epoch in (1, 2):
        world.not_begun = set(range(4))
        for rank, node in world.seats().items():
            told = {"rank": rank, "epoch": epoch, "lost": None, "why": "checksum"}
            refused = {"refused": ["checkpoint", 5], **process_on(world, node)}
            world.give({"kind": "broken", "node": node, **refused, **told})
        world.give({"kind": "accusations_due"})
    assert [fields["step"] for fields in world.notes("resolve")] == [5, 5, *older]
    assert bool(world.ends()) == (not older)
    assert not older or world.notes("resolve")[-1]["source"] == "checkpoint"
    # Who has not begun has nothing that could go back in place: all build again, or it would do so alone.
    assert all(tell.message["back_to"].get("again") for tell in world.told("resolve")[in_place:])


def process_on(world: World, node: str) -> dict[str, int]:
    return {"slot": 0, "incarnation": world.state.nodes[node].processes[0].incarnation}


def test_a_failure_before_anything_was_committed_begins_anew() -> None:
    world = World()
    world.key_of = str
    world.start()
    world.committed = {rank: (0, False) for rank in range(4)}
    world.dies("n3")
    assert world.told("replace")[0].message["back_to"]["source"] == "anew" and not world.ends()


@pytest.mark.parametrize("step", [0, 1, 2])
def test_in_the_first_two_steps_all_build_again_though_there_are_replicas(step: int) -> None:
    """A standby has its buckets already; those that built together have yet to agree on theirs."""
    world = started()
    world.committed = {rank: (step, False) for rank in range(4)}
    world.dies("n3")
    assert world.notes("recovered")[0]["source"] == ("replicas" if step == 2 else "anew")
    assert world.notes("recovered")[0]["step"] == (step if step == 2 else 0)
    resolve = world.told("resolve")[0].message
    assert bool(resolve.get("back_to", {}).get("again")) == (step < 2)


def test_after_a_start_from_a_checkpoint_the_first_two_steps_are_those_after_it() -> None:
    world = World()
    world.give({"kind": "checkpoint_found", "step": 40, "path": "step-00000040"})
    world.start()
    world.committed = {rank: (41, False) for rank in range(4)}
    world.dies("n3")
    assert (world.notes("recovered")[0]["source"], world.notes("recovered")[0]["step"]) == ("checkpoint", 40)
    world.committed = {rank: (42, False) for rank in range(4)}
    world.dies("n4")
    assert (world.notes("recovered")[1]["source"], world.notes("recovered")[1]["step"]) == ("replicas", 42)


def test_a_stopped_process_is_replaced() -> None:
    world = started()
    incarnation = world.state.nodes["n3"].processes[0].incarnation
    stopped = {"slot": 0, "incarnation": incarnation, "how": "stopped for 2.0 s"}
    world.give({"kind": "process_stopped", "node": "n3", **stopped})
    assert world.seats()[1] == "n6" and "n3" in world.killed


def test_crashes_of_all_ranks_at_different_steps_have_nothing_to_do_with_each_other() -> None:
    world = World(nodes=2, active=2, batch_host=None)
    world.start()
    world.give({"kind": "checkpoint_published", "step": 2, "path": "x"})
    for step in (100, 5000):
        world.hold = {"interrupt"}
        world.dies("n1", code=1, committed=step)
        world.hold, world.held = set(), []
        world.dies("n2", code=1, committed=step)
        assert not world.ends() and world.state.recovery is None
    world.hold = {"interrupt"}
    world.dies("n1", code=1, committed=5000)
    world.hold, world.held = set(), []
    world.dies("n2", code=1, committed=5000)
    assert "ranks died 2 times at step 5000" in world.ends()[0].reason


def test_a_rank_that_gives_up_ends_the_job_at_once() -> None:
    world = started()
    world.give({"kind": "checkpoint_published", "step": 2, "path": "x"})
    why = "step 7: gradients are not finite, some of them on rank 1"
    incarnation = world.state.nodes["n3"].processes[0].incarnation
    told = {"slot": 0, "incarnation": incarnation, "rank": 1, "why": why}
    world.give({"kind": "gives_up", "node": "n3", **told})
    assert world.ends()[0].state == "failed" and world.ends()[0].reason == f"rank 1 on n3: {why}"


def test_a_successor_has_time_to_build_its_role_and_then_to_take_its_state() -> None:
    world = started()
    world.state.state_bytes[1] = 20 * 10**9
    world.hold = {"warm", "replace"}
    world.dies("n3")
    plan, agreed_at = world.plan, world.state.recovery.agreed_at if world.state.recovery else 0.0
    assert world.told("replace") and plan.switch_timeout_s < plan.prepare_timeout_s
    assert world.decisions.due(agreed_at + plan.prepare_timeout_s - 1) == []
    process = world.state.nodes["n6"].processes[0]
    warm = {"slot": 0, "incarnation": process.incarnation, "rank": 1}
    warm_at = agreed_at + plan.prepare_timeout_s - 2
    world.give({"kind": "process_warm", "node": "n6", "at": warm_at, **warm})
    assert world.decisions.due(warm_at + plan.switch_timeout_s + 199) == []
    late = world.decisions.due(warm_at + plan.switch_timeout_s + 201)
    assert [given["kind"] for given in late] == ["recovery_expired"]


def test_a_successor_that_does_not_build_its_role_in_time_is_given_up() -> None:
    world = started()
    world.hold = {"warm", "replace"}
    world.dies("n3")
    late = world.decisions.due(world.clock + world.plan.prepare_timeout_s + 1)
    assert [given["kind"] for given in late] == ["recovery_expired"]


def test_a_large_state_has_the_time_that_it_takes_in_a_move() -> None:
    world = started()
    world.state.state_bytes[0] = 20 * 10**9
    world.hold = {"go"}
    world.event("drain", "n2")
    world.give({"kind": "switching", "node": "n2", "epoch": 1, "step": 7})
    at = world.state.move.switching_at if world.state.move else 0.0
    assert world.decisions.due(at + world.plan.switch_timeout_s + 199) == []
    assert [due["kind"] for due in world.decisions.due(at + world.plan.switch_timeout_s + 201)] == [
        "switch_expired"
    ]


def test_a_node_whose_new_process_died_before_it_had_its_rank_is_a_standby_afterwards() -> None:
    world = started()
    world.give({"kind": "checkpoint_published", "step": 2, "path": "x"})
    del world.seated["n3", 0]  # it has not taken its rank yet
    world.hold = {"replace"}
    world.dies("n4")
    world.hold, world.held = set(), []
    world.dies("n3")
    assert world.state.recovery is None and "n3" not in world.seats().values()
    assert world.state.nodes["n3"].standing == "standby" and world.state.nodes["n3"].processes


def test_a_private_state_that_was_lost_on_its_way_is_asked_for_again() -> None:
    world = started()
    world.hold = {"replace"}
    world.dies("n3")
    world.hold, world.held = set(), []
    world.give({"kind": "ward_missing", "epoch": 1, "ranks": [1]})
    assert world.state.recovery is None and world.state.epoch == 2 and not world.ends()
    world.give({"kind": "ward_missing", "epoch": 1, "ranks": [1]})
    assert world.state.epoch == 2, "that is past"


def test_a_checkpoint_that_does_not_come_before_the_time_limit_is_not_waited_for() -> None:
    world = started()
    event = {"id": "t", "kind": "time_limit", "node": "", "source": "agent", "reason": "120 s left"}
    world.give({"kind": "checkpoint_published", "step": 2, "path": "x"})
    world.give({"kind": "events", "events": [event]})
    at = world.state.stopping_since
    for rank, name in ((0, "n2"), (2, "n4")):
        world.give({"kind": "checkpoint_written", "node": name, "rank": rank, "step": 8, "epoch": 0})
    limit = world.plan.stop_timeout_s
    assert world.decisions.due(at + limit - 1) == []
    assert world.decisions.due(at + limit + 1) == [{"kind": "stop_expired"}]
    world.give({"kind": "stop_expired"})
    (end,) = world.ends()
    assert end.state == "requeue" and "ranks [1, 3] have not written a checkpoint" in end.reason
    assert "from the checkpoint of step 2" in end.reason


def test_a_recovery_does_not_hold_a_job_that_must_stop_beyond_its_limit() -> None:
    world = started()
    world.hold = {"interrupt"}
    world.dies("n3")
    event = {"id": "t", "kind": "preempt", "node": "", "source": "agent", "reason": "grace"}
    world.give({"kind": "events", "events": [event]})
    late = world.decisions.due(world.state.stopping_since + world.plan.stop_timeout_s + 1)
    assert late == [{"kind": "stop_expired"}]
    world.give(late[0])
    assert world.ends()[0].state == "requeue" and "from the start" in world.ends()[0].reason


def test_the_time_limit_ends_in_a_checkpoint_and_the_queue() -> None:
    world = started()
    event = {"id": "t", "kind": "time_limit", "node": "", "source": "agent", "reason": "120 s left"}
    world.give({"kind": "events", "events": [event]})
    assert [tell.node for tell in world.told("checkpoint")] == ["n2"] and not world.ends()
    world.give({"kind": "checkpoint_published", "step": 9, "path": "x"})
    assert world.ends()[0].state == "requeue" and "step 9" in world.ends()[0].reason


# ---- found by test_no_step_is_lost_or_done_twice.py ----


def test_a_job_that_was_started_again_often_enough_is_not_requeued() -> None:
    world = World(nodes=4, active=4)
    world.plan.on_no_standby = ("requeue",)
    world.plan.requeues_left = 0
    world.start()
    world.event("time_limit", "n1")
    checkpoint(world, step=9)
    assert world.ends()[0].state == "failed" and "job.max_requeues" in world.ends()[0].reason


def test_whoever_is_alike_before_the_first_step_need_not_be_after_it() -> None:
    """Optimizers that are sharded have no state before the first step."""
    world = World()
    world.key_of = lambda rank: "the same"
    world.hold = {"assign"}
    world.start()
    world.hold, world.held = set(), []
    for (node, slot), rank in {seat: rank for rank, seat in world.state.seats.items()}.items():
        world.seated[node, slot] = rank
        world.give({"kind": "replica_key", "node": node, "rank": rank, "step": 0, "key": "the same"})
        world.committed[rank] = (1, False)
    world.dies("n3")
    assert world.notes("resolve")[0]["source"] == "anew"


def test_a_rank_that_fails_while_another_one_still_resumes_is_not_forgotten() -> None:
    world = started()
    world.hold = {"replace"}
    world.dies("n3")
    world.give({"kind": "broken", "node": "n2", "epoch": 1, "rank": 0, "lost": None, "why": "reset"})
    world.release_held()
    assert world.state.recovery is None
    assert world.decisions.due(world.clock + 1) == [{"kind": "accusations_due"}]
    world.give({"kind": "accusations_due"})
    assert world.state.epoch == 2 and world.state.recovery is None and not world.ends()


def test_a_recovery_tells_what_switches_and_recoveries_before_have_changed() -> None:
    """Not all may have heard of it."""
    world = started()
    world.hold = {"go"}
    world.event("drain", "n2")
    world.give({"kind": "switching", "node": "n2", "epoch": 1, "step": 7})
    world.seated["n6", 0] = 0
    world.hold, world.held = {"resolve", "replace"}, []
    world.give({"kind": "node_lost", "node": "n2", "reason": "power"})
    world.hold, world.held = set(), []
    world.dies("n4")
    changes = world.told("resolve")[-1].message["changes"]
    assert changes["0"][0] == "n6" and world.state.recovery is None


def test_the_end_waits_for_a_rank_that_died_after_it_was_done() -> None:
    world = started()
    world.hold = {"interrupt"}
    world.give({"kind": "rank_done", "rank": 1, "step": 7, "digest": "d"})
    world.dies("n3")
    for rank in (0, 2, 3):
        world.give({"kind": "rank_done", "rank": rank, "step": 7, "digest": "d"})
    assert not world.told("finish")
    world.release_held()
    world.give({"kind": "rank_done", "rank": 1, "step": 7, "digest": "d"})
    assert world.ends()[0].state == "completed"


def test_a_process_without_a_rank_does_not_hold_up_the_end() -> None:
    world = started(nodes=4)
    world.spawn("n2", [1])
    for rank in range(4):
        world.give({"kind": "rank_done", "rank": rank, "step": 10, "digest": "d"})
    assert world.ends()[0].state == "completed"


def test_a_node_lost_before_the_start_is_replaced() -> None:
    world = World()
    world.start(without=("n3",))
    world.give({"kind": "node_joined", "node": "n3"})
    world.give({"kind": "node_lost", "node": "n3", "reason": "power"})
    assert world.state.started and world.seats()[1] == "n6" and not world.ends()


def test_a_node_that_is_slow_to_start_is_a_standby() -> None:
    world = World()
    world.start(without=("n3",))
    world.give({"kind": "node_joined", "node": "n3"})
    world.give({"kind": "start_expired"})
    world.spawn("n3")
    assert world.seats()[1] == "n6" and world.state.nodes["n3"].free_to_join()


def test_what_a_process_says_that_was_declared_dead_counts_for_nothing() -> None:
    world = started()
    fenced = world.state.nodes["n3"].processes[0].incarnation
    world.give({"kind": "node_lost", "node": "n3", "reason": "unplugged"})
    world.give({"kind": "node_joined", "node": "n3"})
    said = {"node": "n3", "slot": 0, "incarnation": fenced}
    world.give({"kind": "broken", **said, "epoch": 0, "rank": 1, "lost": 0, "why": "timeout"})
    world.give({"kind": "rank_done", **said, "rank": 1, "step": 8, "digest": "d"})
    assert not world.state.accusations and not world.state.done


def test_a_trigger_that_was_asked_to_stop_is_not_armed_again() -> None:
    world = started()
    world.hold = {"go", "stop"}
    world.event("drain", "n3")
    world.event("resume", "n3")
    world.give({"kind": "node_joined", "node": "n3"})
    assert [tell.message["kind"] for tell in world.held] == ["go", "stop", "stop"]


def test_a_returning_node_keeps_the_processes_that_it_was_told_to_start() -> None:
    world = started(ranks_per_node=2)
    fenced = [process.incarnation for process in world.state.nodes["n3"].processes.values()]
    world.give({"kind": "node_lost", "node": "n3", "reason": "unplugged"})
    world.give({"kind": "node_joined", "node": "n3"})
    assert world.killed.count("n3") == 2  # when it was lost, and when it came back
    for slot, incarnation in enumerate(fenced):
        ready = {"slot": slot, "incarnation": incarnation, "host": "n3", "port": 1}
        world.give({"kind": "process_ready", "node": "n3", **ready})
    assert world.killed.count("n3") == 2 and len(world.state.nodes["n3"].processes) == 2


def test_the_next_rank_0_hears_that_the_job_is_to_stop() -> None:
    world = started()
    event = {"id": "t", "kind": "time_limit", "node": "", "source": "agent", "reason": "120 s left"}
    world.give({"kind": "events", "events": [event]})
    world.dies("n2")
    world.event("drain", "n6")
    assert [tell.node for tell in world.told("checkpoint")] == ["n2", "n6", "n1"]


def test_parts_of_a_snapshot_may_come_before_the_news_of_the_switch() -> None:
    world = started()
    world.hold = {"go"}
    world.event("drain", "n2")
    for rank, node in ((1, "n3"), (2, "n4"), (3, "n5")):
        stored = {"rank": rank, "step": 9, "epoch": 1, "keeper": "n1"}
        world.give({"kind": "snapshot_stored", "node": node, **stored})
    world.release_held()
    world.give({"kind": "snapshot_stored", "node": "n6", "rank": 0, "step": 9, "epoch": 1, "keeper": "n1"})
    assert world.state.snapshot is not None and world.state.snapshot.step == 9


def test_a_leaver_whose_joiner_went_ahead_and_died_is_no_survivor() -> None:
    world = started(ranks_per_node=1)
    world.hold = {"go"}
    world.event("drain", "n2")
    world.give({"kind": "switching", "node": "n2", "epoch": 1, "step": 7})
    world.committed = {0: (7, False), 1: (9, False), 2: (9, True), 3: (9, False)}
    world.hold, world.held = set(), []
    world.give({"kind": "node_lost", "node": "n6", "reason": "power"})
    assert all(0 in tell.message["lost"] for tell in world.told("interrupt"))
    assert world.notes("left_behind")[0]["rank"] == 0 and world.notes("recovered")[0]["step"] == 9
    assert world.seats()[0] == "n1" and not world.ends()


def test_a_process_that_is_to_replace_a_rank_is_not_told_to_begin_as_one() -> None:
    world = started(nodes=4)
    world.hold = {"replace"}
    world.dies("n3")
    assert world.state.recovery is not None and world.state.nodes["n3"].processes
    before = len(world.told("assign"))
    world.give({"kind": "node_joined", "node": "n3"})
    assert len(world.told("assign")) == before


def test_a_node_that_could_not_take_over_the_lead_can_still_be_lost() -> None:
    world = started(batch_host=None)
    world.decisions.leader_node = "n6"
    world.resigns_to_nobody = {"n5"}
    world.event("drain", "n6")
    world.give({"kind": "node_lost", "node": "n5", "reason": "power"})
    assert world.state.nodes["n5"].standing == "lost" and "n5" not in world.seats().values()


def test_a_node_whose_ranks_have_gone_on_elsewhere_is_a_standby_in_the_next_failure() -> None:
    """n3's rank has resumed on n6 when n4 is lost: n3 itself is well."""
    world = started(nodes=5, batch_host=None)  # ranks 0 to 3 on n1 to n4, the standby is n5
    world.hold = {"resolve"}
    world.dies("n3")
    world.seated["n5", 0] = 2
    world.hold, world.held = set(), []
    world.give({"kind": "node_lost", "node": "n4", "reason": "power"})
    assert world.seats() == {0: "n1", 1: "n2", 2: "n5", 3: "n3"} and not world.ends()


def test_a_node_on_its_way_back_to_the_pool_is_waited_for() -> None:
    world = started(nodes=5, batch_host=None)
    world.hold = {"retire"}
    world.event("drain", "n5")
    world.event("resume", "n5")
    world.give({"kind": "node_lost", "node": "n3", "reason": "power"})
    assert world.state.recovery is not None and not world.ends()
    world.release_held()
    assert world.seats()[2] == "n5" and world.state.recovery is None


def test_a_process_that_was_interrupted_before_it_had_its_rank_gets_it_then() -> None:
    world = started()
    world.committed = {rank: (0, False) for rank in range(4)}
    del world.seated["n4", 0]
    world.dies("n3")
    assert world.seats() == {0: "n2", 1: "n6", 2: "n4", 3: "n5"} and world.state.recovery is None


def test_a_buddy_that_was_told_nothing_yet_says_so() -> None:
    world = started()
    world.hold = {"interrupt"}
    world.dies("n3")
    epoch = world.told("interrupt")[0].message["epoch"]
    for rank, node in ((0, "n2"), (2, "n4"), (3, "n5")):
        said = {"rank": rank, "committed": 0, "at_vote": False, "wards": {"1": []}}
        process = world.state.nodes[node].processes[0]
        me = {"node": node, "slot": 0, "incarnation": process.incarnation}
        world.give({"kind": "survivor", **me, "epoch": epoch, **said})
    assert world.notes("resolve")[0]["source"] == "anew"


def test_a_connection_that_breaks_does_not_kill_what_was_just_started() -> None:
    world = started(nodes=4)
    world.hold = {"spawn"}
    world.dies("n3")
    world.give({"kind": "node_joined", "node": "n3"})
    assert world.killed.count("n3") == 0, "its only process had died"
    world = started(nodes=4, ranks_per_node=2)
    world.hold = {"spawn"}
    world.dies("n3")
    world.give({"kind": "node_joined", "node": "n3"})
    assert world.killed.count("n3") == 1, "when the first of its processes died"


def test_a_rank_once_in_question_is_asked_for_however_often_it_begins_again() -> None:
    """A new process on its seat does not mean that the rank is there."""
    world = started(nodes=4)
    world.hold = {"interrupt"}
    world.dies("n3")
    world.spawn("n3")
    world.give({"kind": "led", "node": "n2", "term": 2})
    assert all(tell.message["lost"] == [2] for tell in world.told("interrupt"))
    assert {tell.node for tell in world.told("interrupt")[-4:]} == {"n1", "n2", "n3", "n4"}


# ---- found by reading ----


def test_a_node_that_should_be_left_is_better_than_none() -> None:
    world = started(nodes=4)
    world.event("drain", "n3")
    world.dies("n3")
    assert world.seats()[2] == "n3" and world.state.recovery is None and not world.ends()


def test_a_host_that_should_be_left_is_better_than_none() -> None:
    world = started(nodes=4)
    world.plan.on_no_standby = ("double-up", "fail")
    for name in ("n1", "n2", "n4"):
        world.event("drain", name)
    world.give({"kind": "node_lost", "node": "n3", "reason": "power"})
    assert world.state.recovery is None and not world.ends()
    assert world.state.seats[2][0] in ("n1", "n2", "n4")


def test_nobody_waits_for_a_node_when_time_is_over() -> None:
    world = started(nodes=4)
    world.plan.on_no_standby = ("wait", "fail")
    event = {"id": "t", "kind": "time_limit", "node": "", "source": "agent", "reason": "120 s left"}
    world.give({"kind": "events", "events": [event]})
    world.give({"kind": "node_lost", "node": "n3", "reason": "power"})
    assert world.ends()[0].state == "requeue"


def test_a_process_that_stops_after_the_last_step_is_named() -> None:
    world = started()
    world.hold = {"finish"}
    for rank in range(4):
        world.give({"kind": "rank_done", "rank": rank, "step": 7, "digest": "d"})
    process = world.state.nodes["n3"].processes[0]
    stopped = {"slot": 0, "incarnation": process.incarnation, "how": "stopped for 2.0 s"}
    world.give({"kind": "process_stopped", "node": "n3", **stopped})
    assert "n3" in world.ends()[0].reason and "stopped" in world.ends()[0].reason


def test_the_next_leader_gives_back_a_lost_node_too() -> None:
    """The one before died when it had decided to."""
    world = started()
    world.give({"kind": "node_lost", "node": "n6", "reason": "power"})
    drain = {"id": "d", "kind": "drain", "node": "n6", "source": "poll", "reason": ""}
    world.decisions.handle({"kind": "events", "events": [drain], "at": 99.0})  # nothing comes of its actions
    world.give({"kind": "led", "node": "n2", "term": 2})
    assert [release.node for release in world.releases()] == ["n6"]


def test_who_left_with_a_switch_is_not_looked_for_in_its_successor() -> None:
    """Rank 2 had not seen the last vote before the switch when its link to the leaver ended."""
    world = started()
    world.event("drain", "n3")
    world.give({"kind": "broken", "node": "n4", "epoch": 0, "rank": 2, "lost": 1, "why": "reset"})
    world.give({"kind": "accusations_due"})
    assert world.seats()[1] == "n6" and "n6" not in world.killed and world.state.recoveries_done == 1


def test_a_snapshot_that_cannot_be_had_gives_way_to_the_checkpoint() -> None:
    world = World()
    world.key_of = str
    world.start()
    for name in world.plan.order:
        world.give({"kind": "vault", "node": name, "host": name, "port": 9})
    duties = {tell.node: tell.message for tell in world.told("duties")}
    for rank, name in world.seats().items():
        world.give({"kind": "checkpoint_written", "node": name, "rank": rank, "step": 2, "epoch": 0})
        stored = {"rank": rank, "step": 5, "epoch": 0, "keeper": duties[name]["keeper"]}
        world.give({"kind": "snapshot_stored", "node": name, **stored})
    world.give({"kind": "checkpoint_published", "step": 2, "path": "x"})
    world.hold = {"replace"}
    world.dies("n3")
    joining_fails_twice(world, "the vault refused")
    assert [fields["source"] for fields in world.notes("resolve")] == ["snapshot", "snapshot", "checkpoint"]


# ---- many nodes, and Slurm's second thoughts ----


def test_64_nodes_lost_at_once_are_replaced_at_once() -> None:
    """One node_lost each: that is not a recovery that was disturbed 63 times."""
    world = started(nodes=140, active=70)
    gone = [world.state.seats[rank][0] for rank in range(64)]
    world.hold = {"interrupt"}
    for node in gone[:-1]:
        world.give({"kind": "node_lost", "node": node, "reason": "silent"})
    world.hold, world.held = set(), []
    world.give({"kind": "node_lost", "node": gone[-1], "reason": "silent"})
    assert not world.ends() and world.state.recovery is None
    assert world.state.recoveries_done == 1 and not set(gone) & set(world.seats().values())


def test_standbys_that_are_lost_with_them_make_no_difference() -> None:
    world = started(nodes=140, active=70)
    world.hold = {"replace"}
    world.give({"kind": "node_lost", "node": world.seats()[0], "reason": "silent"})
    for _ in range(20):  # each that was to take rank 0
        assert world.state.recovery is not None
        (place,) = world.state.recovery.places.values()
        world.give({"kind": "node_lost", "node": place[0], "reason": "silent"})
    world.held = []
    world.release_held()
    assert world.state.recovery is not None and not world.ends()


def test_a_recovery_that_is_disturbed_again_and_again_is_given_up() -> None:
    """Here by an agent that comes and goes, with nothing more lost."""
    world = started()
    world.hold = {"replace"}
    world.dies("n3")
    for number in range(13):
        assert not world.ends(), number
        world.give({"kind": "node_joined", "node": "n4"})
    assert "disturbed 12 times, last: node n4 was away for a moment" in world.ends()[0].reason


@pytest.mark.parametrize("before", [(), ("drain",)])
def test_a_node_that_was_down_is_left_even_if_it_is_resumed(before: tuple[str, ...]) -> None:
    """It is not in the job any more; the new slurmd ends what runs there."""
    world = started()
    world.hold = {"join"}
    for kind in (*before, "down", "resume"):
        world.event(kind, "n3")
    assert not world.told("stop") and world.state.move is not None
    world.release_held()
    assert world.seats()[1] != "n3" and [release.node for release in world.releases()] == ["n3"]


def test_a_node_that_was_only_drained_stays_when_it_is_resumed() -> None:
    world = started()
    world.hold = {"join"}
    world.event("drain", "n3")
    world.event("resume", "n3")
    world.release_held()
    assert world.seats()[1] == "n3" and not world.releases()


def test_a_large_state_comes_from_several_replicas_on_different_nodes_at_once() -> None:
    world = started()
    for rank, name in world.seats().items():
        told = {"rank": rank, "step": 1, "key": "the same", "bytes": 1 << 30}
        world.give({"kind": "replica_key", "node": name, **told})
    world.hold = {"resolve"}
    world.dies("n3")
    serving = [tell for tell in world.held if tell.message["serve"] == [1]]
    assert sorted(tell.message["shares"]["1"] for tell in serving) == [[0, 3], [1, 3], [2, 3]]
    for tell in serving:
        assert not world.told("replace")
        number = tell.message["shares"]["1"][0]
        ready = {"epoch": 1, "rank": 1, "source": [tell.node, 5], "share": [number, 3]}
        world.give({"kind": "source_ready", "node": tell.node, "slot": 0, **ready})
    assert [source[0] for source in world.told("replace")[0].message["sources"]] == ["n2", "n4", "n5"]


def test_a_step_that_fails_again_and_again_without_a_loss_ends_the_job() -> None:
    world = started()
    for _ in range(6):
        broken = {"rank": 0, "lost": None, "why": "timeout", "epoch": world.state.epoch}
        world.give({"kind": "broken", "node": "n2", **broken})
        world.give({"kind": "accusations_due"})
    assert "step 7 failed 6 times" in world.ends()[0].reason and "timeout" in world.ends()[0].reason


def test_a_lost_node_is_cut_out_before_it_can_have_started_again() -> None:
    """Slurm 22.05 ends a step on all nodes when a node reports, after a reboot, that it does not know it."""
    world = started()
    for name in ("n3", "n6"):
        world.give({"kind": "node_lost", "node": name, "reason": "silent"})
    assert not world.releases()
    late = world.decisions.due(world.clock + 30)
    assert [(given["kind"], given["node"]) for given in late] == [
        ("lost_for_good", "n3"),
        ("lost_for_good", "n6"),
    ]
    for given in late:
        world.give(given)
    assert [release.node for release in world.releases()] == ["n3", "n6"]
    assert world.decisions.due(world.clock + 60) == []


def test_a_lost_node_that_has_come_back_stays() -> None:
    world = started()
    world.give({"kind": "node_lost", "node": "n3", "reason": "silent"})
    world.give({"kind": "node_joined", "node": "n3"})
    assert world.decisions.due(world.clock + 30) == []


def test_a_process_that_dies_before_it_has_its_rank_is_not_held_against_the_step() -> None:
    world = started(nodes=4)
    world.hold = {"interrupt"}
    world.dies("n3")
    world.spawn("n3")
    world.give({"kind": "led", "node": "n2", "term": 2})
    world.dies("n3")
    assert len(world.state.crashes) == 1 and world.state.nodes["n3"].failures == 1 and not world.ends()


def test_a_node_whose_agent_was_heard_to_end_is_cut_out_at_once() -> None:
    world = started()
    world.give({"kind": "node_lost", "node": "n3", "reason": "closed", "may_return": False})
    late = world.decisions.due(world.clock)
    assert [(given["kind"], given["node"]) for given in late] == [("lost_for_good", "n3")]
