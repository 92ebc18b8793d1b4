"""`tm-slurm events`: what has happened in a job, line by line, and as it comes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import click

from tm_slurm.cli.failures import UserMistake
from tm_slurm.cli.jobs import find_job_dir
from tm_slurm.cli.naming import job_argument

LOOK_S = 0.2
"""How often the growing file is looked at: it may be on a file system that tells of no change."""
_LONGEST = 160


@click.command()
@job_argument
@click.option("--kind", "kinds", multiple=True, help="Only of this kind, such as moved; repeatable.")
@click.option("--last", type=click.IntRange(1), metavar="N", help="Only the last N.")
@click.option("--follow", "-f", is_flag=True, help="Go on with what comes, until the job ends.")
@click.option("--long", "-l", "is_long", is_flag=True, help="With date (UTC), kind and fields of each.")
@click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object a line.")
def events(
    *, job: str, kinds: tuple[str, ...], last: int | None, follow: bool, is_long: bool, as_json: bool
) -> None:
    """What has happened in JOB, in words: what was noticed, decided and done.

    \b
    tm-slurm events 1234
    tm-slurm events 1234 --follow --kind moved --kind recovered
    """
    from tm_slurm.observe.follow import JobFiles, JsonLines

    job_dir = find_job_dir(job)
    lines = JsonLines(job_dir / "timeline.jsonl")
    known = list(lines.new())
    seen = {str(entry.get("what")) for entry in known}
    missing = [kind for kind in kinds if kind not in seen]
    if missing and not follow:
        has = ", ".join(sorted(seen)) or "no events"
        raise UserMistake(f"--kind {missing[0]}: there is none in job {job}; it has {has}")
    line = json.dumps if as_json else _long if is_long else _asked_for(kinds)
    told = list(_lines(known, kinds, line))
    if not known and not follow:
        click.echo(f"nothing has happened yet: tm-slurm status {job} says how it stands", err=True)
    for text in told[-last:] if last is not None else told:
        click.echo(text)
    if follow:
        for text in _lines(_coming(lines, JobFiles(job_dir), known), kinds, line):
            click.echo(text)


def _coming(lines: Any, files: Any, known: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """What is written from now on, until the job has ended."""
    ended = any(entry.get("what") == "ended" for entry in known[-1:]) or files.verdict() is not None
    while not ended:
        time.sleep(LOOK_S)
        ended = files.verdict() is not None  # looked at first: what was written before it is shown
        yield from lines.new()


def _lines(
    entries: Iterable[dict[str, Any]], kinds: tuple[str, ...], line: Callable[[dict[str, Any]], str | None]
) -> Iterator[str]:
    """Those of the kinds that were asked for, or of all, as far as there is something to say of them."""
    for entry in entries:
        if not kinds or entry.get("what") in kinds:
            text = line(entry)
            if text is not None:
                yield text


def _asked_for(kinds: tuple[str, ...]) -> Callable[[dict[str, Any]], str | None]:
    """In words; what has none is shown with its fields when its kind was asked for by name."""
    return lambda entry: _in_words(entry) or (_long(entry) if entry.get("what") in kinds else None)


def _in_words(entry: dict[str, Any]) -> str | None:
    """As the guide has it (tm_slurm/events/README.md); None for what is for programs alone."""
    from tm_slurm.observe.spoken import line_of

    is_whole = isinstance(entry.get("what"), str) and isinstance(entry.get("at"), (int, float))
    return line_of(entry) if is_whole else _long(entry)


def _long(entry: dict[str, Any]) -> str:
    at = entry.get("at")
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at)) if isinstance(at, (int, float)) else "-" * 19
    told = " ".join(
        f"{key}={_value(value)}" for key, value in entry.items() if key not in ("at", "what") and value != ""
    )
    text = f"{moment}  {entry.get('what', '-'):<16}  {told}".rstrip()
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, str):
        return value if value.isprintable() and " " not in value else json.dumps(value, ensure_ascii=False)
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
