"""A user's own commands on a real job: named by nothing or by its name, moved, taken back, looked at."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from training_jobs import TrainingJob, gates_of_a_move

from tm_slurm.localcluster import LocalCluster

pytestmark = pytest.mark.slurm
Digests = Callable[..., list[str]]


def test_a_move_that_was_asked_for_is_taken_back(
    cluster: LocalCluster, tmp_path: Path, undisturbed: Digests
) -> None:
    job = TrainingJob.submit(cluster, tmp_path, gates=gates_of_a_move(20))
    job.warm(2)
    shown = job.until("a status that says so", lambda: "2 of them warm" in job.tm_slurm("standbys").stdout)
    assert shown and json.loads(job.tm_slurm("standbys", "--json").stdout)["free"] == 2
    node = job.active_nodes()[0]
    assert "will move" in job.tm_slurm("migrate", "tiny", "--node", node).stdout
    job.note("event_request", node=node)
    job.let_prepare(20)
    back = job.tm_slurm("cancel-move", "--node", node)
    assert back.returncode == 0 and f"the ranks of {node} stay" in back.stdout, back.stderr
    assert job.tm_slurm("cancel-move", "--node", node).returncode == 2
    for step in gates_of_a_move(20):
        job.open_gate(step)
    digests = job.finish()
    assert not job.files.notes("moved")
    shown = job.tm_slurm(
        "events", str(job.job_id), "--follow", "-l", "--kind=cancelled", "--kind=ended"
    ).stdout
    assert [line.split()[2] for line in shown.splitlines()] == ["cancelled", "ended"]
    none = job.tm_slurm("status")
    assert none.returncode == 3 and "no job of yours is running here" in none.stderr
    assert job.tm_slurm("status", "tiny").stdout.startswith(f"job {job.job_id}  completed")
    assert digests == undisturbed()
