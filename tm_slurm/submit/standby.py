"""A standby job: one further node for a training job that runs. `python -m tm_slurm.submit.standby …` submits
it and prints its id.

It is asked for as the training job was: same account, partition, constraint, quality of service and options,
one node, never the nodes in --exclude. On it runs the ordinary agent, against the directory of the training
job, and the job ends with that agent. It is not requeued: whoever leads asks for another.

Exit code 2 and one line when Slurm refuses it, 3 when Slurm did not answer.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from submitit.core.utils import FailedJobError, FailedSubmissionError

from tm_slurm.agent.surroundings import Standby
from tm_slurm.config import Config, ConfigError, load
from tm_slurm.config.sbatch_options import constraint_of_one
from tm_slurm.slurm import is_no_answer
from tm_slurm.submit.resources import step_options
from tm_slurm.submit.submission import (
    AgentExecutor,
    further_options,
    interpreter,
    node_parameters,
    unheard,
    words_of,
)

FOLDER = "standby-jobs"
"""In the job directory: what submitit keeps, and the jobs' output."""

NOT_FOR_ONE_NODE = frozenset(
    {"array", "begin", "contiguous", "deadline", "dependency", "nodefile", "nodelist", "switches"}
)
"""sbatch options that say when, or on which machines together, the training job is to run."""

REFUSED_CODE = 2
UNAVAILABLE_CODE = 3


class StandbyTask:
    """What submitit runs on the node: the agent."""

    def __init__(self, job_dir: str, standby: Standby) -> None:
        """`job_dir` is the training job's."""
        self.job_dir = job_dir
        self.standby = standby

    def __call__(self) -> int:
        """Run the agent to its end; return 0 or exit with its code."""
        from tm_slurm.agent.main import run

        # submitit has a handler of its own; the agent's would write every line a second time.
        logging.getLogger("submitit").propagate = False
        code = run(self.job_dir, self.standby)
        if code:
            sys.exit(code)
        return code


class StandbyExecutor(AgentExecutor):
    """submitit's Slurm executor for one standby job."""

    def __init__(self, config: Config, job_dir: Path) -> None:
        """`config` is that of `standby_config`, `job_dir` the training job's."""
        self._set_up(config, job_dir / FOLDER, _parameters(config, job_dir))


def standby_config(config: Config, *, called: str, exclude: str, minutes: int | None) -> Config:
    """Return what is asked for: `config`, that of the training job, for one node. `called`: what its name
    begins with; `exclude`: a host list of nodes that it must not be, beside those of the configuration;
    `minutes`: its time limit, None for the configuration's.
    """
    job = config.job
    excluded = ",".join(names for names in (job.exclude, exclude) if names) or None
    options = {name: value for name, value in job.sbatch.items() if name not in NOT_FOR_ONE_NODE}
    limit = job.time_limit if minutes is None else max(1, minutes)
    constraint = constraint_of_one(job.constraint, job.batch_feature)
    job = replace(job, constraint=constraint, batch_feature=None)
    job = replace(job, name=f"{called}{job.name}", nodes=1, standbys=0, ranks=None, exclude=excluded)
    return replace(config, job=replace(job, time_limit=limit, sbatch=options))


def _parameters(config: Config, job_dir: Path) -> dict[str, Any]:
    place = shlex.quote(str(job_dir))
    return {
        **node_parameters(config),
        "nodes": 1,
        "additional_parameters": {"no-requeue": True, **further_options(config)},
        "setup": [
            *config.job.setup,
            f"tm_slurm_start=$({interpreter(config)} -m tm_slurm.submit.prepare --joining {place}"
            f"{unheard(config)}) || exit 2",
            'eval "$tm_slurm_start"',
        ],
        "srun_args": step_options(config),
    }


def submit(job_dir: Path, standby: Standby, *, called: str, exclude: str, minutes: int | None) -> int:
    """Submit a standby job for the training job of `job_dir`; return its id. FailedSubmissionError,
    FailedJobError or OSError when there is none now."""
    config = standby_config(load(job_dir / "config.yaml"), called=called, exclude=exclude, minutes=minutes)
    return submit_beside(
        job_dir, lambda: StandbyExecutor(config, job_dir), StandbyTask(str(job_dir), standby)
    )


def submit_beside(job_dir: Path, executor: Callable[[], AgentExecutor], task: Callable[[], int]) -> int:
    """Submit a job that belongs to the training job of `job_dir`; return its id. Errors as of `submit`."""
    (job_dir / FOLDER).mkdir(mode=0o700, exist_ok=True)
    with contextlib.redirect_stderr(io.StringIO()):  # submitit prints sbatch's words before it raises them
        return int(executor().submit(task).job_id)


def main(arguments: list[str]) -> int:
    """Run as a program; see the module's text."""
    parser = argparse.ArgumentParser(prog="python -m tm_slurm.submit.standby", description=__doc__)
    parser.add_argument("--job-dir", type=Path, required=True, help="the training job's directory")
    parser.add_argument("--of", type=int, required=True, help="the training job")
    parser.add_argument("--attempt", type=int, required=True, help="how often Slurm has restarted it")
    parser.add_argument("--ask", type=int, required=True, help="the number of what its coordinator asks for")
    parser.add_argument("--called", required=True, help="what the name of the standby job begins with")
    parser.add_argument("--exclude", default="", help="a list of nodes that it must not be")
    parser.add_argument("--minutes", type=int, help="the time limit; without it the configuration's")
    given = parser.parse_args(arguments)
    standby = Standby(of=given.of, attempt=given.attempt, ask=given.ask)
    asked = {"called": given.called, "exclude": given.exclude, "minutes": given.minutes}
    return print_id(given.job_dir, lambda: submit(given.job_dir, standby, **asked))


def print_id(job_dir: Path, submit_it: Callable[[], int]) -> int:
    """Submit a job for the training job of `job_dir`, print its id, or why there is none; the exit code."""
    try:
        print(submit_it())
    except (FailedJobError, FailedSubmissionError) as error:
        words = words_of(error)
        print(words, file=sys.stderr)
        return UNAVAILABLE_CODE if is_no_answer(words) else REFUSED_CODE
    except (ConfigError, OSError) as error:
        print(f"{job_dir}: {error}", file=sys.stderr)
        return REFUSED_CODE
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
