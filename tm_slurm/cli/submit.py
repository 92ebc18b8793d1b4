"""`tm-slurm submit`: one configuration, one job."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from tm_slurm.cli.failures import Failed, UserMistake


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--nodes", type=int, help="Active nodes (job.nodes).")
@click.option("--standbys", type=int, help="Nodes in reserve (job.standbys).")
@click.option("--job-name", help="The job's name (job.name).")
@click.option(
    "--set", "settings", metavar="KEY=VALUE", multiple=True, help="Any key, such as train.steps=50."
)
@click.option("--dry-run", is_flag=True, help="Print the batch script and submit nothing.")
@click.option("--json", "as_json", is_flag=True, help="Answer in JSON: job_id, job_dir, log.")
def submit(
    *,
    config: Path,
    nodes: int | None,
    standbys: int | None,
    job_name: str | None,
    settings: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
) -> None:
    """Submit the training job that the file CONFIG describes.

    Prints the job's id and its directory. Everything that can be checked beforehand is, and then nothing is
    submitted.
    """
    from tm_slurm.config import ConfigError, load, parse_override
    from tm_slurm.slurm import SlurmRefused, SlurmUnavailable, connect
    from tm_slurm.submit.checks import Unsubmittable, check_directory, check_partition, check_program
    from tm_slurm.submit.job_dir import JobDirError, resolve

    named: dict[str, Any] = {"job.nodes": nodes, "job.standbys": standbys, "job.name": job_name}
    overrides = {key: value for key, value in named.items() if value is not None}
    try:
        overrides.update(parse_override(text) for text in settings)
        resolved = resolve(load(config, overrides), base=Path.cwd(), python=sys.executable)
        check_program(resolved)
        check_directory(resolved)
    except (ConfigError, Unsubmittable) as error:
        raise UserMistake(str(error)) from None

    from tm_slurm.submit.submission import SubmissionFailed, script_text
    from tm_slurm.submit.submission import submit as submit_job

    if dry_run:
        click.echo(script_text(resolved), nl=False)
        return
    try:
        check_partition(resolved, connect())
        submitted = submit_job(resolved)
    except Unsubmittable as error:
        raise UserMistake(str(error)) from None
    except (SlurmRefused, SlurmUnavailable, SubmissionFailed, JobDirError) as error:
        raise Failed(str(error)) from None
    if as_json:
        answer = {"job_id": submitted.job_id, "job_dir": str(submitted.job_dir), "log": str(submitted.log)}
        click.echo(json.dumps(answer))
        return
    job = resolved.job
    click.echo(f"job {submitted.job_id}: {job.nodes} nodes and {job.standbys} standbys")
    click.echo(f"directory {submitted.job_dir}")
    click.echo(f"tm-slurm status {submitted.job_id}")
