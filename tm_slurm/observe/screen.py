"""How a running job looks in a terminal, by rich. Words carry the meaning; colours only help."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tm_slurm.observe.live import PHASES, LiveJob, Moving
from tm_slurm.observe.spoken import plain, spoken

BLOCKS = "▁▂▃▄▅▆▇█"
CELL = 26
"""Columns for a node."""

GRID_ROWS = 12
SHOWN_AFTER_S = 15.0
"""How long a move that is over stays in sight."""

STALE_S = 5.0
STYLES = {
    "active": "green",
    "standby": "cyan",
    "leaving": "yellow",
    "kept": "yellow",
    "lost": "red",
    "released": "dim",
    "expected": "dim",
}
INTEREST = ("leaving", "kept", "lost", "standby", "expected", "active", "released")


def screen(
    job: LiveJob, name: str, *, width: int, height: int, now: float, queued: str = ""
) -> RenderableType:
    """Everything there is to see, in `width` columns and `height` lines. `now`: Unix seconds; `queued`: why
    Slurm has not started it, if it has not."""
    parts: list[RenderableType] = [_title(job, name, now, queued), _figures(job)]
    if job.losses:
        parts.append(_sparkline(job, width))
    status = job.status
    used = len(parts) + 2
    if status is not None:
        grid, rows = _grid(status["nodes"], _steps(status), width)
        parts += [Text(), grid]
        used += rows + 1
        parts += (plans := _plans(status))
        used += len(plans)
    if job.moving is not None and (not job.moving.over or now - job.moving.ended_at < SHOWN_AFTER_S):
        parts += [Text(), _moving(job.moving, now), _phase_bar(job.moving)]
        used += 3
    room = max(3, height - used - 1)
    lines = [(e, text) for e in job.events if (text := spoken(e)) is not None][-room:]
    parts.append(Text())
    parts += [_event(entry, text, width) for entry, text in lines]
    return Group(*parts)


def _title(job: LiveJob, name: str, now: float, queued: str) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis").append(f"job {name}  ", "bold")
    if job.verdict is not None:
        style = "green" if job.verdict["state"] == "completed" else "red"
        return text.append(plain(f"{job.verdict['state']}: {job.verdict['reason']}"), style)
    if queued:
        return text.append(plain(f"pending: {queued}"), "yellow")
    if job.status is None:
        return text.append("waiting for the coordinator", "yellow")
    status = job.status
    text.append(str(status["phase"]), "green" if status["phase"] == "training" else "yellow")
    if status.get("stopping"):
        text.append(plain(f"  stopping: {status['stopping']}"), "yellow")
    age = now - float(status["at"])
    if age > STALE_S:
        return text.append(f"  no word for {age:.0f} s", "red")
    text.append(f"  epoch {status['epoch']}  coordinator on {status['leader']} (term {status['term']})")
    standbys = [node for node in status["nodes"] if node["standing"] == "standby"]
    warm = sum(bool(node["warm"]) for node in standbys)
    said = f"{warm} of {len(standbys)} warm" if standbys else "none"
    return text.append(f"  standbys: {said}", "" if warm else "yellow")


def _figures(job: LiveJob) -> Text:
    parts = []
    step = job.last_step["step"] if job.last_step is not None else None
    if step is not None:
        parts.append(f"step {step}" + (f"/{job.total_steps}" if job.total_steps is not None else ""))
    if job.losses:
        parts.append(f"loss {job.losses[-1]:.4g}")
    pace = job.status.get("steady_step_s") if job.status is not None else None
    if pace is not None:
        parts.append(f"step time {pace:.3f} s")
    if job.tokens_per_s is not None:
        parts.append(f"{_short(job.tokens_per_s)} tokens/s")
    elif job.steps_per_s is not None:
        parts.append(f"{job.steps_per_s:.3g} steps/s")
    if job.ettr is not None:
        parts.append(f"ETTR {100 * job.ettr:.1f} %")
    return Text("  ".join(parts) or "no step yet", no_wrap=True, overflow="ellipsis")


def _short(value: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.3g} {unit}"
    return f"{value:.0f}"


def _sparkline(job: LiveJob, width: int) -> Text:
    first = job.first_loss if job.first_loss is not None else job.losses[0]
    label = f" {first:.3g} → {job.losses[-1]:.3g}"
    return Text("loss ").append(sparkline(list(job.losses), width - 5 - len(label)), "cyan").append(label)


def sparkline(values: list[float], columns: int) -> str:
    """The means of equal parts of `values`, one block a column; what is no number is left blank."""
    columns = max(1, min(columns, len(values)))
    means = []
    for column in range(columns):
        part = values[column * len(values) // columns : (column + 1) * len(values) // columns]
        means.append(sum(part) / len(part))
    finite = [mean for mean in means if mean - mean == 0]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((m - low) * scale)] if m - m == 0 else " " for m in means)


def _steps(status: dict[str, Any]) -> dict[int, int]:
    return {int(r["rank"]): int(r["step"]) for r in status["ranks"] if r.get("step") is not None}


def _grid(nodes: list[dict[str, Any]], steps: dict[int, int], width: int) -> tuple[Table, int]:
    """Nodes in cells; of very many, those in which something goes on before the others."""
    columns = max(1, width // CELL)
    room = columns * GRID_ROWS
    shown = nodes
    if len(nodes) > room:
        order = sorted(nodes, key=lambda n: (not _is_noticed(n), INTEREST.index(n["standing"])))
        shown = order[: room - 1]
    table = Table.grid(padding=(0, 1), expand=False)
    for _ in range(columns):
        table.add_column(width=min(CELL, width // columns) - 1, no_wrap=True, overflow="ellipsis")
    cells = [_cell(node, steps) for node in shown]
    if len(shown) < len(nodes):
        cells.append(Text(f"and {len(nodes) - len(shown)} more", "dim"))
    rows = [cells[i : i + columns] for i in range(0, len(cells), columns)]
    for row in rows:
        table.add_row(*row)
    return table, len(rows)


def _cell(node: dict[str, Any], steps: dict[int, int]) -> Text:
    standing, ranks = str(node["standing"]), node["ranks"]
    text = Text(no_wrap=True, overflow="ellipsis").append(f"{node['node']} ", "bold")
    if standing == "active":
        span = f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 2 else ",".join(map(str, ranks))
        words = f"rank{'s' if len(ranks) > 1 else ''} {span}"
        at = [steps[rank] for rank in ranks if rank in steps]
        words += f" at {max(at)}" if at else ""
    elif standing == "standby":
        words = "standby, warm" if node["warm"] else "standby, warming"
    else:
        words = standing
    text.append(words, STYLES.get(standing, ""))
    if _is_noticed(node):
        text.append(plain(f" {node['notice']['kind']}"), "bold yellow")
    return text


def _is_noticed(node: dict[str, Any]) -> bool:
    """Whether a node is still to be left, or given back."""
    return node["notice"] is not None and node["standing"] not in ("released", "lost")


def _plans(status: dict[str, Any]) -> list[Text]:
    lines = []
    for window in status.get("windows", [])[:2]:
        opens = time.strftime("%d %b %H:%M", time.localtime(window["opens"]))
        text = plain(f"reservation {window['name']} over {','.join(window['nodes'])} from {opens}")
        lines.append(Text(text, "yellow", no_wrap=True, overflow="ellipsis"))
    waiting = [node["node"] for node in status["nodes"] if node.get("waiting")]
    if waiting:
        text = f"no standby is free for {', '.join(waiting)}: training goes on there"
        lines.append(Text(text, "bold yellow", no_wrap=True, overflow="ellipsis"))
    return lines


def _moving(moving: Moving, now: float) -> Text:
    after = moving.over or f"{max(0.0, now - moving.since):.1f} s"
    return Text(plain(f"{moving.what}: {after}"), "bold", no_wrap=True, overflow="ellipsis")


def _phase_bar(moving: Moving) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    for phase in PHASES:
        if moving.done(phase):
            text.append(f"[x] {phase}  ", "green")
        elif phase in moving.at_work:
            text.append(f"[>] {phase}  ", "bold yellow")
        else:
            text.append(f"[ ] {phase}  ", "dim")
    return text


def _event(entry: dict[str, Any], text: str, width: int) -> Text:
    at = time.strftime("%H:%M:%S", time.localtime(entry["at"]))
    what = str(entry["what"])
    bad = what in ("failed", "node_lost", "stuck", "late", "standby_died", "checkpoint_failed", "hangs")
    noticed = what.startswith("event_") or what in ("waiting", "cancelled", "kept", "release_refused")
    good = what in ("moved", "recovered", "drained", "trained")
    style = "red" if bad else "yellow" if noticed else "green" if good else ""
    return Text(no_wrap=True, overflow="ellipsis").append(f"{at}  ", "dim").append(text, style)
