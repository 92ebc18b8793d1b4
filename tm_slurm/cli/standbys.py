"""`tm-slurm standbys`: the nodes that a job holds in reserve, and how soon each could take over."""

from __future__ import annotations

import json
from typing import Any

import click

from tm_slurm.cli.failures import NotFound
from tm_slurm.cli.jobs import find_job_dir
from tm_slurm.cli.naming import job_argument
from tm_slurm.cli.table import table


@click.command()
@job_argument
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def standbys(job: str, as_json: bool) -> None:
    """The nodes that JOB holds in reserve: warm or not, and how many failures they are good for.

    \b
    tm-slurm standbys 1234
    """
    from tm_slurm.observe.follow import JobFiles

    job_dir = find_job_dir(job)
    files = JobFiles(job_dir)
    now = files.status()
    if now is None:
        raise NotFound(f"job {job} has not started yet: no coordinator has written {job_dir}/status.json")
    if files.verdict() is not None:
        now = {**now, "nodes": []}
    found = [_standby(node) for node in now["nodes"] if node["standing"] == "standby"]
    free = [one for one in found if one["free"]]
    waiting = [node["node"] for node in now["nodes"] if node["waiting"]]
    if as_json:
        answer = {"job_id": now["job_id"], "standbys": found, "free": len(free), "waiting_for_one": waiting}
        click.echo(json.dumps(answer))
        return
    lines = []
    if found:
        rows = [("node", "warm", "batch host", "notice")]
        rows += [
            (one["node"], _yes(one["warm"]), _yes(one["batch_host"]), one["notice"] or "") for one in found
        ]
        lines += table(rows)
    lines.append(f"{len(free)} free, {sum(1 for one in free if one['warm'])} of them warm")
    if waiting:
        lines.append(f"waiting for one: {', '.join(waiting)}")
    click.echo("\n".join(lines))


def _standby(node: dict[str, Any]) -> dict[str, Any]:
    notice = node["notice"]
    return {
        "node": node["node"],
        "warm": bool(node["warm"]),
        "batch_host": bool(node["batch_host"]),
        "free": notice is None,
        "notice": None if notice is None else f"{notice['kind']}: {notice['reason']}",
    }


def _yes(value: bool) -> str:
    return "yes" if value else "no"
