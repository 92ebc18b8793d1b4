"""`tm-slurm cancel-move`: a user takes back what `tm-slurm migrate` has asked for."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Literal

import click

from tm_slurm.cli.failures import Failed, UserMistake
from tm_slurm.cli.jobs import ask_leader, find_job_dir
from tm_slurm.cli.migrate import explained, require_running
from tm_slurm.cli.naming import job_argument

Outcome = Literal["cancelled", "too late", "open"]

DECIDED_S = 30.0
ASK_AGAIN_S = 0.1


@click.command("cancel-move")
@job_argument
@click.option("--node", required=True, help="The node whose ranks are to stay, as Slurm calls it.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def cancel_move(job: str, node: str, as_json: bool) -> None:
    """Take a `tm-slurm migrate` back: the ranks of a node stay where they are.

    \b
    tm-slurm cancel-move 1234 --node n3

    Up to the switch; exit code 1 when that has begun. A drain is taken back by who made it: scontrol update
    nodename=n3 state=resume.
    """
    job_dir = find_job_dir(job)
    at = time.time()
    event = {"id": f"resume:{node}:{at:.6f}", "kind": "resume", "node": node, "source": "user", "at": at}
    require_running(job, job_dir)
    try:
        answer = ask_leader(job_dir, {"kind": "event", "event": {**event, "reason": "cancelled by the user"}})
        if "error" in answer:
            raise UserMistake(str(answer["error"]))
        outcome = _outcome(node, job_dir)
    except Failed as failure:
        raise explained(failure, job, job_dir) from None
    if as_json:
        click.echo(json.dumps({"job": job, "node": node, "outcome": outcome}))
    if outcome == "too late":
        raise Failed(f"job {job}: too late: the ranks of {node} have been switched over, or are being")
    if outcome == "open":
        raise Failed(
            f"job {job}: not decided in {DECIDED_S:g} s, as no step has ended: see tm-slurm status {job}"
        )
    if not as_json:
        click.echo(f"job {job}: the ranks of {node} stay")


def _outcome(node: str, job_dir: Path) -> Outcome:
    """A move that is all prepared is decided on by the ranks, at the end of a step."""
    until = time.monotonic() + DECIDED_S
    while True:
        now = ask_leader(job_dir, {"kind": "status"})
        move = now["move"]
        if move is None or not any(leaver == node for leaver, _ in move["pairs"]):
            stays = any(one["node"] == node and one["standing"] == "active" for one in now["nodes"])
            return "cancelled" if stays else "too late"
        if move["phase"] == "switching":
            return "too late"
        if time.monotonic() > until:
            return "open"
        time.sleep(ASK_AGAIN_S)
