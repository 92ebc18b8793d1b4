"""A plan for people: the table, the bars, and where each figure is from."""

from __future__ import annotations

import io
import math
import os
import shutil
import sys

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tm_slurm.planning.inputs import WEEK_H, option
from tm_slurm.planning.sizing import Plan
from tm_slurm.planning.strategies import Strategy

MOST_ROWS = 14


def show(plan: Plan, sources: list[tuple[str, str]]) -> None:
    """Print it, in the width of the terminal (80 where there is none)."""
    width = shutil.get_terminal_size((80, 24)).columns
    text = io.StringIO()
    is_colored = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    console = Console(file=text, width=max(60, width), highlight=False, force_terminal=is_colored)
    rows = [plan.restart, *_rows(plan)]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("strategy", no_wrap=True)
    columns = ("ETTR", "wasted GPU h a week", "of them standbys", "cost a week", "none free")
    for name in columns:
        table.add_column(name, justify="right")
    for row in rows:
        style = "bold green" if _is_best(row, plan) else None
        free = "-" if row.none_free is None else f"{row.none_free:.2%}"
        cells = (f"{row.ettr:.4f}", _number(row.wasted_gpu_h), _number(row.waiting_gpu_h))
        table.add_row(_name(row, plan), *cells, _number(row.cost_week), free, style=style)
    console.print(table)
    console.print()
    for line in _bars(rows, plan, console.width):
        console.print(line, no_wrap=True, overflow="crop")
    console.print()
    for sentence in _conclusions(plan):
        console.print(sentence)
    console.print()
    console.print(_sources(plan, sources))
    click.echo("\n".join(line.rstrip() for line in text.getvalue().splitlines()))


def _rows(plan: Plan) -> list[Strategy]:
    """All of them, or some, if there are many: the first, the last, and the best among them."""
    every = math.ceil(len(plan.standbys) / MOST_ROWS)
    return [
        one
        for k, one in enumerate(plan.standbys)
        if k % every == 0 or k == len(plan.standbys) - 1 or _is_best(one, plan)
    ]


def _is_best(one: Strategy, plan: Plan) -> bool:
    return one.standbys == plan.best.standbys


def _name(one: Strategy, plan: Plan) -> str:
    if one.standbys is None:
        return "restart"
    name = f"{one.standbys} standby{'' if one.standbys == 1 else 's'}"
    return f"{name}  ←" if _is_best(one, plan) else name


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _bars(rows: list[Strategy], plan: Plan, width: int) -> list[Text]:
    names = [_name(row, plan) for row in rows]
    room = width - max(map(len, names)) - 2
    most = max((row.wasted_gpu_h for row in rows), default=0.0) or 1.0
    lines = [Text("GPU hours a week:  █ training stands still   ░ standbys wait")]
    for name, row in zip(names, rows, strict=True):
        stopped = round(row.stopped_gpu_h / most * room)
        waiting = round(row.wasted_gpu_h / most * room) - stopped
        lines.append(Text(f"{name.ljust(max(map(len, names)))}  {'█' * stopped}{'░' * waiting}".rstrip()))
    return lines


def _conclusions(plan: Plan) -> list[str]:
    best, week = plan.best, WEEK_H * plan.inputs.gpus
    number = "no standby" if best.standbys == 0 else _name(best, plan).removesuffix("  ←")
    lines = [
        f"Least is wasted with {number}: {best.wasted_gpu_h / week:.2%} of the GPU hours, "
        f"{_change(best, plan.restart)} than with restarts, {_change(best, plan.standbys[0])} than with none."
    ]
    for gpus, other in (
        (plan.break_even_gpus, "none"),
        (plan.break_even_restart_gpus, "restarts"),
    ):
        if gpus is None:
            lines.append(f"One standby wastes more than {other} at any size, at these costs.")
        else:
            lines.append(f"One standby wastes less than {other} from {gpus:,} GPUs on, at these costs.")
    return lines


def _change(one: Strategy, other: Strategy) -> str:
    if other.wasted_gpu_h == 0:
        return "no less"
    change = one.wasted_gpu_h / other.wasted_gpu_h - 1.0
    return f"{abs(change):.0%} {'less' if change <= 0 else 'more'}"


_UNITS = {"_h": " h", "_s": " s"}


def _sources(plan: Plan, sources: list[tuple[str, str]]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for name, source in sources:
        unit = _UNITS.get(name[-2:], "")
        table.add_row(option(name), f"{getattr(plan.inputs, name):.4g}{unit}", source)
    return table
