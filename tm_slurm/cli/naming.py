"""The JOB of a command: a job's id, its name, its directory, or nothing where only one is running."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from tm_slurm.cli.failures import NotFound, UserMistake
from tm_slurm.cli.slurm_word import ask_slurm
from tm_slurm.submit.registry import all_registered

_Command = TypeVar("_Command", bound=Callable[..., Any])


@dataclass(frozen=True)
class Known:
    """A job of this user on this cluster."""

    job_id: int
    directory: Path

    @property
    def name(self) -> str | None:
        """By its configuration; None if that cannot be read."""
        from tm_slurm.config import ConfigError, load

        try:
            return load(self.directory / "config.yaml").job.name
        except ConfigError:
            return None

    @property
    def is_going_on(self) -> bool:
        """Whether it runs or waits, by its files; where a status is old or missing, Slurm is asked."""
        from tm_slurm.cli.status import is_fresh
        from tm_slurm.observe.follow import JobFiles

        files = JobFiles(self.directory)
        verdict = files.verdict()
        if verdict is not None and verdict["state"] != "requeue":
            return False
        if verdict is None and is_fresh(files.status()):
            return True
        word = ask_slurm(self.job_id)
        return word is not None and not word.is_over


def job_argument(command: _Command) -> _Command:
    """The argument `job` of a command: always an id or a directory when the command gets it."""
    return click.argument("job", required=False, callback=_resolve, shell_complete=_complete)(command)


def _resolve(context: click.Context, parameter: click.Parameter, value: str | None) -> str:
    return resolve(value)


def resolve(value: str | None) -> str:
    """An id or a directory for what was typed; UserMistake or NotFound otherwise."""
    if value is None:
        return str(_the_only_one().job_id)
    if value.isdigit() or (Path(value) / "config.yaml").exists():
        return value
    named = [job for job in known_jobs() if job.name == value]
    if not named:
        return value  # what it is not is said by whoever looks for it
    going_on = [job for job in named if job.is_going_on]
    if len(going_on) > 1:
        raise UserMistake(f"{len(going_on)} jobs are called {value}: give one of the ids {_ids(going_on)}")
    return str((going_on or named)[-1].job_id)


def _the_only_one() -> Known:
    going_on = [job for job in known_jobs() if job.is_going_on]
    if not going_on:
        raise NotFound(
            "no job of yours is running here: give a job id, a name or a job directory (see `squeue --me`)"
        )
    if len(going_on) > 1:
        raise UserMistake(f"{len(going_on)} jobs are running: give one of the ids {_ids(going_on)}")
    return going_on[0]


def known_jobs() -> list[Known]:
    """This user's jobs on this cluster whose directories are still there, oldest first."""
    found = [Known(job_id, path) for job_id, path in sorted(all_registered().items())]
    return [job for job in found if (job.directory / "config.yaml").exists()]


def _ids(jobs: list[Known]) -> str:
    return ", ".join(str(job.job_id) for job in jobs)


def _complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    return [str(job) for job in sorted(all_registered(), reverse=True) if str(job).startswith(incomplete)]
