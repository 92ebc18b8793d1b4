"""`tm-slurm timeline`: what happened to a job, for other programs."""

from __future__ import annotations

import json
from pathlib import Path

import click

from tm_slurm.cli.failures import NotFound, UserMistake
from tm_slurm.cli.jobs import find_job_dir
from tm_slurm.cli.naming import job_argument


@click.command()
@job_argument
@click.option(
    "--format",
    "form",
    type=click.Choice(["chrome", "otel", "json"]),
    default="json",
    show_default=True,
    help="chrome: a trace for ui.perfetto.dev; otel: OpenTelemetry spans, one a line (and sent to "
    "OTEL_EXPORTER_OTLP_ENDPOINT, if set); json: each interruption with its spans.",
)
@click.option(
    "--output", "-o", type=click.Path(dir_okay=False, path_type=Path), help="Write there, not to the screen."
)
def timeline(job: str, form: str, output: Path | None) -> None:
    """Each interruption of JOB as spans: detect, decide, prepare, switch, transfer,
    redo, resume.

    \b
    tm-slurm timeline 1234 --format chrome -o trace.json

    """
    from tm_slurm.observe import trace
    from tm_slurm.observe.follow import JobFiles

    files = JobFiles(find_job_dir(job))
    entries = files.timeline()
    if not entries:
        raise NotFound(f"job {job} has no timeline yet: no coordinator has written {files.job_dir}")
    if form == "chrome":
        text = json.dumps(trace.chrome(entries, files.steps()))
    elif form == "json":
        text = json.dumps(trace.interruptions(entries), indent=1)
    else:
        try:
            text = "\n".join(map(json.dumps, trace.open_telemetry(entries, files.job_dir.resolve().name)))
        except trace.NoOpenTelemetry as error:
            raise UserMistake(str(error)) from None
    if output is None:
        click.echo(text)
    else:
        output.write_text(text + "\n")
