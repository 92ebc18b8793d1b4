"""`tm-slurm submit`: one configuration, one job."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from tm_slurm.cli.failures import Failed, UserMistake
from tm_slurm.cli.slurm_here import no_answer, require_configuration

_KEYS = {
    "--nodes": "job.nodes",
    "--standbys": "job.standbys",
    "--job-name": "job.name",
    "--launch": "job.launch",
    "--policy": "policy.on_no_standby",
    "--lead": "policy.window_lead_s",
    "--tm-off": "policy.signed_events",
}
MOST_LEAD_MINUTES = 7 * 24 * 60
"""As for sbatch's --tm-lead."""


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--nodes", type=int, help="Active nodes (job.nodes).")
@click.option("--standbys", "--tm-standbys", type=int, help="Nodes in reserve (job.standbys).")
@click.option("--job-name", help="The job's name (job.name).")
@click.option(
    "--launch",
    type=click.Choice(["batch", "allocation"]),
    help="How the nodes are got (job.launch): in `allocation` each can be given back, the first too.",
)
@click.option(
    "--policy",
    "--tm-policy",
    metavar="LIST",
    help="What to do without a standby, such as double-up,fail (policy.on_no_standby).",
)
@click.option(
    "--lead",
    "--tm-lead",
    metavar="MINUTES",
    type=click.IntRange(1, MOST_LEAD_MINUTES),
    help="Leave nodes so long before their maintenance window (policy.window_lead_s).",
)
@click.option(
    "--tm-off",
    is_flag=True,
    help="Root's programs on the nodes are not to tell anything (policy.signed_events).",
)
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
    launch: str | None,
    policy: str | None,
    lead: int | None,
    tm_off: bool,
    settings: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
) -> None:
    """Submit the training job that the file CONFIG describes.

    \b
    tm-slurm submit configs/char_gpt.yaml --standbys 1 --set train.steps=50

    Options that begin with --tm- are those that sbatch, srun and salloc have where an administrator has
    installed tm_slurm's plugin.

    Prints the job's id and its directory. Everything that can be checked beforehand is, and then nothing is
    submitted.
    """
    from tm_slurm.config import ConfigError, load, parse_override
    from tm_slurm.slurm import SlurmRefused, SlurmUnavailable, connect
    from tm_slurm.submit.checks import (
        Unsubmittable,
        check_directory,
        check_options,
        check_partition,
        check_program,
        check_torch,
    )
    from tm_slurm.submit.job_dir import JobDirError, resolve

    named: dict[str, Any] = {"--nodes": nodes, "--standbys": standbys, "--job-name": job_name}
    named |= {"--launch": launch, "--policy": None if policy is None else policy.split(",")}
    named |= {"--lead": None if lead is None else 60.0 * lead, "--tm-off": False if tm_off else None}
    overrides = {_KEYS[option]: value for option, value in named.items() if value is not None}
    said = {_KEYS[option]: option for option, value in named.items() if value is not None}
    try:
        for key, value in map(parse_override, settings):
            overrides[key] = value
            said[key] = f"--set {key}"
        resolved = resolve(load(config, overrides), base=Path.cwd(), python=sys.executable)
        check_torch(resolved)
        check_program(resolved)
        check_options(resolved)
        check_directory(resolved)
    except ConfigError as error:
        raise UserMistake(_in_the_users_words(str(error), said)) from None
    except Unsubmittable as error:
        raise UserMistake(str(error)) from None

    from tm_slurm.submit.submission import SubmissionFailed, SubmissionRefused, script_text
    from tm_slurm.submit.submission import submit as submit_job

    if dry_run:
        click.echo(script_text(resolved).rstrip("\n"))
        return
    require_configuration()
    try:
        check_partition(resolved, connect())
        submitted = submit_job(resolved)
    except (Unsubmittable, SubmissionRefused, JobDirError) as error:
        raise UserMistake(str(error)) from None
    except SlurmUnavailable as error:
        raise no_answer(error, f"submit {config}") from None
    except (SlurmRefused, SubmissionFailed) as error:
        raise Failed(str(error)) from None
    if as_json:
        answer = {"job_id": submitted.job_id, "job_dir": str(submitted.job_dir), "log": str(submitted.log)}
        click.echo(json.dumps(answer))
        return
    job = resolved.job
    click.echo(f"job {submitted.job_id}: {job.nodes} nodes and {job.standbys} standbys")
    click.echo(f"directory {submitted.job_dir}")
    click.echo(f"tm-slurm status {submitted.job_id}")


def _in_the_users_words(message: str, said: dict[str, str]) -> str:
    """A mistake on the command line, under the name of the option that was typed, and the key named once.

    `said`: each key that the command line sets, and how it was typed.
    """
    for key, typed in said.items():
        if message.startswith(f"--set {key}: "):
            return f"{typed}: " + message.removeprefix(f"--set {key}: ").removeprefix(f"{key}: ")
    place, found, problem = message.partition(": train.script: ")
    if found and "train.module" in said and problem.endswith("found both"):
        return f"{said['train.module']}: {place} has train.script, too: add --set train.script=null"
    return message
