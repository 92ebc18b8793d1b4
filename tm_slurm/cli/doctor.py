"""`tm-slurm doctor`: what a cluster lacks, found before a job does."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import textwrap
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tm_slurm.cli.slurm_here import require_configuration

if TYPE_CHECKING:
    from tm_slurm.doctor import Finding

_COLORS = {"pass": "green", "warn": "yellow", "fail": "red"}


@click.command()
@click.option(
    "--directory",
    type=click.Path(path_type=Path),
    help="Where jobs are to have their directories (job.directory).",
)
@click.option(
    "--nodes", default=2, show_default=True, type=click.IntRange(0, 64), help="Ask so many nodes; 0: none."
)
@click.option(
    "--wait", "wait_s", default=20, show_default=True, type=click.IntRange(1, 600), help="Seconds for nodes."
)
@click.option("--partition", help="Ask nodes of this partition.")
@click.option("--nodelist", help="Ask these nodes, as for srun.")
@click.option("--python", default=sys.executable, help="Python on the nodes (job.python); default: this one.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def doctor(
    *,
    directory: Path | None,
    nodes: int,
    wait_s: int,
    partition: str | None,
    nodelist: str | None,
    python: str,
    as_json: bool,
) -> None:
    """Check this cluster: Slurm's settings, the administrators' part, and what nodes have in common.

    \b
    tm-slurm doctor --directory /shared/jobs
    tm-slurm doctor --nodes 0 --json      # without asking nodes for anything

    Run it on a login node, or inside an allocation. Exit code 0 when nothing fails, else 1.
    """
    require_configuration()
    from tm_slurm.config.model import JobConfig
    from tm_slurm.doctor.examination import Examination

    options = [f"--partition={partition}"] if partition else []
    options += [f"--nodelist={nodelist}"] if nodelist else []
    place = Path(os.path.expanduser(str(directory or JobConfig.directory))).absolute()
    examination = Examination(
        place,
        count=nodes,
        wait_s=wait_s,
        options=options,
        python=python,
        told=lambda line: click.echo(line, err=True) if sys.stderr.isatty() else None,
    )
    findings = examination.findings()
    has_failed = any(finding.verdict == "fail" for finding in findings)
    if as_json:
        answer = {
            "ok": not has_failed,
            "host": socket.gethostname(),
            "checks": [asdict(finding) for finding in findings],
        }
        click.echo(json.dumps(answer, indent=1))
    else:
        click.echo("\n".join(_shown(findings)))
    sys.exit(1 if has_failed else 0)


def _shown(findings: list[Finding]) -> list[str]:
    """A line or more each: what was found, what it means, and what mends it."""
    width = max(40, shutil.get_terminal_size((80, 24)).columns)
    column = max(len(finding.check) for finding in findings)
    colored = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    indent = " " * (6 + column + 2)
    lines = []
    for finding in findings:
        verdict = click.style(finding.verdict, fg=_COLORS[finding.verdict]) if colored else finding.verdict
        text = ": ".join(filter(None, (finding.found, finding.meaning)))
        first, *further = textwrap.wrap(text, width - len(indent)) or [""]
        lines.append(f"{verdict}  {finding.check.ljust(column)}  {first}")
        lines += [indent + line for line in further]
        if finding.mend:
            lines += [
                indent + ("→ " if number == 0 else "  ") + line
                for number, line in enumerate(textwrap.wrap(finding.mend, width - len(indent) - 2))
            ]
    counts = Counter(finding.verdict for finding in findings)
    lines += ["", f"{counts['pass']} pass, {counts['warn']} warn, {counts['fail']} fail"]
    return lines
