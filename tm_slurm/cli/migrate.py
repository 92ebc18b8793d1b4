"""`tm-slurm migrate`: a user's own request to leave a node."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click

from tm_slurm.cli.failures import Failed, UserMistake
from tm_slurm.cli.jobs import ask_leader, find_job_dir
from tm_slurm.cli.naming import job_argument
from tm_slurm.cli.slurm_word import id_of, slurm_word


@click.command()
@job_argument
@click.option("--node", required=True, help="The node whose ranks are to move, as Slurm calls it.")
@click.option(
    "--reason", default="asked by the user", show_default=True, help="Shown in status and timeline."
)
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def migrate(job: str, node: str, reason: str, as_json: bool) -> None:
    """Move a node's ranks to a standby; the node stays in the job, as a standby.

    \b
    tm-slurm migrate 1234 --node n3

    """
    job_dir = find_job_dir(job)
    at = time.time()
    event = {
        "id": f"request:{node}:{at:.6f}",
        "kind": "request",
        "node": node,
        "source": "user",
        "reason": reason,
        "at": at,
    }
    require_running(job, job_dir)
    try:
        answer = ask_leader(job_dir, {"kind": "event", "event": event})
    except Failed as failure:
        raise explained(failure, job, job_dir) from None
    if "error" in answer:
        raise UserMistake(str(answer["error"]))
    try:
        now = ask_leader(job_dir, {"kind": "status"})
    except Failed:  # the request has been taken; whether it has to wait is told by status
        now = None
    waits = now is not None and _must_wait(node, now)
    if as_json:
        click.echo(json.dumps({"job": job, "node": node, "waits_for_a_standby": waits}))
    elif waits:
        click.echo(f"job {job}: no standby is free: the ranks of {node} will move when one is")
    else:
        click.echo(f"job {job}: the ranks of {node} will move; see: tm-slurm status {job}")


def require_running(job: str, job_dir: Path) -> None:
    """UserMistake when the job has ended."""
    from tm_slurm.observe.follow import JobFiles

    verdict = JobFiles(job_dir).verdict()
    if verdict is not None and verdict["state"] != "requeue":
        raise UserMistake(f"job {job} has ended: {verdict['state']}")


def explained(failure: Failed, job: str, job_dir: Path) -> Failed | UserMistake:
    """Why nobody leads the job, where Slurm knows; else the failure itself."""
    from tm_slurm.observe.follow import JobFiles

    word = slurm_word(id_of(job, job_dir, JobFiles(job_dir).status()), job_dir)
    if word is None:
        return failure
    if word.is_pending:
        return UserMistake(f"job {job} is pending ({word.why_pending}): no ranks to move yet")
    if word.is_over:
        return UserMistake(f"job {job} has ended: {word}")
    return failure


def _must_wait(node: str, now: dict[str, Any]) -> bool:
    """Whether, by the coordinator's status, the ranks of `node` have nowhere to go yet."""
    if now["move"] is not None and any(leaver == node for leaver, _ in now["move"]["pairs"]):
        return False
    if any(other["standing"] == "standby" and other["notice"] is None for other in now["nodes"]):
        return False
    return any(other["node"] == node and other["standing"] == "active" for other in now["nodes"])
