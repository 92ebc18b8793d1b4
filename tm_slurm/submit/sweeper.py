"""The sweeper of a training job: a job of one CPU that Slurm starts when the training job has ended
(`--dependency=afterany`), and that takes its standby jobs out of the queue then, if they are there still.
`python -m tm_slurm.submit.sweeper …` submits it and prints its id; why there is one:
tm_slurm.coordinator.sweeper_job.

Exit code 2 and one line when Slurm refuses it, 3 when Slurm did not answer.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tm_slurm.config import Config, load
from tm_slurm.coordinator.training import Training, has_ended
from tm_slurm.slurm import SlurmRefused, SlurmUnavailable, connect
from tm_slurm.submit.standby import FOLDER, print_id, submit_beside
from tm_slurm.submit.submission import AgentExecutor, further_options, node_parameters

FOR_THE_QUEUE = frozenset({"nice", "wckey"})
"""sbatch options of the training job that hold for the sweeper: none that asks for resources."""

MINUTES = 5
ASK_AGAIN_S = 1.0
ASK_LIMIT_S = 120.0


class SweeperTask:
    """What submitit runs when the training job `of` has ended."""

    def __init__(self, job_dir: str, of: int, attempt: int) -> None:
        self.job_dir = job_dir
        self.of = of
        self.attempt = attempt

    def __call__(self) -> int:
        """Cancel what is left; return 0, or exit with a line when Slurm does not answer."""
        slurm = connect()
        training = Training.of(Path(self.job_dir), self.of, self.attempt)
        deadline = time.monotonic() + ASK_LIMIT_S
        while True:
            try:
                left = slurm.queued(training.prefix)
                if left and not has_ended(slurm, training):  # or Slurm has not said so
                    if time.monotonic() <= deadline:
                        time.sleep(ASK_AGAIN_S)
                        continue
                    left = []
                for job in left:
                    with contextlib.suppress(SlurmRefused):  # it has ended meanwhile
                        slurm.cancel(job.job_id)
                print(f"tm_slurm: cancelled {[job.job_id for job in left]} for job {self.of}", flush=True)
                return 0
            except SlurmUnavailable as error:
                if time.monotonic() > deadline:
                    sys.exit(f"tm_slurm: standby jobs of job {self.of} may be left: {error}")
            except SlurmRefused as error:
                sys.exit(f"tm_slurm: standby jobs of job {self.of} may be left: {error}")
            time.sleep(ASK_AGAIN_S)


class SweeperExecutor(AgentExecutor):
    """submitit's Slurm executor for one sweeper."""

    def __init__(self, config: Config, job_dir: Path, of: int) -> None:
        """`config` is that of the training job `of`, `job_dir` its directory."""
        config = sweeper_config(config)
        self._set_up(config, job_dir / FOLDER, _parameters(config, of))


def sweeper_config(config: Config) -> Config:
    """Return what is asked for: in the partition, account and quality of service of the training job, but no
    more of its nodes than one CPU for a moment.
    """
    job = config.job
    options = {name: value for name, value in job.sbatch.items() if name in FOR_THE_QUEUE}
    size: dict[str, Any] = {"nodes": 1, "standbys": 0, "ranks": None, "ranks_per_node": 1, "memory": None}
    size |= {"cpus_per_rank": 1, "gpus_per_rank": 0, "constraint": None, "batch_feature": None}
    return replace(config, job=replace(job, **size, time_limit=MINUTES, sbatch=options))


def _parameters(config: Config, of: int) -> dict[str, Any]:
    return {
        **node_parameters(config),
        "nodes": 1,
        "additional_parameters": {
            "no-requeue": True,
            **further_options(config),
            "dependency": f"afterany:{of}",
        },
        "setup": list(config.job.setup),
        "srun_args": ["--export=ALL", "--mpi=none", "--overlap"],
    }


def submit(job_dir: Path, of: int, attempt: int, called: str) -> int:
    """Submit the sweeper for the training job `of` of `job_dir`; return its id. FailedSubmissionError,
    FailedJobError or OSError when there is none now.
    """
    config = load(job_dir / "config.yaml")
    config = replace(config, job=replace(config.job, name=f"{called}{config.job.name}"))
    task = SweeperTask(str(job_dir), of, attempt)
    return submit_beside(job_dir, lambda: SweeperExecutor(config, job_dir, of), task)


def main(arguments: list[str]) -> int:
    """Run as a program; see the module's text."""
    parser = argparse.ArgumentParser(prog="python -m tm_slurm.submit.sweeper", description=__doc__)
    parser.add_argument("--job-dir", type=Path, required=True, help="the training job's directory")
    parser.add_argument("--of", type=int, required=True, help="the training job")
    parser.add_argument("--attempt", type=int, required=True, help="how often Slurm has restarted it")
    parser.add_argument("--called", required=True, help="what the name of the sweeper begins with")
    given = parser.parse_args(arguments)
    return print_id(given.job_dir, lambda: submit(given.job_dir, given.of, given.attempt, given.called))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
