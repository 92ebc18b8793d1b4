"""A change of a node's state is one event; silence, repetition and failed polls are none."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tm_slurm.events import Episodes, Event, EventKind, NodeWatch
from tm_slurm.slurm import NodeInfo, NodeState
from tm_slurm.slurm.scontrol_text import parse_nodes


def node(
    state: str, name: str = "n3", reason: str = "disk", reason_at: float | None = 100.0
) -> dict[str, NodeInfo]:
    return {name: NodeInfo(name=name, state=NodeState.parse(state), reason=reason, reason_at=reason_at)}


class Story:
    """Looks at one node again and again, a second apart."""

    def __init__(self) -> None:
        self.watch = NodeWatch()
        self.now = 1000.0

    def sees(self, state: str | None, reason_at: float | None = 100.0) -> Event | None:
        self.now += 1
        found = self.watch.observe(None if state is None else node(state, reason_at=reason_at), self.now)
        assert len(found) <= 1
        return found[0] if found else None


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        ("MIXED+DRAIN", "drain"),
        ("IDLE+DRAIN", "drain"),
        ("MIXED+FAIL", "fail"),
        ("DOWN*", "down"),
        ("MIXED+REBOOT_REQUESTED", "reboot"),
        ("MIXED+DRAIN+REBOOT_REQUESTED", "reboot"),
        ("ALLOCATED+MAINTENANCE+RESERVED", "maintenance"),
        ("MIXED+DRAIN+MAINTENANCE", "drain"),
    ],
)
def test_a_node_that_has_to_be_left_is_an_event(state: str, kind: str) -> None:
    story = Story()
    assert story.sees("MIXED") is None
    event = story.sees(state)
    assert event is not None
    assert (event.kind, event.node, event.source, event.reason) == (kind, "n3", "poll", "disk")
    assert event.at == story.now and event.rank is None and event.deadline is None


def test_a_node_that_drains_already_at_the_first_look_is_an_event() -> None:
    event = Story().sees("MIXED+DRAIN")
    assert event is not None and event.kind == "drain"


def test_the_same_state_again_is_no_event() -> None:
    story = Story()
    assert story.sees("MIXED+DRAIN") is not None
    assert story.sees("MIXED+DRAIN") is None
    assert story.sees("IDLE+COMPLETING+DRAIN") is None
    assert story.sees("IDLE+DRAIN") is None


def test_a_failed_poll_changes_nothing() -> None:
    """A failed sinfo call was read as "nothing is drained", and a move under way was cancelled."""
    story = Story()
    first = story.sees("MIXED+DRAIN")
    assert first is not None
    assert story.sees(None) is None
    assert story.watch.observe({}, 2000.0) == []
    assert story.sees("MIXED+DRAIN") is None


def test_resume_is_an_event_and_the_next_drain_another_one() -> None:
    story = Story()
    first = story.sees("MIXED+DRAIN", reason_at=100.0)
    resumed = story.sees("MIXED", reason_at=None)
    second = story.sees("MIXED+DRAIN", reason_at=160.0)
    assert first is not None and resumed is not None and second is not None
    assert resumed.kind == "resume" and resumed.node == "n3"
    assert second.kind == "drain"
    assert len({first.id, resumed.id, second.id}) == 3


def test_a_second_drain_is_another_one_even_if_slurm_gives_it_the_same_time() -> None:
    story = Story()
    first = story.sees("MIXED+DRAIN", reason_at=100.0)
    story.sees("MIXED")
    second = story.sees("MIXED+DRAIN", reason_at=100.0)
    assert first is not None and second is not None and first.id != second.id


def test_two_observers_give_the_same_fact_the_same_id() -> None:
    """A leader that takes over, and one that was there all the time."""
    early, late = Story(), Story()
    early.sees("MIXED")
    first = early.sees("MIXED+DRAIN", reason_at=100.0)
    late.now += 60
    second = late.sees("MIXED+DRAIN", reason_at=100.0)
    assert first is not None and second is not None and first.id == second.id


def test_another_source_gives_the_same_fact_the_same_id() -> None:
    story = Story()
    from_trigger = story.watch.episodes.begin("down", "n3", 5000.0)
    assert story.sees("DOWN*") is None, "the poll has nothing new to say"
    assert story.watch.episodes.begin("down", "n3", 6000.0) == from_trigger


def test_a_draining_node_that_dies_is_one_more_event() -> None:
    story = Story()
    drained = story.sees("MIXED+DRAIN")
    died = story.sees("DOWN*+DRAIN", reason_at=130.0)
    assert drained is not None and died is not None
    assert died.kind == "down" and died.id != drained.id


def test_what_is_less_urgent_than_what_is_known_is_no_event() -> None:
    story = Story()
    assert story.sees("MIXED+FAIL") is not None
    assert story.sees("MIXED+FAIL+DRAIN") is None
    assert story.sees("MIXED+FAIL+DRAIN+MAINTENANCE") is None


def test_a_node_resumes_only_when_nothing_is_left_to_say_against_it() -> None:
    story = Story()
    story.sees("MIXED+DRAIN+MAINTENANCE")
    assert story.sees("MIXED+MAINTENANCE") is None
    resumed = story.sees("MIXED")
    assert resumed is not None and resumed.kind == "resume"


def test_a_dead_node_is_back_when_it_answers_not_when_it_is_called_idle() -> None:
    story = Story()
    story.sees("DOWN*")
    assert story.sees("IDLE+NOT_RESPONDING", reason_at=None) is None
    resumed = story.sees("IDLE", reason_at=None)
    assert resumed is not None and resumed.kind == "resume"


def test_a_resumed_node_that_answers_late_is_resumed_at_once() -> None:
    """slurmctld marks a resumed node as not responding for a moment."""
    story = Story()
    story.sees("MIXED+DRAIN")
    resumed = story.sees("MIXED+NOT_RESPONDING", reason_at=None)
    assert resumed is not None and resumed.kind == "resume"


def test_a_node_that_slurmctld_knows_nothing_of_is_not_healthy_again() -> None:
    story = Story()
    story.sees("MIXED+DRAIN")
    assert story.sees("UNKNOWN", reason_at=None) is None
    assert story.sees("MIXED+DRAIN") is None


def test_a_state_without_a_reason_is_its_own_reason() -> None:
    (event,) = NodeWatch().observe(node("ALLOCATED+MAINTENANCE", reason="", reason_at=None), 1000.0)
    assert event.reason == "node state ALLOCATED+MAINTENANCE"


def test_recorded_states_of_a_whole_cluster() -> None:
    golden = Path(__file__).with_name("golden")
    watch = NodeWatch()
    leaving = watch.observe(parse_nodes((golden / "scontrol_nodes_leaving.txt").read_text()), 1000.0)
    assert [(event.node, event.kind) for event in leaving] == [
        ("n1", "reboot"),
        ("n2", "drain"),
        ("n3", "fail"),
        ("n4", "reboot"),
        ("n6", "drain"),
    ]
    assert leaving[1].reason == "disk State=IDLE fan=3"
    resumed = watch.observe(parse_nodes((golden / "scontrol_nodes_resumed.txt").read_text()), 1001.0)
    assert [(event.node, event.kind) for event in resumed] == [
        (name, "resume") for name in ("n1", "n2", "n3", "n4", "n6")
    ]
    down = watch.observe(parse_nodes((golden / "scontrol_nodes_one_down.txt").read_text()), 1002.0)
    assert [(event.node, event.kind, event.reason) for event in down] == [("n4", "down", "Not responding")]


_STATES = st.sampled_from(
    ["MIXED", "MIXED+DRAIN", "IDLE+DRAIN", "DOWN*", "MIXED+FAIL", "UNKNOWN", "MIXED+MAINTENANCE", None]
)


@given(st.lists(_STATES, max_size=30))
def test_notices_and_resumes_alternate_whatever_happens(states: list[str | None]) -> None:
    story = Story()
    events = [event for state in states if (event := story.sees(state)) is not None]
    assert len({event.id for event in events}) == len(events), "no id twice"
    resumed = True
    for event in events:
        assert not (event.kind == "resume" and resumed), "a resume follows a notice"
        resumed = event.kind == "resume"
    last = next((state for state in reversed(states) if state not in {None, "UNKNOWN"}), None)
    if last == "MIXED":
        assert resumed, "a healthy node is left with no notice open"
    elif last is not None:
        assert not resumed, "a node to be left has its notice open"


def test_a_new_leader_knows_what_the_old_one_knew() -> None:
    kinds: tuple[EventKind, ...] = ("drain", "maintenance")
    old = NodeWatch()
    events = old.observe(node("MIXED+DRAIN+MAINTENANCE", reason_at=None), 1000.0)
    events += old.observe(node("MIXED", reason_at=None), 1001.0)
    events += old.observe(node("MIXED+DRAIN", reason_at=None), 1002.0)
    episodes = Episodes()
    episodes.restore(events)
    new = NodeWatch(episodes)
    assert new.observe(node("MIXED+DRAIN", reason_at=None), 2000.0) == []
    assert episodes.holding("n3") == {kinds[0]}
    (resumed,) = new.observe(node("MIXED", reason_at=None), 2001.0)
    assert resumed.kind == "resume"
