"""Reservations over the job's nodes, without Slurm and without a clock: what is a window, when nodes are
left, when the whole job stops, and that a window that is put off changes all that back."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
from decisions_world import World
from hypothesis import given, settings
from hypothesis import strategies as st

from tm_slurm.coordinator.decide import Decisions
from tm_slurm.coordinator.model import JobState
from tm_slurm.events import NodeWatch, Window, windows_of
from tm_slurm.slurm import NodeInfo, NodeState, ReservationInfo
from tm_slurm.slurm.scontrol_text import ScontrolFormatError, parse_jobs, parse_reservations

GOLDEN = Path(__file__).with_name("golden")
NODES = ("n1", "n2", "n3", "n4")
WALL = 1_000_000.0
"""How far the wall clock is ahead of the job's time in these tests."""


# ---- what is a window ----


def reservation(**changes: Any) -> ReservationInfo:
    plain = {"name": "r", "nodes": ("n9", "n3"), "start_time": 500.0, "end_time": 900.0, "cpus": 8}
    return ReservationInfo(**{**plain, **changes})


def windows(*reservations: ReservationInfo, **known: Any) -> list[Window]:
    settings = {"nodes": NODES, "own": (), "cpus": {"n9": 4, "n3": 4}, "now": 100.0, **known}
    return windows_of(reservations, **settings)


@pytest.mark.parametrize(
    ("changes", "known", "expected"),
    [
        ({}, {}, True),
        ({"flags": frozenset({"MAINT", "IGNORE_JOBS"})}, {}, True),
        ({"nodes": ("n9",)}, {}, False),  # none of the job's nodes
        ({"nodes": ()}, {}, False),  # licences, say
        ({}, {"own": ("r",)}, False),  # the job runs in it
        ({"flags": frozenset({"MAINT"})}, {"own": ("r",)}, False),
        ({}, {"own": ("other",)}, True),
        ({}, {"now": 900.0}, False),  # over
        ({}, {"now": 899.0}, True),  # open
        ({"flags": frozenset({"TIME_FLOAT"})}, {}, False),
        ({}, {"ends": 500.0}, False),  # the job's time is over before
        ({}, {"ends": 501.0}, True),
        ({"cpus": 7}, {}, False),  # a part of the nodes
        ({"cpus": 7, "flags": frozenset({"MAINT"})}, {}, True),
        ({"cpus": 7}, {"cpus": {"n3": 4}}, True),  # nobody knows how many the other has
        ({"cpus": None}, {}, True),
    ],
)
def test_which_reservations_are_windows(changes: Any, known: Any, expected: bool) -> None:
    assert bool(windows(reservation(**changes), **known)) is expected


def test_windows_name_the_jobs_nodes_alone_and_come_in_the_order_of_their_beginnings() -> None:
    later = reservation(name="later", start_time=600.0, nodes=("n4", "n2"), cpus=None)
    assert [(window.name, window.nodes) for window in windows(later, reservation())] == [
        ("r", ("n3",)),
        ("later", ("n2", "n4")),
    ]


def test_a_window_that_is_put_off_is_another_one() -> None:
    (before,), (after,) = windows(reservation()), windows(reservation(start_time=560.0))
    assert before.id != after.id
    assert Window.from_json(before.to_json()) == before


def test_recorded_reservations_are_read_as_slurm_meant_them() -> None:
    found = parse_reservations((GOLDEN / "scontrol_reservations.txt").read_text())
    assert set(found) == {"b", "core", "flt", "whole"}
    assert found["b"] == ReservationInfo(
        name="b",
        nodes=("n1", "n2"),
        start_time=1795986585.0,
        end_time=1795987185.0,
        flags=frozenset({"MAINT", "IGNORE_JOBS", "SPEC_NODES"}),
        cpus=8,
    )
    cpus = dict.fromkeys(NODES, 4)
    over = windows_of(found.values(), nodes=NODES, own=(), cpus=cpus, now=1795986000.0)
    assert [window.name for window in over] == ["b", "whole"]
    assert parse_reservations("No reservations in the system\n") == {}
    with pytest.raises(ScontrolFormatError, match="StartTime"):
        parse_reservations("ReservationName=x Nodes=n1\n")


def test_a_job_says_which_reservations_it_runs_in_and_when_it_was_preempted() -> None:
    line = (
        "JobId=1 JobName=x UserId=u(1) GroupId=g(1) JobState=RUNNING PreemptTime=1795986585 Reservation=a,b "
    )
    (job,) = parse_jobs(line)
    assert job.reservations == ("a", "b") and job.preempt_time == 1795986585.0
    (job,) = parse_jobs("JobId=1 JobName=x UserId=u(1) GroupId=g(1) JobState=RUNNING PreemptTime=None")
    assert job.reservations == () and job.preempt_time is None


def test_maintenance_of_the_jobs_own_reservation_is_no_reason_to_leave() -> None:
    def seen(state: str, *at_home: str) -> list[str]:
        nodes = {"n3": NodeInfo(name="n3", state=NodeState.parse(state))}
        return [event.kind for event in NodeWatch().observe(nodes, 1000.0, at_home=at_home)]

    assert seen("MIXED+MAINTENANCE+RESERVED") == ["maintenance"]
    assert seen("MIXED+MAINTENANCE+RESERVED", "n3") == []
    assert seen("MIXED+DRAIN+MAINTENANCE", "n3") == ["drain"]
    assert seen("MIXED+MAINTENANCE", "n4") == ["maintenance"]


# ---- what is decided ----


class Windows(World):
    """A job whose time runs on by `wait`, and that Slurm tells what it has in store."""

    def __init__(
        self,
        *,
        lead_s: float | None = 100.0,
        policies: tuple[str, ...] = ("fail",),
        without: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        self.plan.window_lead_s, self.plan.stop_lead_s = lead_s, 20.0
        self.plan.on_no_standby = policies
        self.start(without=without)

    def foresee(
        self, *windows: tuple[str, str, float], starts: float = 0.0, ends: float | None = None
    ) -> None:
        """Each window: its name, its nodes, and in how many seconds it opens; it is open for 50."""
        wall = WALL + self.clock + 1.0
        listed = [
            {"name": name, "nodes": nodes.split(), "opens": wall + opens, "closes": wall + opens + 50.0}
            for name, nodes, opens in windows
        ]
        found = {"windows": listed, "starts": WALL + starts, "ends": None if ends is None else WALL + ends}
        self.give({"kind": "outlook", "wall": wall, **found})

    def wait(self, seconds: float) -> list[dict[str, Any]]:
        """Let time pass; what was due then was given."""
        self.clock += seconds
        due = self.decisions.due(self.clock)
        for given_ in due:
            self.give(given_)
        return due


def test_nodes_are_left_a_lead_before_the_window_opens_and_not_before() -> None:
    world = Windows()
    world.foresee(("w", "n3", 150.0))
    assert world.wait(45.0) == [] and world.seats()[1] == "n3"
    assert world.wait(10.0) and world.seats()[1] == "n6"
    assert [release.node for release in world.releases()] == ["n3"]
    assert world.wait(100.0) == [], "a node that was left is not left again"
    assert world.notes("event_maintenance")[0]["reason"] == "reservation w"


def test_nodes_of_one_window_are_one_epoch() -> None:
    world = Windows()
    world.foresee(("w", "n3 n4", 90.0))
    world.wait(0.0)
    assert world.state.epoch == 1 and world.seats() == {0: "n2", 1: "n6", 2: "n1", 3: "n5"}


def test_the_lead_grows_with_what_preparing_has_taken_unless_the_config_says_how_long() -> None:
    for lead, opens, expected in ((None, 590.0, True), (None, 610.0, False), (30.0, 590.0, False)):
        world = Windows(lead_s=lead)
        world.foresee(("w", "n3", opens))
        assert bool(world.wait(0.0)) is expected
    world = Windows(lead_s=None)
    world.state.prepared_s = 300.0
    world.foresee(("w", "n3", 890.0))
    assert world.wait(0.0)


def test_what_preparing_takes_is_learned_from_moves() -> None:
    world = Windows()
    world.event("drain", "n2")
    (prepared,) = world.notes("prepared")
    assert world.state.prepared_s == prepared["seconds"] > 0


def test_a_joiner_is_not_in_a_window_itself() -> None:
    world = Windows()
    world.foresee(("w", "n3 n6", 90.0))
    world.wait(0.0)
    assert world.seats()[1] == "n1" and {r.node for r in world.releases()} == {"n3", "n6"}


def test_a_standby_that_would_have_to_be_left_soon_does_not_join() -> None:
    world = Windows()
    world.foresee(("w", "n3 n4", 90.0), ("next", "n6", 150.0))
    world.wait(0.0)
    assert world.seats() == {0: "n2", 1: "n1", 2: "n4", 3: "n5"}, "n6 is reserved 60 s later"
    assert [fields["node"] for fields in world.notes("waiting")] == ["n4"]


def test_a_standby_in_a_window_to_come_is_better_than_none_for_a_drained_node() -> None:
    world = Windows()
    world.foresee(("w", "n6", 150.0))
    world.event("drain", "n3")
    assert world.seats()[1] == "n1", "the other one first"
    world.event("drain", "n4")
    assert world.seats()[2] == "n6"


@pytest.mark.parametrize("phase", ["join", "go"])
@pytest.mark.parametrize("instead", [(), (("w", "n3", 500.0),), (("w", "n5", 500.0),)])
def test_a_window_that_is_deleted_or_put_off_or_moved_away_cancels(phase: str, instead: Any) -> None:
    world = Windows()
    world.hold = {phase}
    world.foresee(("w", "n3", 90.0))
    world.wait(0.0)
    assert world.state.move is not None
    world.foresee(*instead)
    assert world.state.move is None and world.seats()[1] == "n3" and not world.releases()
    assert world.state.nodes["n3"].notice is None and world.wait(0.0) == []


def test_a_window_that_is_put_off_a_little_is_still_left() -> None:
    world = Windows()
    world.hold = {"join"}
    world.foresee(("w", "n3", 50.0))
    world.wait(0.0)
    world.foresee(("w", "n3", 95.0))
    assert world.state.move is not None and not world.notes("cancelled")


def test_a_drain_holds_when_the_window_is_deleted() -> None:
    world = Windows()
    world.hold = {"join"}
    world.foresee(("w", "n3", 90.0))
    world.wait(0.0)
    world.event("drain", "n3")
    world.foresee()
    assert world.state.move is not None and world.state.nodes["n3"].notice is not None
    world.event("resume", "n3")
    assert world.state.move is None


def test_the_window_holds_when_the_drain_is_taken_back() -> None:
    world = Windows()
    world.hold = {"join"}
    world.event("drain", "n3")
    world.foresee(("w", "n3", 90.0))
    assert world.wait(0.0) == [], "it is being left already"
    world.event("resume", "n3")
    assert world.wait(0.0) and world.state.move is not None


# ---- the whole job ----

ALL = "n1 n2 n3 n4 n5 n6"


def checkpoint_written(world: World, step: int = 7) -> None:
    for rank, (node, slot) in world.state.seats.items():
        me = {"node": node, "slot": slot, "incarnation": world.state.nodes[node].processes[slot].incarnation}
        done = {"rank": rank, "step": step, "epoch": world.state.epoch, "seconds": 2.0}
        world.give({"kind": "checkpoint_written", **me, **done})
    node, slot = world.state.seats[0]
    me = {"node": node, "slot": slot, "incarnation": world.state.nodes[node].processes[slot].incarnation}
    world.give({"kind": "checkpoint_published", **me, "step": step, "path": "/x"})


def test_the_whole_job_in_a_window_is_requeued_with_a_checkpoint_until_it_has_closed() -> None:
    world = Windows()
    world.foresee(("w", ALL, 90.0))
    assert world.wait(60.0) == [], "nobody could take the ranks, and there is time"
    assert world.wait(15.0) and [tell.node for tell in world.told("checkpoint")] == ["n2"]
    assert not world.ends() and not world.notes("prepare")
    closes = world.state.windows[0].closes
    checkpoint_written(world)
    (end,) = world.ends()
    assert end.state == "requeue" and end.begins == closes and "checkpoint at step 7" in end.reason
    assert world.state.verdict is not None and world.state.verdict["begins"] == closes


def test_several_windows_over_the_whole_job_are_waited_for_all() -> None:
    world = Windows()
    world.foresee(("a", "n1 n2 n3", 15.0), ("b", "n4 n5 n6", 30.0))
    world.wait(0.0)
    assert world.state.begins == world.state.windows[1].closes


def test_a_window_that_is_deleted_while_the_job_stops_lets_it_go_on() -> None:
    world = Windows()
    world.foresee(("w", ALL, 15.0))
    world.wait(0.0)
    world.foresee()
    checkpoint_written(world)
    assert not world.ends() and world.state.begins is None and world.state.checkpoint is not None
    world.foresee(("w", ALL, 15.0))
    assert world.wait(0.0), "and the next one counts again"


def test_a_short_lead_does_not_take_the_time_for_the_last_checkpoint() -> None:
    world = Windows(lead_s=5.0)
    world.foresee(("w", ALL, 40.0))
    assert world.wait(15.0) == []
    assert world.wait(10.0)[0]["kind"] == "stop_due"


def test_the_time_limit_holds_when_the_window_that_the_job_stops_for_is_deleted() -> None:
    world = Windows()
    world.foresee(("w", ALL, 15.0))
    world.wait(0.0)
    world.give({"kind": "time_limit", "node": "n2", "reason": "SIGUSR2"})
    world.foresee()
    checkpoint_written(world)
    (end,) = world.ends()
    assert end.state == "requeue" and end.begins is None


def test_a_standby_on_its_way_back_from_a_cancelled_window_is_waited_for_at_the_start() -> None:
    world = Windows(without=("n3",))
    world.hold = {"retire"}
    world.foresee(("w", "n1 n6", 90.0))
    world.wait(0.0)
    world.foresee()
    world.give({"kind": "start_expired"})
    assert not world.ends()
    world.release_held()
    world.give({"kind": "start_expired"})
    assert world.state.started and world.seats()[1] in ("n1", "n6")


def test_a_standby_that_never_came_could_not_go_on() -> None:
    world = Windows(without=("n6",))
    world.foresee(("w", "n1 n2 n3 n4 n5", 15.0))
    assert world.wait(0.0)[0]["whole"]


def test_a_job_that_has_not_started_is_requeued_before_its_window() -> None:
    world = World()
    world.plan.window_lead_s = 100.0
    world.start(without=("n3",))
    at = WALL + world.clock + 1.0
    whole = {"name": "w", "nodes": ALL.split(), "opens": at + 10.0, "closes": at + 60.0}
    world.give({"kind": "outlook", "wall": at, "windows": [whole], "starts": None, "ends": None})
    for given_ in world.decisions.due(world.clock):
        world.give(given_)
    (end,) = world.ends()
    assert (end.state, end.begins) == ("requeue", at + 60.0)


@pytest.mark.parametrize(("policies", "stops"), [(("fail",), False), (("double-up", "requeue"), True)])
def test_ranks_that_nobody_can_take_go_back_into_the_queue_if_the_config_says_so(
    policies: tuple[str, ...], stops: bool
) -> None:
    world = Windows(policies=policies)
    world.foresee(("w", "n2 n3 n4", 90.0))
    world.wait(0.0)
    assert [fields["node"] for fields in world.notes("waiting")] == ["n4"]
    assert "delete the reservation" in world.comments()[-1]
    assert world.wait(50.0) == []
    assert bool(world.wait(25.0)) is stops
    assert bool(world.state.stopping) is stops and world.state.begins is None


# ---- the job's time ----


@pytest.mark.parametrize(
    ("checkpoint_s", "length", "stop_s_before"),
    [(5.0, 1000.0, None), (50.0, 1000.0, 150.0), (300.0, 1000.0, 500.0)],
)
def test_the_time_limit_leaves_time_for_a_checkpoint_as_long_as_the_last(
    checkpoint_s: float, length: float, stop_s_before: float | None
) -> None:
    """Before Slurm's own warning only where that comes too late, and never in the first half of the time."""
    world = Windows()
    world.foresee(ends=length)
    world.state.checkpoint_s = checkpoint_s  # learned while the outlook has not changed
    if stop_s_before is None:
        assert world.wait(length - world.clock - 1.0) == []
        return
    assert world.wait(length - world.clock - stop_s_before - 5.0) == []
    assert world.wait(10.0)[0]["why"] == "time_limit"
    assert world.state.stopping.startswith("time_limit") and world.state.begins is None


def test_what_a_checkpoint_takes_is_learned() -> None:
    world = Windows()
    checkpoint_written(world)
    assert world.state.checkpoint_s == 2.0


def test_a_window_that_has_closed_while_it_was_due_still_says_when_to_begin() -> None:
    world = Windows()
    world.foresee(("w", ALL, 0.0))
    world.clock += 49.0
    (given_,) = world.decisions.due(world.clock)
    world.give(given_)  # a second later, when it has closed
    assert world.state.begins == world.state.windows[0].closes


# ---- whatever happens ----

_TOLD = st.lists(
    st.tuples(
        st.sampled_from(["a", "b"]), st.sampled_from(["n3", "n2 n3", "n6", ALL]), st.floats(0.0, 200.0)
    ),
    max_size=2,
    unique_by=lambda told: told[0],
)
_HAPPENINGS = st.lists(
    st.one_of(
        st.tuples(st.just("foresee"), _TOLD),
        st.tuples(st.just("wait"), st.floats(0.0, 120.0)),
        st.tuples(st.sampled_from(["drain", "resume"]), st.sampled_from(["n2", "n3", "n6"])),
    ),
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(_HAPPENINGS)
def test_a_new_leader_that_replays_the_journal_knows_the_same(happenings: list[tuple[str, Any]]) -> None:
    world = Windows()
    for what, value in happenings:
        if what == "foresee":
            world.foresee(*value)
        elif what == "wait":
            world.wait(value)
            rounds = itertools.takewhile(bool, (world.wait(0.0) for _ in range(20)))  # giving takes time, too
            assert sum(1 for _ in rounds) < 20, "what was due was done"
        else:
            world.event(what, value)
        for node in world.state.nodes.values():
            if node.notice is not None and node.notice.window and node.standing in ("active", "standby"):
                assert any(node.name in window.nodes for window in world.state.windows), "of a window that is"
    replayed = Decisions(JobState.initial(world.plan), "n1")
    for given_ in world.journal:
        replayed.handle(given_)
    assert dataclasses.asdict(replayed.state) == dataclasses.asdict(world.state)
    assert replayed.due(world.clock + 500.0) == world.decisions.due(world.clock + 500.0)
