"""The first steps of a job are recorded and then nothing records any more; a standby is warmed up with what
was, and takes over to the same bits. Without a recording it does so with identity answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from training_jobs import SCRIPT, TrainingJob, gates_of_a_move

from tm_slurm.localcluster import LocalCluster

pytestmark = pytest.mark.slurm
Digests = Callable[..., list[str]]

WATCHING = """
import sys
sys.path.insert(0, {directory!r})
import tiny_training, tm_slurm
from tm_slurm.comm.backend import _Current

def say(step):
    print("tape at step", step, _Current.endpoint.has_tape, flush=True)

wait = tiny_training.wait_at_gate
tiny_training.wait_at_gate = lambda step, gates: (say(step), wait(step, gates))
tiny_training.main()
"""


def taped(job: TrainingJob, node: str) -> list[int]:
    """The steps at which the first process of a node had a tape attached; it has said so of every step."""
    log = min((job.files.job_dir / "logs").glob(f"{node}.0.*.log"), key=lambda path: path.name)
    words = [line.split() for line in log.read_text().splitlines() if line.startswith("tape at step")]
    assert len(words) >= 20
    return [int(word[3]) for word in words if word[4] == "True"]


def promoted(job: TrainingJob, node: str, gate: int) -> dict[str, Any]:
    """What the timeline says of the standby that has taken the ranks of `node`, killed at a gate."""
    job.kill_rank(node)
    job.note("recover")
    job.open_gate(gate)
    job.note("recovered")
    return job.note("promoted", rank=job.active_nodes().index(node))


def test_a_standby_of_another_rank_uses_it(
    cluster: LocalCluster, tmp_path: Path, undisturbed: Digests
) -> None:
    script = tmp_path / "watching.py"
    script.write_text(WATCHING.format(directory=str(SCRIPT.parent)))
    job = TrainingJob.submit(cluster, tmp_path, standbys=1, gates=[20, 40], script=script)
    recorded = job.note("recorded")
    assert recorded["ranks"] == [0, 1] and recorded["steps"] == 2 and recorded["bytes"] > 0
    job.warm(1)
    warm = job.files.notes("warm")[0]
    assert warm["answers"]["role_class"] == recorded["role_class"]
    assert warm["answers"]["answered"] > 0 and warm["answers"]["missed"] == 0
    sizes = {recorded["role_class"]: recorded["bytes"]}
    job.until("its size in the status", lambda: (job.files.status() or {}).get("recorded_bytes") == sizes)
    job.at_step(19)
    told = promoted(job, job.active_nodes()[1], 20)
    assert told["answers"]["role_class"] == recorded["role_class"]
    assert told["answers"]["answered"] > 0 and told["answers"]["missed"] == 0
    job.open_gate(40)
    assert job.finish() == undisturbed()
    first, second = job.active_nodes()
    assert taped(job, first) == [0, 1], "rank 0 records two steps"
    assert not taped(job, second)


def test_without_a_recording_training_and_standbys_go_on(
    cluster: LocalCluster, tmp_path: Path, undisturbed: Digests
) -> None:
    """Something is in the way where recordings are kept."""
    job = TrainingJob.submit(cluster, tmp_path, standbys=1, gates=[0, *gates_of_a_move(20)])
    job.note("started")
    (job.files.job_dir / "recordings").touch()
    job.open_gate(0)
    refused = job.note("recording_failed")
    assert "cannot be written" in refused["why"]
    job.tm_slurm("migrate", str(job.files.job_dir), "--node", job.active_nodes()[0])
    job.note("event_request")
    job.pass_gates(20)
    job.note("moved")
    assert job.note("promoted", rank=0)["answers"] == {
        "role_class": None,
        "answered": 0,
        "missed": 0,
        "first_miss": "",
        "why_alone": "",
    }
    assert job.finish() == undisturbed()
