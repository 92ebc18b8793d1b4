"""The report's pictures, by matplotlib: one drawing for the page (SVG whose colours are the page's) and for
PNGs. Wide and narrow, so that text stays readable on a phone."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

from tm_slurm.observe.costs import PARTS, Costs, Interruption
from tm_slurm.observe.roles import ACTIVE, LEFT, STANDBY, Stretch

COLOURS = {
    "ink": "#1f2328",
    "muted": "#656d76",
    "grid": "#d8dee4",
    "surface": "#ffffff",
    "active": "#2a78d6",
    "standby": "#1baf7a",
    "left": "#c4ccd4",
    "mark": "#c93c37",
    "detect": "#8c959f",
    "decide": "#7a5fd0",
    "switch": "#2a78d6",
    "state": "#1baf7a",
    "redo": "#eb6834",
    "other": "#d9a400",
}
"""As in a PNG; the page has them as CSS variables of these names, light and dark."""

WIDE_IN, NARROW_IN = 9.6, 4.2
ROWS_LIMIT = 40
POINTS_LIMIT = 2000
LOSS_HEIGHT_IN = 2.9

ROLE_WORDS = {ACTIVE: "has ranks", STANDBY: "standby", LEFT: "left, or starting again"}
PART_WORDS = {
    "detect": "detect",
    "decide": "decide",
    "switch": "switch",
    "state": "transfer",
    "redo": "redo",
    "other": "first step",
}


class NoMatplotlib(RuntimeError):
    """The extra is not installed."""


Draw = Callable[[Any, Any, bool], None]
"""Draws into a figure's axes; told whether it is narrow."""


def _figure(draw: Draw, height: float, narrow: bool, salt: str) -> Any:
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise NoMatplotlib("the report needs matplotlib: pip install 'tm_slurm[report]'") from None
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": salt, "font.size": 9})
    figure = Figure(figsize=(NARROW_IN if narrow else WIDE_IN, height), layout="constrained")
    axes = figure.add_subplot()
    figure.patch.set_alpha(0.0)
    axes.set_facecolor("none")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(COLOURS["grid"])
    axes.tick_params(colors=COLOURS["muted"], length=0)
    draw(figure, axes, narrow)
    return figure


def svg(draw: Draw, height: float, *, narrow: bool, salt: str) -> str:
    """An <svg> element as wide as its place, with the page's colours. NoMatplotlib without the extra."""
    target = io.StringIO()
    _figure(draw, height, narrow, salt).savefig(target, format="svg", metadata={"Date": None})
    text = target.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    for name, colour in COLOURS.items():
        text = text.replace(colour, f"var(--{name})")
    return re.sub(r"font: ([\d.]+px) [^;\"]*", r"font: \1 system-ui, sans-serif", text)


def png(draw: Draw, height: float, salt: str) -> bytes:
    """The same picture by itself, light. NoMatplotlib without the extra."""
    figure = _figure(draw, height, False, salt)
    figure.patch.set_alpha(1.0)
    figure.patch.set_facecolor(COLOURS["surface"])
    target = io.BytesIO()
    figure.savefig(target, format="png", dpi=160, metadata={"Software": None})
    return target.getvalue()


def run_height(found: list[Stretch], interruptions: list[Interruption]) -> float:
    return 1.15 + 0.27 * len(_rows(found, interruptions))


def run(found: list[Stretch], interruptions: list[Interruption], began: float) -> Draw:
    """The nodes' roles over time, with the interruptions by number."""
    rows = _rows(found, interruptions)

    def draw(figure: Any, axes: Any, narrow: bool) -> None:
        scale, unit = _scale(max((s.end for s in found), default=began) - began)
        for row, node in enumerate(rows):
            for role in ROLE_WORDS:
                mine = [s for s in found if (s.node, s.role) == (node, role)]
                bars = [((s.begin - began) / scale, (s.end - s.begin) / scale) for s in mine]
                axes.broken_barh(bars, (row - 0.31, 0.62), color=COLOURS[role], linewidth=0)
        _mark(axes, interruptions, lambda one: (one.end - began) / scale)
        axes.set_yticks(range(len(rows)), rows)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlabel(f"{unit} since training began", color=COLOURS["muted"])
        axes.margins(x=0.01)
        there = [role for role in (ACTIVE, STANDBY, LEFT) if any(s.role == role for s in found)]
        _legend(figure, [(ROLE_WORDS[role], COLOURS[role]) for role in there], columns=2 if narrow else 3)

    return draw


def _rows(found: list[Stretch], interruptions: list[Interruption]) -> list[str]:
    """The nodes to show: all, or of many those that something happened to."""
    nodes = list(dict.fromkeys(stretch.node for stretch in found))
    if len(nodes) > ROWS_LIMIT:
        touched = {p[side] for one in interruptions for p in one.pairs for side in ("leaver", "joiner")}
        nodes = [node for node in nodes if node in touched][:ROWS_LIMIT]
    return nodes


def breakdown_height(costs: Costs) -> float:
    return 1.15 + 0.34 * len(_with_parts(costs))


def _with_parts(costs: Costs) -> list[Interruption]:
    """The dearest ones, in order of time."""
    known = [one for one in costs.interruptions if one.parts]
    dearest = sorted(known, key=lambda one: -(one.downtime_s or 0.0))[:ROWS_LIMIT]
    return sorted(dearest, key=lambda one: one.number)


def breakdown(costs: Costs) -> Draw:
    """The downtime of each interruption by phase."""
    shown = _with_parts(costs)

    def draw(figure: Any, axes: Any, narrow: bool) -> None:
        longest = max((sum(max(0.0, s) for s in one.parts.values()) for one in shown), default=1.0) or 1.0
        is_marked = False
        for row, one in enumerate(shown):
            left = 0.0
            for name in PARTS:
                seconds = max(0.0, one.parts.get(name, 0.0))
                axes.barh(row, seconds, left=left, height=0.55, color=COLOURS[name], linewidth=0)
                left += seconds
            if one.downtime_s is not None and 0 < one.downtime_s < left:
                is_marked = True
                axes.plot([one.downtime_s] * 2, [row - 0.38, row + 0.38], color=COLOURS["ink"], linewidth=1.6)
            text = f"{one.downtime_s:.2f} s" if (one.downtime_s or 0.0) > 0 else "none"
            axes.text(left + longest * 0.012, row, text, va="center", color=COLOURS["ink"])
        labels = [f"{one.number}" if narrow else f"{one.number}  {one.kind}" for one in shown]
        axes.set_yticks(range(len(shown)), [label.replace("_", " ") for label in labels])
        axes.set_ylim(len(shown) - 0.4, -0.6)
        axes.set_xlim(0.0, longest * (1.22 if narrow else 1.1))
        axes.set_xlabel("seconds", color=COLOURS["muted"])
        there = [name for name in PARTS if any(one.parts.get(name, 0.0) > 0 for one in shown)]
        entries = [(PART_WORDS[name], COLOURS[name]) for name in there]
        if is_marked:
            entries.append(("mark: downtime", COLOURS["ink"]))
        _legend(figure, entries, columns=3 if narrow else 7)

    return draw


def loss(steps: list[dict[str, Any]], interruptions: list[Interruption]) -> Draw:
    """Loss by step; the interruptions where they took effect."""
    known = [(step["step"], step["loss"]) for step in steps if step.get("loss") is not None]
    known = known[:: max(1, len(known) // POINTS_LIMIT)]

    def draw(figure: Any, axes: Any, narrow: bool) -> None:
        axes.plot(
            [at for at, _ in known], [value for _, value in known], color=COLOURS["active"], linewidth=1.6
        )
        _mark(axes, [one for one in interruptions if one.step is not None], lambda one: one.step or 0)
        axes.grid(axis="y", color=COLOURS["grid"], linewidth=0.7)
        axes.set_axisbelow(True)
        axes.set_xlabel("step", color=COLOURS["muted"])
        axes.set_ylabel("loss", color=COLOURS["muted"])
        axes.margins(x=0.01)

    return draw


def _mark(axes: Any, interruptions: list[Interruption], place: Callable[[Interruption], float]) -> None:
    places = [place(one) for one in interruptions]
    everywhere = axes.get_xaxis_transform()
    axes.vlines(places, 0, 1, COLOURS["mark"], (0, (3, 2)), linewidth=1.0, transform=everywhere)
    if len(interruptions) > ROWS_LIMIT:
        return  # the numbers would hide each other
    for one, at in zip(interruptions, places, strict=True):
        axes.annotate(
            str(one.number),
            (at, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 2),
            textcoords="offset points",
            ha="center",
            color=COLOURS["mark"],
        )


def _legend(figure: Any, entries: list[tuple[str, str]], columns: int) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(facecolor=colour, label=text, linewidth=0) for text, colour in entries]
    figure.legend(
        handles=patches,
        loc="outside upper left",
        ncols=columns,
        frameon=False,
        labelcolor=COLOURS["ink"],
        handlelength=1.0,
        columnspacing=1.4,
    )


def _scale(seconds: float) -> tuple[float, str]:
    for limit, scale, unit in ((180.0, 1.0, "seconds"), (3 * 3600.0, 60.0, "minutes")):
        if seconds <= limit:
            return scale, unit
    return (3600.0, "hours") if seconds <= 72 * 3600.0 else (86400.0, "days")
