"""A table for people: no blanks at the ends of lines, no wider than the terminal (or COLUMNS, or 80), and
nothing but text where the output is no terminal or NO_COLOR is set.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence

import click

_GAP = "  "
_NARROWEST_TEXT = 24


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table whose first row is its header; the last column is text, broken to fit."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    before = sum(widths) + len(_GAP) * len(widths)
    room = max(_NARROWEST_TEXT, shutil.get_terminal_size((80, 24)).columns - before)
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=True)]
        first, *further = textwrap.wrap(row[-1], room) or [""]
        lines.append(_GAP.join([*cells, first]).rstrip())
        lines += [" " * before + line for line in further]
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        lines[0] = click.style(lines[0], bold=True)
    return lines
