"""`tm-slurm report`: what happened to a job, and what it cost, as a page and pictures."""

from __future__ import annotations

import json
from pathlib import Path

import click

from tm_slurm.cli.failures import Failed, NotFound
from tm_slurm.cli.jobs import find_job_dir
from tm_slurm.cli.naming import job_argument


@click.command()
@job_argument
@click.option(
    "--output",
    "-o",
    type=click.Path(file_okay=False, path_type=Path),
    help="The directory to write into, made if it is not there; default: report-JOB here.",
)
@click.option(
    "--restart-s",
    type=click.FloatRange(min=0.0),
    help="What a restart of this job costs, in seconds; default: as measured by make bench-baselines, else "
    "an assumption from published figures.",
)
@click.option("--json", "as_json", is_flag=True, help="The figures as one JSON object, and write nothing.")
def report(job: str, output: Path | None, restart_s: float | None, as_json: bool) -> None:
    """What happened to JOB, and what it cost: report.html, which needs no network, and its pictures as PNGs.

    \b
    tm-slurm report 1234
    tm-slurm report 1234 --restart-s 240 -o /tmp/report

    """
    from tm_slurm.observe.follow import JobFiles

    job_dir = find_job_dir(job)
    files = JobFiles(job_dir)
    if not files.steps():
        raise NotFound(f"job {job} has done no step yet: there is nothing to report from {job_dir}")
    if as_json:
        from tm_slurm.observe.costs import costs_of

        click.echo(json.dumps(costs_of(files, restart_s).as_json()))
        return
    from rich.console import Console

    from tm_slurm.observe.charts import NoMatplotlib
    from tm_slurm.observe.report import comparison, report_of

    try:
        with Console(stderr=True).status("drawing the report"):
            made = report_of(files, restart_s=restart_s)
    except NoMatplotlib as error:
        raise Failed(f"{error}; --json needs none") from None
    target = output if output is not None else Path(f"report-{job_dir.resolve().name}")
    target.mkdir(parents=True, exist_ok=True)
    (target / "report.html").write_text(made.html)
    for name, picture in made.pictures.items():
        (target / f"{name}.png").write_bytes(picture)
    for line in comparison(made.costs):
        click.echo(line)
    click.echo(f"written: {target}/report.html, {', '.join(f'{name}.png' for name in made.pictures)}")
