"""A Slurm job that trains, submitted through submitit, and goes back into the queue when it is interrupted.

python -m baselines.requeued_training DIR RANKS CHECKPOINT_EVERY     submits it, prints its number
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import submitit

PORT = 29500
WITHOUT_END = ['scontrol requeue "$SLURM_JOB_ID"']
"""The batch script's last line: whatever the training ended with, it was not done."""


class RequeuedTraining:
    """What submitit runs in each task."""

    def __init__(self, directory: str, every: int) -> None:
        self.directory = directory
        self.every = every

    def __call__(self) -> None:
        from baselines.ddp_rank import train
        from baselines.run_files import RunFiles

        job = submitit.JobEnvironment()
        os.environ["RANK"], os.environ["WORLD_SIZE"] = str(job.global_rank), str(job.num_tasks)
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = job.hostnames[0], str(PORT)
        train(RunFiles(Path(self.directory)), self.every)

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """The same again: the training's checkpoint is in the run's directory."""
        return submitit.helpers.DelayedSubmission(self)


def submit(directory: str, ranks: int, every: int) -> str:
    """The number of the job."""
    executor = submitit.SlurmExecutor(Path(directory) / "submitit")
    executor.update_parameters(
        job_name="bench-baselines",
        nodes=ranks,
        ntasks_per_node=1,
        cpus_per_task=1,
        time=30,
        stderr_to_stdout=True,
        wckey=None,
        additional_parameters={"requeue": True},
        srun_args=["--kill-on-bad-exit=1", "--export=ALL", "--mpi=none"],
        teardown=WITHOUT_END,
    )
    return str(executor.submit(RequeuedTraining(directory, every)).job_id)


if __name__ == "__main__":
    from baselines.requeued_training import submit as of_this_name  # pickled by that name

    print(of_this_name(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
