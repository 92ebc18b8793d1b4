"""Jobs that a leader submits, in a process of their own: submitit need not be in the leader's."""

from __future__ import annotations

import subprocess
import sys

from tm_slurm.coordinator.training import Training
from tm_slurm.slurm import SlurmRefused, SlurmUnavailable

SUBMIT_LIMIT_S = 75.0
"""sbatch itself has 60 (tm_slurm.submit.submission)."""

REFUSED_CODE = 2
"""of tm_slurm.submit.standby and its like: Slurm has answered, and the answer is no."""


def submission(module: str, training: Training, called: str) -> list[str]:
    """The command that submits a job for the training job by one of our modules. `called`: what its name
    begins with."""
    command = [sys.executable, "-m", module, "--job-dir", str(training.job_dir), f"--called={called}"]
    return [*command, f"--of={training.job_id}", f"--attempt={training.attempt}"]


def answer_of(command: list[str]) -> int:
    """Submit; the id of the job. SlurmRefused, SlurmUnavailable."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            check=False,
            errors="replace",
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=SUBMIT_LIMIT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise SlurmUnavailable(f"no job was submitted within {SUBMIT_LIMIT_S:g} s") from error
    words = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
    if done.returncode == REFUSED_CODE:
        raise SlurmRefused(words)
    answer = done.stdout.split()
    if done.returncode or not answer or not answer[-1].isdigit():
        raise SlurmUnavailable(f"no job was submitted: {words}")
    return int(answer[-1])
