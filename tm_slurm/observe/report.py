"""A job's report: one HTML page that needs nothing else, and its pictures as PNGs."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tm_slurm.observe import charts
from tm_slurm.observe.costs import BASELINES, Costs, Interruption, costs_of
from tm_slurm.observe.follow import JobFiles
from tm_slurm.observe.roles import stretches
from tm_slurm.observe.spoken import of_downtime

Entry = dict[str, Any]

DARK = {
    "ink": "#e6edf3",
    "muted": "#9198a1",
    "grid": "#30363d",
    "surface": "#151b23",
    "active": "#4493f8",
    "standby": "#2bb98a",
    "left": "#484f58",
    "mark": "#f47067",
    "detect": "#7d8590",
    "decide": "#a08cf0",
    "switch": "#4493f8",
    "state": "#2bb98a",
    "redo": "#f0803c",
    "other": "#d4a72c",
}

EVENTS_SHOWN = 2000
LONGEST_EVENT = 400
NOTHING = "-"


@dataclass
class Report:
    """`pictures`: name → PNG."""

    html: str
    pictures: dict[str, bytes]
    costs: Costs


def report_of(files: JobFiles, *, restart_s: float | None = None, baselines: Path = BASELINES) -> Report:
    """The report of a job that has done a step. ValueError when it has not; NoMatplotlib without the
    extra."""
    timeline, steps, status = files.timeline(), files.steps(), files.status() or {}
    started = [entry for entry in timeline if entry["what"] == "started"]
    if not steps or not started:
        raise ValueError("it has not done a step yet")
    costs = costs_of(files, restart_s, baselines)
    began, end = float(started[0]["at"]), float(steps[-1]["at"])
    nodes = [str(node["node"]) for node in status.get("nodes", ())] or list(started[0]["nodes"])
    found = stretches(timeline, nodes, max(end, float(timeline[-1]["at"])))
    drawn: list[tuple[str, str, str, charts.Draw, float]] = [
        (
            "timeline",
            "The run",
            "",
            charts.run(found, costs.interruptions, began),
            charts.run_height(found, costs.interruptions),
        )
    ]
    if any(one.parts for one in costs.interruptions):
        words = "Downtime: how much later the next step came, at the slowest rank, than usual."
        if any(one.parts.get("other", 0.0) < 0 for one in costs.interruptions):
            words += (
                " Where a bar is longer than the downtime (the mark, or none), the first new step took "
                "less than usual."
            )
        known = sum(bool(one.parts) for one in costs.interruptions)
        if known > charts.ROWS_LIMIT:
            words += f" Shown are the {charts.ROWS_LIMIT} dearest of {known}."
        draw, height = charts.breakdown(costs), charts.breakdown_height(costs)
        drawn.append(("downtime", "What each interruption cost", words, draw, height))
    if any(step.get("loss") is not None for step in steps):
        words = "Dashed: an interruption, at the first step after it."
        draw = charts.loss(steps, costs.interruptions)
        drawn.append(("loss", "Loss", words, draw, charts.LOSS_HEIGHT_IN))
    pictures = [
        (
            title,
            words,
            {
                shape: charts.svg(draw, height, narrow=shape == "narrow", salt=f"{name}-{shape}")
                for shape in ("wide", "narrow")
            },
        )
        for name, title, words, draw, height in drawn
    ]
    verdict = files.verdict()
    html = _page(
        title=f"Job {status.get('job_id') or files.job_dir.resolve().name}",
        state=verdict["state"] if verdict is not None else status.get("phase", "unknown"),
        about=_about(costs, steps, verdict),
        tiles=_tiles(costs, steps),
        pictures=pictures,
        rows=[_row(one) for one in costs.interruptions],
        comparison=comparison(costs),
        events=[_event(entry) for entry in timeline if entry["what"] != "span"][-EVENTS_SHOWN:],
    )
    pngs = {name: charts.png(draw, height, name) for name, _, _, draw, height in drawn}
    return Report(html, pngs, costs)


def _page(**content: Any) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("tm_slurm.observe", "."), autoescape=True, undefined=StrictUndefined
    )
    template = environment.get_template("report.html.j2")
    return template.render(light=charts.COLOURS, dark=DARK, **content)


def _about(costs: Costs, steps: list[Entry], verdict: Entry | None) -> str:
    began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(steps[0]["at"]))
    last = verdict["reason"] if verdict is not None else "as far as it has come"
    return f"From {began}, {spoken(costs.total_s)} of training on {costs.processors} {costs.unit}s; {last}."


def _tiles(costs: Costs, steps: list[Entry]) -> list[tuple[str, str]]:
    happened = [one for one in costs.interruptions if one.outcome in ("moved", "recovered")]
    losses = [step["loss"] for step in steps if step.get("loss") is not None]
    pace = f"a step takes {costs.steady_step_s:.3f} s" if costs.steady_step_s is not None else "steps"
    guess = "" if costs.restart.measured else ", assumed"
    return [
        (NOTHING if costs.ettr is None else f"{100 * costs.ettr:.2f} %", "ETTR: useful time of all time"),
        (str(len(happened)), f"{_interruptions(len(happened))} survived"),
        (spoken(costs.lost_s), "downtime of all of them"),
        (f"{_hours(costs.hours(costs.saved_s))} h", f"{costs.unit}-hours saved against restarts{guess}"),
        (f"{int(steps[-1]['step']) + 1}", pace),
        (f"{losses[0]:.3g} → {losses[-1]:.3g}" if losses else NOTHING, "loss, first and last"),
    ]


def _hours(hours: float) -> str:
    return f"{hours:.3g}" if abs(hours) >= 0.001 or hours == 0 else "under 0.001"


def _interruptions(number: int) -> str:
    return "interruption" if number == 1 else "interruptions"


def comparison(costs: Costs) -> list[str]:
    """What restarts would have cost instead, in sentences; where that is only assumed they say so."""
    moved = sum(one.outcome in ("moved", "recovered") for one in costs.interruptions)
    hours, unit = costs.hours, f"{costs.unit}-hours"
    restart = costs.restart
    lines = [
        f"This run lost {spoken(costs.lost_s)} ({_hours(hours(costs.lost_s))} {unit}) to {moved} "
        f"{_interruptions(moved)}. A restart for each would have lost {spoken(costs.restarts_s)} "
        f"({_hours(hours(costs.restarts_s))} {unit}), and the steps since its last checkpoint.",
        restart.source[0].upper() + restart.source[1:] + ".",
    ]
    if costs.standby_processors:
        lines.append(f"Holding the standbys took {_hours(costs.standby_hours)} {unit}.")
    if costs.queued_s > 0:
        lines.append(
            f"In between the job waited in the queue for {spoken(costs.queued_s)}, which counts as lost."
        )
    return lines


def _row(one: Interruption) -> dict[str, str]:
    moves = [f"{p['leaver']} → {p['joiner']} ({', '.join(map(str, p['ranks']))})" for p in one.pairs]
    return {
        "number": str(one.number),
        "when": time.strftime("%H:%M:%S", time.gmtime(one.end)),
        "kind": one.kind.replace("_", " "),
        "why": one.reason,
        "who": "; ".join(moves) or NOTHING,
        "step": NOTHING if one.step is None else str(one.step),
        "outcome": one.outcome,
        "prepared": NOTHING if one.prepare_s is None else f"{one.prepare_s:.2f} s",
        "downtime": NOTHING if one.downtime_s is None else of_downtime(one.downtime_s),
    }


def _event(entry: Entry) -> str:
    at = time.strftime("%H:%M:%S", time.gmtime(entry["at"]))
    fields = {key: value for key, value in entry.items() if key not in ("at", "what", "went_on")}
    words = " ".join(f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in fields.items())
    return f"{at}.{int(entry['at'] % 1 * 1000):03d}  {entry['what']:<16} {words}"[:LONGEST_EVENT]


def spoken(seconds: float) -> str:
    """A duration as people say it."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
