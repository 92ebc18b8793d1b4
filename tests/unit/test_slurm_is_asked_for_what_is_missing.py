"""What the coordinator decides about further nodes: one is asked for where a place is missing, no more join
than places are, and nothing stays asked for that is not needed."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from decisions_world import World

from tm_slurm.coordinator.decide import Decisions
from tm_slurm.coordinator.model import JobState
from tm_slurm.coordinator.refilling import missing_places, why_not_admitted


def a_job(*, nodes: int = 3, active: int = 2, refill: bool = True, elastic: bool = False) -> World:
    world = World(nodes, active)
    world.plan.refill, world.plan.elastic = refill, elastic
    return world


def started(**options: object) -> World:
    world = a_job(**options)  # type: ignore[arg-type]
    world.start()
    return world


def coming(world: World) -> list[int]:
    return [ask.number for ask in world.state.asks.values() if ask.is_coming]


def joins(world: World, node: str, ask: int) -> None:
    """A standby job brings a node."""
    job = 70 + ask
    world.give({"kind": "standby_job", "ask": ask, "job": job})
    assert why_not_admitted(world.state, node, ask, job) == ""
    world.give({"kind": "node_joined", "node": node, "ask": ask, "job": job})
    world.spawn(node)


def test_a_node_that_was_given_back_is_asked_for_and_takes_the_place() -> None:
    world = started()
    world.event("drain", "n2")
    assert world.state.nodes["n2"].standing == "released" and coming(world) == [1]
    joins(world, "n7", 1)
    assert missing_places(world.state) == 0 and coming(world) == []
    assert world.state.nodes["n7"].standing == "standby"
    assert [told.message["rank"] for told in world.told("warm") if told.node == "n7"]
    world.event("drain", "n3")
    assert world.seats()[1] == "n7" and world.notes("refilled")[0]["node"] == "n7"


def test_nobody_is_asked_for_unless_the_config_says_so() -> None:
    world = started(refill=False)
    world.event("drain", "n2")
    assert world.state.nodes["n2"].standing == "released" and not world.state.asks


def test_a_rank_that_is_slow_to_start_is_not_replaced() -> None:
    world = a_job()
    world.start(without=("n2",))
    world.event("drain", "n3")
    assert not world.state.started and not world.state.asks
    world.give({"kind": "node_joined", "node": "n2"})
    assert not world.state.asks


def test_a_standby_that_is_slow_to_start_is_not_replaced() -> None:
    world = a_job(nodes=4)
    world.start(without=("n4",))
    assert world.state.started and world.state.nodes["n4"].standing == "standby" and not world.state.asks


def test_members_and_failed_nodes_are_never_asked_for_but_drained_ones_may_come_back() -> None:
    world = started(nodes=5, active=3)
    world.event("drain", "n2")
    assert world.state.asks[1].exclude == ("n1", "n3", "n4", "n5")
    world.give({"kind": "node_lost", "node": "n3", "reason": "silence", "may_return": False})
    world.give({"kind": "lost_for_good", "node": "n3"})
    assert world.state.nodes["n3"].standing == "released"
    assert world.state.asks[2].exclude == ("n1", "n3", "n4", "n5")


def test_a_node_that_was_resumed_may_be_given_again_at_once() -> None:
    """What waits in the queue already excludes it, so it is asked for anew; it comes as a node like any
    other, with nothing of what was said to it before."""
    world = started(nodes=5, active=3)
    world.event("drain", "n2")
    world.event("drain", "n3")
    assert coming(world) == [1, 2] and "n3" in world.state.asks[1].exclude
    world.event("resume", "n3")
    assert world.state.asks[1].unwanted and coming(world) == [2, 3]
    joins(world, "n3", 2)
    assert world.state.nodes["n3"].job_id == 72 and world.state.nodes["n3"].notice is None


def test_two_places_are_asked_for_at_once_and_each_takes_one() -> None:
    world = started(nodes=6, active=4)
    world.event("drain", "n2", "n3")
    assert coming(world) == [1, 2]
    joins(world, "n7", 2)
    assert coming(world) == [1] and missing_places(world.state) == 1
    joins(world, "n8", 1)
    assert missing_places(world.state) == 0


@pytest.mark.parametrize(
    ("node", "ask", "job", "why"),
    [
        ("n7", None, None, ""),  # the ordinary door knows what to do with strangers
        ("n7", 9, 79, "not one that is asked for"),
        ("n7", 1, 99, "not one that is asked for"),
        ("n1", 1, 71, "in this job already"),
        ("n7", 1, 71, ""),
    ],
)
def test_only_who_was_asked_for_may_join(node: str, ask: int | None, job: int | None, why: str) -> None:
    world = started()
    world.event("drain", "n2")
    world.give({"kind": "standby_job", "ask": 1, "job": 71})
    said = why_not_admitted(world.state, node, ask, job)
    assert (why in said) if why else said == ""


def test_a_job_brings_one_node_once_and_its_agent_may_connect_again() -> None:
    world = started()
    world.event("drain", "n2")
    joins(world, "n7", 1)
    assert "has brought node n7" in why_not_admitted(world.state, "n8", 1, 71)
    assert why_not_admitted(world.state, "n7", 1, 71) == ""
    process = world.state.nodes["n7"].processes[0]
    world.give({"kind": "agent_away", "node": "n7"})
    world.give({"kind": "node_joined", "node": "n7", "ask": 1, "job": 71})
    assert world.state.nodes["n7"].processes[0] is process and len(world.notes("refilled")) == 1


def test_an_agent_of_the_training_job_cannot_take_the_name_of_a_node_that_came_back() -> None:
    world = started()
    world.event("drain", "n2")
    world.event("resume", "n2")
    joins(world, "n2", 1)
    assert "by another job now" in why_not_admitted(world.state, "n2")


def test_a_place_that_is_not_missing_any_more_is_not_filled() -> None:
    world = started(elastic=True, refill=False, nodes=2, active=2)
    world.event("drain", "n2")
    assert coming(world) == [1]
    world.event("resume", "n2")
    assert world.state.asks[1].unwanted and "no place" in why_not_admitted(world.state, "n7", 1, 71)
    world.give({"kind": "standby_job_over", "ask": 1})
    assert not world.state.asks and world.state.ask_again_at == 0.0


def test_an_elastic_job_without_standbys_asks_when_a_notice_comes_and_moves_there() -> None:
    world = started(
        elastic=True,
        refill=False,
        nodes=2,
        active=2,
    )
    assert not world.state.asks
    world.event("drain", "n2")
    assert coming(world) == [1] and world.seats()[1] == "n2"
    joins(world, "n7", 1)
    assert world.seats()[1] == "n7" and world.state.nodes["n2"].standing == "released"
    assert coming(world) == []


def test_a_node_that_has_come_for_one_that_is_resumed_is_given_back() -> None:
    world = started(elastic=True, refill=False, nodes=2, active=2)
    world.hold = {"prepare_leave"}
    world.event("drain", "n2")
    joins(world, "n7", 1)
    assert world.state.move is not None and world.state.nodes["n7"].standing == "standby"
    world.event("resume", "n2")
    assert world.state.move is None and world.state.nodes["n7"].standing == "released"
    assert coming(world) == [] and "n7" not in world.decisions._excluded()


def test_standbys_of_the_job_itself_are_kept_although_an_elastic_job_needs_none() -> None:
    world = started(elastic=True, refill=False, nodes=4, active=2)
    world.event("drain", "n2")
    assert [n.name for n in world.state.nodes.values() if n.standing == "standby"] != []


def test_an_elastic_job_with_a_free_standby_asks_for_nothing() -> None:
    world = started(elastic=True, refill=False, nodes=3, active=2)
    world.event("drain", "n2")
    assert world.state.moves_done == 1 and not world.state.asks


def test_what_brings_no_node_is_asked_for_again_later_and_later() -> None:
    world = started()
    world.event("drain", "n2")
    pauses = []
    for number in range(1, 10):
        assert coming(world) == [number]
        world.give({"kind": "standby_job_over", "ask": number})
        assert coming(world) == []
        pauses.append(world.state.ask_again_at - world.clock)
        assert world.decisions.due(world.state.ask_again_at - 0.01) == []
        world.clock = world.state.ask_again_at
        (due,) = world.decisions.due(world.clock)
        world.give(due)
    assert pauses[0] == pytest.approx(5.0) and pauses[1] == pytest.approx(10.0) and pauses[-1] == 300.0


def test_a_refusal_waits_unless_what_is_excluded_changes() -> None:
    world = started(nodes=5, active=3)
    world.event("drain", "n2")
    world.give({"kind": "standby_job_refused", "ask": 1, "why": "no such partition"})
    assert not world.state.asks and world.notes("ask_refused")[0]["why"] == "no such partition"
    world.event("drain", "n4")
    assert len(coming(world)) == 2


def test_when_training_is_done_nothing_stays_asked_for() -> None:
    world = started()
    world.event("drain", "n2")
    for rank, node in world.seats().items():
        slot = world.state.seats[rank][1]
        incarnation = world.state.nodes[node].processes[slot].incarnation
        done = {"node": node, "slot": slot, "incarnation": incarnation, "rank": rank}
        world.give({"kind": "rank_done", **done, "step": 60, "digest": "d"})
    assert coming(world) == [] and missing_places(world.state) == 0


def test_ranks_that_wait_for_a_node_get_one_at_once() -> None:
    """Not only when the lost node would be too late for coming back."""
    world = a_job(nodes=2, active=2)
    world.plan.on_no_standby = ("wait", "fail")
    world.start()
    world.give({"kind": "node_lost", "node": "n2", "reason": "silence"})
    assert coming(world) == [1] and "n2" in world.state.asks[1].exclude
    joins(world, "n7", 1)
    assert world.seats()[1] == "n7" and world.state.recoveries_done == 1


def test_a_warning_of_a_standby_jobs_end_moves_its_node_and_stops_nothing() -> None:
    world = started()
    world.event("drain", "n2")
    joins(world, "n7", 1)
    world.event("drain", "n3")
    assert world.seats()[1] == "n7"
    world.give({"kind": "time_limit", "node": "n7", "reason": "SIGUSR2"})
    assert not world.state.stopping and world.seats()[1] == "n7"
    joins(world, "n8", 2)
    assert world.seats()[1] == "n8" and world.state.nodes["n7"].standing == "released"


def test_a_new_leader_finds_the_same_asks() -> None:
    world = started(nodes=5, active=3)
    world.event("drain", "n2")
    world.give({"kind": "standby_job", "ask": 1, "job": 71})
    world.event("drain", "n3")
    again = Decisions(JobState.initial(world.plan), "n4")
    for given in world.journal:
        again.handle(dict(given))
    assert asdict(again.state)["asks"] == asdict(world.state)["asks"] and len(world.state.asks) == 2
