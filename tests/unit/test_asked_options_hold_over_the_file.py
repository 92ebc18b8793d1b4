"""`--tm-standbys` and its like, as the SPANK plugin leaves them in the environment, to the configuration's
keys."""

from __future__ import annotations

import pytest

from tm_slurm.config import ConfigError
from tm_slurm.submit.asked_options import asked_overrides

JOB = {"SLURM_JOB_NUM_NODES": "6"}


def test_nothing_asked_changes_nothing() -> None:
    assert asked_overrides(JOB) == {}


def test_standbys_are_taken_from_the_jobs_nodes() -> None:
    assert asked_overrides({**JOB, "TM_SLURM_STANDBYS": "2"}) == {"job.standbys": 2, "job.nodes": 4}
    assert asked_overrides({**JOB, "TM_SLURM_STANDBYS": "0"}) == {"job.standbys": 0, "job.nodes": 6}


def test_a_controller_asks_for_them_on_top_of_the_active_nodes() -> None:
    asked = asked_overrides({"SLURM_JOB_NUM_NODES": "1", "TM_SLURM_STANDBYS": "2"}, holds_nodes=False)
    assert asked == {"job.standbys": 2}


def test_policy_and_lead_are_keys_of_the_policy() -> None:
    asked = {"TM_SLURM_POLICY": "double-up,fail", "TM_SLURM_LEAD_MINUTES": "5"}
    assert asked_overrides(asked) == {
        "policy.on_no_standby": ["double-up", "fail"],
        "policy.window_lead_s": 300.0,
    }
    assert asked_overrides({"TM_SLURM_OFF": "1"}) == {"policy.signed_events": False}


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({**JOB, "TM_SLURM_STANDBYS": "6"}, "the job has 6 nodes"),
        ({**JOB, "TM_SLURM_STANDBYS": "-1"}, "--tm-standbys: expected a number"),
        ({**JOB, "TM_SLURM_STANDBYS": "²"}, "--tm-standbys: expected a number"),
        ({"TM_SLURM_STANDBYS": "1"}, "SLURM_JOB_NUM_NODES: expected a number"),
        ({"TM_SLURM_LEAD_MINUTES": ""}, "--tm-lead: expected a number"),
    ],
)
def test_nonsense_is_one_line(asked: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        asked_overrides(asked)
    assert "\n" not in str(refused.value)
