"""`tm-slurm status`: where a job stands, from the file that its coordinator keeps."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click

from tm_slurm.cli.failures import NotFound
from tm_slurm.cli.jobs import find_job_dir
from tm_slurm.cli.naming import job_argument
from tm_slurm.cli.slurm_word import id_of, slurm_word
from tm_slurm.cli.table import table

STALE_S = 5.0
"""A status this old is not believed without asking Slurm; until then nobody is asked."""


@click.command()
@job_argument
@click.option("--json", "as_json", is_flag=True, help="The whole status as one JSON object.")
def status(job: str, as_json: bool) -> None:
    """Ranks, nodes, standbys, epoch, step, loss and the last interruption of JOB.

    \b
    tm-slurm status 1234

    JOB is a job id, a job's name or a job directory; without it, the only one that is running.
    """
    from tm_slurm.observe.follow import JobFiles

    job_dir = find_job_dir(job)
    files = JobFiles(job_dir)
    verdict, now = files.verdict(), files.status()
    job_id = id_of(job, job_dir, now)
    phase, about = _phase(job_id, job_dir, now, verdict)
    if phase is None:
        raise NotFound(f"job {job} has not started yet: no coordinator has written {job_dir}/status.json")
    if as_json:
        known = now if now is not None else {"job_id": job_id, "nodes": [], "ranks": []}
        click.echo(json.dumps({**known, "phase": phase, "verdict": verdict, "job_dir": str(job_dir)}))
        return
    lines = [f"job {job_id if job_id is not None else job}  {about}"]
    if now is not None:
        is_at_work = phase not in ("ended", "gone", "pending")
        lines += [*_head(now, is_at_work), *_nodes(now, is_at_work), *_plans(now, is_at_work), *_tail(now)]
    failure = verdict.get("failure") if verdict is not None else None
    if failure is not None and failure.get("traceback"):
        lines += ["", failure["traceback"], "", f"its log: {failure.get('log')}"]
    click.echo("\n".join(lines))


def _phase(
    job_id: int | None, job_dir: Path, now: dict[str, Any] | None, verdict: dict[str, Any] | None
) -> tuple[str | None, str]:
    """How the job stands, in one word (None when nobody knows) and in words for people."""
    ending = "" if verdict is None else f"{verdict['state']}: {verdict['reason']}"
    if verdict is not None and verdict["state"] != "requeue":
        return "ended", ending
    known = str(now["phase"]) if now is not None else None
    age = time.time() - now["at"] if now is not None else 0.0
    if verdict is None and known is not None and is_fresh(now):
        return known, known
    word = slurm_word(job_id, job_dir)
    if word is not None and word.is_pending:
        return "pending", f"pending: {word.why_pending}"
    if verdict is not None:
        return "ended", ending
    if known is None:
        if word is None:
            return None, ""
        if word.is_over:
            return "ended", f"ended before it started: {word}"
        return "starting", f"starting: no coordinator yet, {word}"
    if word is not None and word.is_over:
        return "gone", f"gone: ended without a verdict, {word}; see {job_dir}/logs"
    return known, f"{known}, {age:.0f} s ago: the coordinator may be gone"


def is_fresh(now: dict[str, Any] | None) -> bool:
    """Whether a status is so young that somebody surely leads the job."""
    return now is not None and time.time() - float(now["at"]) <= STALE_S


def _head(now: dict[str, Any], is_at_work: bool) -> list[str]:
    step = "-" if now["step"] is None else now["step"]
    loss = "-" if now["loss"] is None else f"{now['loss']:.4g}"
    pace = "-" if now["steady_step_s"] is None else f"{now['steady_step_s']:.3f} s"
    lines = [f"step {step}  loss {loss}  step time {pace}  epoch {now['epoch']}  moves {now['moves_done']}"]
    if is_at_work:
        lines.append(f"coordinator on {now['leader']} (term {now['term']})")
    return lines


def _nodes(now: dict[str, Any], is_at_work: bool) -> list[str]:
    """One line a node; of a job that is over, only where its ranks were."""
    steps = {rank["rank"]: rank["step"] for rank in now["ranks"]}
    rows = [("node", "standing", "ranks", "step", "notice")]
    for node in now["nodes"]:
        at = [steps[rank] for rank in node["ranks"] if steps.get(rank) is not None]
        rows.append(
            (
                node["node"],
                _standing(node) if is_at_work else "-",
                " ".join(map(str, node["ranks"])) or "-",
                str(max(at)) if at else "-",
                _notice(node) if is_at_work else "",
            )
        )
    return table(rows)


def _standing(node: dict[str, Any]) -> str:
    standing = str(node["standing"])
    if standing == "standby":
        standing += " (warm)" if node["warm"] else " (warming up)"
    return f"{standing}, batch host" if node["batch_host"] else standing


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


def _plans(now: dict[str, Any], is_at_work: bool) -> list[str]:
    """What is to come for the job."""
    if not is_at_work:
        return []
    lines = []
    if now.get("stopping"):
        lines.append(f"stopping with a checkpoint, back into the queue: {now['stopping']}")
    for window in now.get("windows", []):
        opens = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(window["opens"]))
        lines.append(f"reservation {window['name']} over {','.join(window['nodes'])} from {opens}")
    return lines


def _tail(now: dict[str, Any]) -> list[str]:
    lines = []
    for rank, adopter in now.get("absent", {}).items():
        lines.append(f"rank {rank} has no node: rank {adopter} does its share until one comes")
    if now["move"] is not None:
        pairs = ", ".join(f"{leaver} → {joiner}" for leaver, joiner in now["move"]["pairs"])
        lines.append(f"moving {pairs}: {now['move']['phase']}, epoch {now['move']['epoch']}")
    last = now["last_interruption"]
    if last is not None:
        from tm_slurm.observe.spoken import of_downtime

        pairs = ", ".join(f"{p['leaver']} → {p['joiner']}" for p in last["pairs"])
        known = of_downtime(last["downtime_s"]) if "downtime_s" in last else "not known yet"
        lines.append(f"last interruption: {pairs} at step {last['step']}, downtime {known}")
    return lines
