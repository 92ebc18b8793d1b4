"""`tm-slurm watch`: a job as it runs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from tm_slurm.cli.failures import Failed, NotFound
from tm_slurm.cli.jobs import find_job_dir
from tm_slurm.cli.naming import job_argument
from tm_slurm.cli.slurm_word import id_of, slurm_word

if TYPE_CHECKING:
    from rich.console import Console

    from tm_slurm.observe.live import LiveJob

LOOK_S = 0.25
SILENT_S = 5.0
"""Without a word from the coordinator for so long, Slurm is asked, as often."""

STEP_LINE_S = 5.0
"""Between two lines about steps where there is no terminal."""


@click.command()
@job_argument
@click.option("--json", "as_json", is_flag=True, help="Every entry as it comes, one JSON object a line.")
def watch(job: str, as_json: bool) -> None:
    """JOB as it runs: nodes, steps, loss, standbys, events, moves. Until it ends, or
    Ctrl-C; without a terminal one line for each event. Ends with 1 when the job failed.

    Tokens a second are shown where the config tells the tokens of a step (train.options.tokens_per_step).

    \b
    tm-slurm watch 1234

    """
    from rich.console import Console

    from tm_slurm.observe.live import LiveJob

    job_dir = find_job_dir(job)
    live = LiveJob(job_dir)
    console = Console(soft_wrap=True)
    on_screen = console.is_terminal and not console.is_dumb_terminal and not as_json
    end = _Ending(job, live)
    try:
        if on_screen:
            _on_screen(console, live, end)
        else:
            _in_lines(live, end, as_json=as_json)
    except KeyboardInterrupt:
        return
    if live.verdict is not None and not as_json:
        click.echo(f"job {end.name} {live.verdict['state']}: {live.verdict['reason']}")
    if live.verdict is not None and live.verdict["state"] != "completed":
        sys.exit(1)


class _Ending:
    """Whether there is more to come."""

    def __init__(self, job: str, live: LiveJob) -> None:
        self._job = job
        self._live = live
        self._heard_at = self._asked_at = time.monotonic()
        self._word = 0.0
        self.waits_for = ""
        """why the job is in the queue, if it is, as far as Slurm has been asked"""

    @property
    def name(self) -> str:
        known = (self._live.status or {}).get("job_id")
        return str(known) if known is not None else self._live.files.job_dir.resolve().name

    def has_come(self) -> bool:
        """NotFound or Failed when the job has ended without a verdict, as Slurm says."""
        if self._live.verdict is not None:
            return True
        now, said = time.monotonic(), float((self._live.status or {}).get("at", 0.0))
        if said != self._word:
            self._word, self._heard_at, self.waits_for = said, now, ""
        if now - max(self._heard_at, self._asked_at) > SILENT_S:
            self._asked_at = now
            job_dir, status = self._live.files.job_dir, self._live.status
            word = slurm_word(id_of(self._job, job_dir, status), job_dir)
            self.waits_for = word.why_pending if word is not None and word.is_pending else ""
            if word is not None and word.is_over and self._live.files.verdict() is None:
                if status is None:
                    raise NotFound(f"job {self._job} ended before it started: {word}")
                raise Failed(f"job {self._job} ended without a verdict, {word}; see {job_dir}/logs")
        return False


def _on_screen(console: Console, live: LiveJob, end: _Ending) -> None:
    from rich.live import Live

    from tm_slurm.observe.screen import screen

    with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as shown:
        while True:
            live.refresh()
            room, now = console.size, time.time()
            view = screen(live, end.name, width=room.width, height=room.height, now=now, queued=end.waits_for)
            shown.update(view, refresh=True)
            if end.has_come():
                return
            time.sleep(LOOK_S)


def _in_lines(live: LiveJob, end: _Ending, *, as_json: bool) -> None:
    told_at, queued = float("-inf"), ""
    while True:
        entries = live.refresh()
        if as_json:
            for entry in entries:
                click.echo(json.dumps(entry))
        else:
            told_at = _say(entries, told_at)
        if end.has_come():
            return
        if end.waits_for != queued:
            queued = end.waits_for
            if queued and not as_json:
                click.echo(f"{time.strftime('%H:%M:%S')}  pending: {queued}")
        time.sleep(LOOK_S)


def _say(entries: Iterable[dict[str, Any]], told_at: float) -> float:
    """One line for each event, and now and then one for a step; returns when that was last, Unix seconds."""
    from tm_slurm.observe.spoken import line_of

    for entry in entries:
        if entry["what"] != "step":
            line = line_of(entry)
            if line is not None:
                click.echo(line)
        elif entry["at"] - told_at >= STEP_LINE_S:
            told_at = float(entry["at"])
            at = time.strftime("%H:%M:%S", time.localtime(told_at))
            loss = f"  loss {entry['loss']:.4g}" if entry.get("loss") is not None else ""
            click.echo(f"{at}  step {entry['step']}{loss}")
    return told_at
