"""`policy.batch_host_drain`: what the coordinator decides when the one node that cannot be given back should
be."""

from __future__ import annotations

import pytest
from decisions_world import World


def world(choice: str, **plan: int) -> World:
    """Four active nodes, and two standbys of which n1 is the batch host."""
    made = World()
    made.plan.batch_host_drain = choice
    for name, value in plan.items():
        setattr(made.plan, name, value)
    made.start()
    return made


def test_it_is_emptied_and_kept_unless_the_config_says_otherwise() -> None:
    job = world("keep")
    job.event("drain", "n1")
    assert job.state.nodes["n1"].standing == "kept" and not job.ends() and not job.told("checkpoint")


@pytest.mark.parametrize("kind", ["drain", "fail", "reboot", "unhealthy"])
def test_the_job_goes_back_into_the_queue_with_a_checkpoint(kind: str) -> None:
    job = world("requeue")
    job.event(kind, "n1")
    (told,) = job.told("checkpoint")
    assert told.node == job.seats()[job.state.pacer()] and not job.ends()
    assert "batch host n1 should be given back (test)" in job.comments()[-1]
    job.give({"kind": "checkpoint_published", "step": 7, "path": "checkpoints/7"})
    (end,) = job.ends()
    assert end.state == "requeue" and "batch host n1" in end.reason


def test_it_is_kept_when_no_checkpoint_can_be_had() -> None:
    """Nothing presses: what was computed since the last one would be lost for nothing."""
    job = world("requeue")
    job.event("drain", "n1")
    job.give({"kind": "checkpoint_failed", "node": "n2", "step": 7, "why": "disk full"})
    assert not job.ends() and not job.state.stopping and job.state.nodes["n1"].standing == "kept"


def test_it_is_kept_when_the_checkpoint_does_not_come() -> None:
    job = world("requeue")
    job.event("drain", "n1")
    job.clock += job.plan.stop_timeout_s + 1
    job.give({"kind": "stop_expired"})
    assert not job.ends() and not job.state.stopping and job.state.nodes["n1"].standing == "kept"


def test_its_drain_counts_when_the_window_for_which_the_job_stopped_has_gone() -> None:
    job = world("requeue")
    job.state.stopping, job.state.stopping_for = "maintenance: test", "window/fans/0"
    job.event("drain", "n1")
    assert job.state.stopping_for == "window/fans/0"
    job.give({"kind": "outlook", "windows": [], "starts": None, "ends": None, "wall": job.clock})
    assert "batch host n1" in job.state.stopping


def test_a_resume_before_the_checkpoint_keeps_the_job_where_it_is() -> None:
    job = world("requeue")
    job.event("drain", "n1")
    job.event("resume", "n1")
    assert not job.state.stopping and job.notes("stop_cancelled")
    assert job.state.nodes["n1"].standing == "standby"
    job.event("drain", "n1")
    assert len(job.told("checkpoint")) == 2


def test_a_window_that_is_seen_meanwhile_takes_nothing_back() -> None:
    job = world("requeue")
    job.event("drain", "n1")
    job.give({"kind": "outlook", "windows": [], "starts": None, "ends": None, "wall": job.clock})
    assert job.state.stopping and not job.notes("stop_cancelled")


def test_before_training_has_begun_there_is_no_checkpoint_to_wait_for() -> None:
    fresh = World()
    fresh.plan.batch_host_drain = "requeue"
    fresh.give({"kind": "node_joined", "node": "n1"})
    fresh.event("drain", "n1")
    assert [end.state for end in fresh.ends()] == ["requeue"]


@pytest.mark.parametrize("plan", [{"requeues_left": 0}, {"release": False}])
def test_a_job_that_may_not_be_requeued_keeps_it(plan: dict[str, int]) -> None:
    job = world("requeue", **plan)
    job.event("drain", "n1")
    assert job.state.nodes["n1"].standing == "kept" and not job.ends()


def test_other_nodes_are_left_as_ever() -> None:
    job = world("requeue")
    left = job.seats()[0]
    job.event("drain", left)
    assert [action.node for action in job.releases()] == [left] and not job.state.stopping


def test_a_dead_batch_host_is_no_reason_to_requeue() -> None:
    job = world("requeue")
    job.event("down", "n1")
    assert not job.state.stopping and not job.ends()
