"""A leader that is new to a rank process hears everything that is still true of it, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tm_slurm.agent.facts import ENDS, LASTING, OF_AN_EPOCH, OF_THE_PROCESS, Facts


def say(kind: str, epoch: int | None = None, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, **({} if epoch is None else {"epoch": epoch}), **fields}


def told(*messages: dict[str, Any]) -> list[str]:
    facts = Facts()
    for message in messages:
        facts.take(message)
    return [message["kind"] for message in facts.told()]


@pytest.mark.parametrize("kind", sorted(LASTING))
def test_whatever_lasts_is_told_until_the_next_of_its_kind(kind: str) -> None:
    facts = Facts()
    facts.take(say(kind, 1, n=1))
    facts.take(say(kind, 1, n=2))
    assert [message["n"] for message in facts.told()] == [2]


def test_what_passes_is_not_told_again() -> None:
    assert told(say("private", 1), say("whereabouts", 1)) == []


@pytest.mark.parametrize("kind", sorted(OF_AN_EPOCH))
def test_what_was_said_of_an_older_epoch_is_dropped(kind: str) -> None:
    assert told(say(kind, 1), say("survivor", 2)) == ["survivor"]
    assert told(say("survivor", 2), say(kind, 1)) == ["survivor"], "a late one is not true either"


@pytest.mark.parametrize("kind", sorted(OF_THE_PROCESS - {"rank_done"}))
def test_what_is_true_of_the_process_does_not_depend_on_an_epoch(kind: str) -> None:
    assert told(say(kind, 1), say("survivor", 2)) == [kind, "survivor"]


def test_a_process_that_runs_at_a_newer_epoch_has_left_the_older_one_behind() -> None:
    facts = Facts()
    for message in (say("process_ready"), say("leaver_prepared", 2), say("stopped", 2)):
        facts.take(message)
    facts.runs_at(1)
    assert [m["kind"] for m in facts.told()] == ["process_ready", "leaver_prepared", "stopped"]
    facts.runs_at(3)
    assert [m["kind"] for m in facts.told()] == ["process_ready"]


def test_a_joiner_in_the_middle_of_a_switch() -> None:
    story = [say("process_ready"), say("process_warm", rank=1), say("joined", 1), say("resumed", 1)]
    assert told(*story) == ["process_ready", "process_warm", "joined", "resumed"]


def test_the_answers_of_one_epoch_contradict_each_other_in_no_replay() -> None:
    assert told(say("join_failed", 1), say("joined", 1)) == ["joined"]
    assert told(say("joined", 1), say("join_failed", 1)) == ["join_failed"]
    assert told(say("stopped", 1), say("too_late", 1)) == ["too_late"]


def test_a_rank_that_has_stopped_for_a_recovery_is_not_done_until_it_says_so_again() -> None:
    done, stopped = say("rank_done", rank=0, step=60), say("survivor", 1)
    assert told(done, stopped) == ["survivor"]
    assert told(done, stopped, done) == ["survivor", "rank_done"]


def test_a_broken_collective_is_past_when_the_rank_has_stopped_or_resumed() -> None:
    assert told(say("broken", rank=0, lost=1)) == ["broken"]
    assert told(say("broken", rank=0, lost=1), say("survivor", 1)) == ["survivor"]
    assert told(say("survivor", 1), say("broken", 1, rank=0)) == ["survivor", "broken"], "the next failure"
    assert told(say("survivor", 1), say("broken", 0, rank=0)) == ["survivor"]


def test_the_keys_of_two_steps_are_two_facts() -> None:
    facts = Facts()
    for step, key in ((0, "a"), (1, "b"), (0, "a")):
        facts.take(say("replica_key", rank=3, step=step, key=key))
    assert {(m["step"], m["key"]) for m in facts.told()} == {(0, "a"), (1, "b")}


def test_every_rank_that_is_served_is_a_fact_of_its_own() -> None:
    facts = Facts()
    for rank, port in ((2, 1), (3, 1), (2, 7)):
        facts.take(say("source_ready", 1, rank=rank, source=["n1", port]))
    assert [(m["rank"], m["source"][1]) for m in facts.told()] == [(3, 1), (2, 7)]
    facts.take(say("source_ready", 2, rank=5, source=["n1", 1]))
    assert [m["rank"] for m in facts.told()] == [5]


_STORIES = st.lists(
    st.builds(
        say,
        st.sampled_from(sorted(LASTING)),
        st.integers(0, 4),
        rank=st.integers(0, 2),
        step=st.integers(0, 1),
    ),
    max_size=30,
)


@given(_STORIES)
def test_a_replay_of_the_facts_leaves_the_same_facts(story: list[dict[str, Any]]) -> None:
    facts, again = Facts(), Facts()
    for message in story:
        facts.take(message)
    for message in facts.told():
        again.take(message)
    assert again.told() == facts.told()


@given(_STORIES)
def test_no_fact_is_of_an_older_epoch_or_ended_by_a_later_one(story: list[dict[str, Any]]) -> None:
    facts = Facts()
    for message in story:
        facts.take(message)
    left = facts.told()
    of_an_epoch = OF_AN_EPOCH - {"broken"}
    epochs = [message["epoch"] for message in left if message["kind"] in of_an_epoch]
    assert len(set(epochs)) <= 1
    newest = max((m["epoch"] for m in story if m["kind"] in of_an_epoch), default=0)
    assert all(epoch == newest for epoch in epochs)
    runs_at = max((m["epoch"] for m in story if m["kind"] in ("survivor", "resumed")), default=0)
    assert all(m["epoch"] >= runs_at for m in left if m["kind"] == "broken")
    for number, message in enumerate(left):
        assert not any(message["kind"] in ENDS.get(later["kind"], ()) for later in left[number + 1 :])


def test_a_rank_whose_collective_broke_says_so_although_it_prepares_to_leave() -> None:
    story = [say("broken", 1, rank=0), say("leaver_prepared", 2)]
    assert told(*story) == told(*reversed(story))[::-1] == ["broken", "leaver_prepared"]
    assert told(*story, say("survivor", 3)) == ["survivor"]
