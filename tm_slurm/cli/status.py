"""`tm-slurm status`: where a job stands, from the file that its coordinator keeps."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import click

from tm_slurm.cli.failures import NotFound
from tm_slurm.cli.jobs import find_job_dir

STALE_S = 5.0


@click.command()
@click.argument("job")
@click.option("--json", "as_json", is_flag=True, help="The whole status as one JSON object.")
def status(job: str, as_json: bool) -> None:
    """Ranks, nodes, standbys, epoch, step, loss and the last interruption of JOB (a job id or directory).

    \b
    tm-slurm status 1234
   
"""
    from tm_slurm.observe.follow import JobFiles

    job_dir = find_job_dir(job)
    files = JobFiles(job_dir)
    now, verdict = files.status(), files.verdict()
    if now is None:
        raise NotFound(f"job {job} has not started yet: no coordinator has written {job_dir}/status.json")
    if as_json:
        click.echo(json.dumps({**now, "verdict": verdict, "job_dir": str(job_dir)}))
        return
    for line in _head(now, verdict):
        click.echo(line)
    _nodes(now)
    for line in _tail(now):
        click.echo(line)


def _head(now: dict[str, Any], verdict: dict[str, Any] | None) -> list[str]:
    state = now["phase"] if verdict is None else f"{verdict['state']}: {verdict['reason']}"
    step = "-" if now["step"] is None else now["step"]
    loss = "-" if now["loss"] is None else f"{now['loss']:.4f}"
    pace = "-" if now["steady_step_s"] is None else f"{now['steady_step_s']:.3f} s"
    lines = [
        f"job {now['job_id']}  {state}",
        f"step {step}  loss {loss}  step time {pace}  epoch {now['epoch']}  moves {now['moves_done']}",
        f"coordinator on {now['leader']} (term {now['term']})",
    ]
    age = time.time() - now["at"]
    if verdict is None and age > STALE_S:
        lines.append(f"this is {age:.0f} s old: the coordinator may be gone")
    return lines


def _nodes(now: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("node", "standing", "ranks", "step", "notice"):
        table.add_column(column, overflow="fold")
    steps = {rank["rank"]: rank["step"] for rank in now["ranks"]}
    for node in now["nodes"]:
        at = [steps[rank] for rank in node["ranks"] if steps.get(rank) is not None]
        standing = node["standing"]
        if standing == "standby":
            standing += " (warm)" if node["warm"] else " (warming up)"
        if node["batch_host"]:
            standing += ", batch host"
        table.add_row(
            node["node"],
            standing,
            " ".join(map(str, node["ranks"])) or "-",
            str(min(at)) if at else "-",
            _notice(node),
        )
    Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 120).print(table)


def _notice(node: dict[str, Any]) -> str:
    notice = node["notice"]
    if notice is None:
        return ""
    text = f"{notice['kind']}: {notice['reason']}"
    if node["waiting"]:
        return f"{text}; no standby is free, training goes on here"
    if node["standing"] == "kept":
        return f"{text}; {node['kept_because']}"
    return text


def _tail(now: dict[str, Any]) -> list[str]:
    lines = []
    if now["move"] is not None:
        pairs = ", ".join(f"{leaver} → {joiner}" for leaver, joiner in now["move"]["pairs"])
        lines.append(f"moving {pairs}: {now['move']['phase']}, epoch {now['move']['epoch']}")
    last = now["last_interruption"]
    if last is not None:
        pairs = ", ".join(f"{p['leaver']} → {p['joiner']}" for p in last["pairs"])
        cost = f"{last['downtime_s']:.3f} s downtime" if "downtime_s" in last else "downtime not known yet"
        lines.append(f"last interruption: {pairs} at step {last['step']}, {cost}")
    return lines
