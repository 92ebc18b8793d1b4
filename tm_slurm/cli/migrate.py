"""`tm-slurm migrate`: a user's own request to leave a node."""

from __future__ import annotations

import time

import click

from tm_slurm.cli.failures import UserMistake
from tm_slurm.cli.jobs import ask_leader, find_job_dir


@click.command()
@click.argument("job")
@click.option("--node", required=True, help="The node whose ranks are to move, as Slurm calls it.")
@click.option(
    "--reason", default="asked by the user", show_default=True, help="Shown in status and timeline."
)
def migrate(job: str, node: str, reason: str) -> None:
    """Move a node's ranks to a standby; the node stays in the job, as a standby.

    \b
    tm-slurm migrate 1234 --node n3
   
"""
    at = time.time()
    event = {
        "id": f"request:{node}:{at:.6f}",
        "kind": "request",
        "node": node,
        "source": "user",
        "reason": reason,
        "at": at,
    }
    answer = ask_leader(find_job_dir(job), {"kind": "event", "event": event})
    if "error" in answer:
        raise UserMistake(str(answer["error"]))
    click.echo(f"job {job}: the ranks of {node} will move; see: tm-slurm status {job}")
