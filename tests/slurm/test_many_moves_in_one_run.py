"""Moves do not wear the job out: twenty in a row, back and forth, end with the bits of an undisturbed run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from training_jobs import TrainingJob, gates_of_a_move, until

from tm_slurm.localcluster import LocalCluster

pytestmark = pytest.mark.slurm

STEPS = 120


def test_twenty_moves_end_bit_identical(
    cluster: LocalCluster, tmp_path: Path, undisturbed: Callable[..., list[str]]
) -> None:
    gates = [10 + 5 * number for number in range(20)]
    gated = [step for gate in gates for step in gates_of_a_move(gate)]
    job = TrainingJob.submit(cluster, tmp_path, gates=gated, steps=STEPS)
    job.warm(2)
    for number, gate in enumerate(gates):
        job.at_step(gate - 1)
        status = until(
            "a warm standby and nothing in flight",
            lambda: _calm(job.files.status(), moves_done=number),  # noqa: B023
        )
        seats = [rank["node"] for rank in status["ranks"]]
        asked = job.tm_slurm("migrate", str(job.files.job_dir), "--node", seats[number % 2])
        assert asked.returncode == 0, asked.stderr
        job.pass_gates(gate, moves=number + 1)
        until(f"move {number + 1}", lambda: len(job.files.notes("moved")) > number)  # noqa: B023
    assert job.finish() == undisturbed(steps=STEPS)
    assert len(job.files.notes("moved")) == 20


def _calm(status: dict | None, moves_done: int) -> dict | None:
    if status is None or status["moves_done"] != moves_done or status["move"] is not None:
        return None
    return status if any(n["standing"] == "standby" and n["warm"] for n in status["nodes"]) else None
