"""A pipeline whose stages have replicas: one standby is warmed up for the first, the last and a middle stage
in turn, keeps the middle one built, and takes any of them; a promoted one is replaced by the next."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from training_jobs import SCRIPT, TrainingJob

from tm_slurm.localcluster import LocalCluster

pytestmark = pytest.mark.slurm
Digests = Callable[..., list[str]]

STAGED = SCRIPT.with_name("staged_training.py")
STAGES = 3
PIPELINE = {"nodes": 3, "ranks_per_node": 2, "stages": STAGES, "script": STAGED}


def test_any_stage_is_recovered_by_the_same_kind_of_standby(
    cluster: LocalCluster, tmp_path: Path, undisturbed: Digests
) -> None:
    """Nodes hold ranks 0 and 1, 2 and 3, 4 and 5: a first and a middle stage, a last and a first, a middle
    and a last."""
    job = TrainingJob.submit(cluster, tmp_path, standbys=1, gates=[20, 30, 40], **PIPELINE)
    classes = {}
    for name in ("first", "middle", "last"):
        told = job.until(
            f"the recording of {name}",
            lambda name=name: [n for n in job.files.notes("recorded") if n["role_class"].startswith(name)],
        )[0]
        classes[name] = told["role_class"]
        assert told["ranks"] == {"first": [0, 3], "middle": [1, 4], "last": [2, 5]}[name]
    job.warm(1)
    warm = job.files.notes("warm")[0]
    assert list(warm["each_s"]) == [classes["first"], classes["last"], classes["middle"]]
    assert warm["rank"] in (1, 4) and warm["answers"]["missed"] == 0
    for done, node in enumerate(job.active_nodes()[:2]):
        job.at_step(19 + 10 * done)
        job.kill_rank(node)
        job.until("it is noticed", lambda done=done: len(job.files.notes("recover")) > done)
        job.open_gate(20 + 10 * done)
        job.until("it is recovered", lambda done=done: len(job.files.notes("recovered")) > done)
        job.until(
            "the next standby is warm",
            lambda node=node: [w for w in job.files.notes("warm") if w["node"] == node],
        )
    for told in job.files.notes("promoted"):
        assert told["answers"]["role_class"] in classes.values() and told["answers"]["missed"] == 0
    job.open_gate(40)
    assert job.finish() == undisturbed(**PIPELINE)
