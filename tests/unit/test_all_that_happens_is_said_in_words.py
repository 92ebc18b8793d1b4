"""Whatever the coordinator writes into the timeline is a sentence for people, and the guide shows it."""

from __future__ import annotations

import ast
import re
import string
from pathlib import Path

import pytest

from tm_slurm.events.event import KINDS
from tm_slurm.observe.spoken import QUIET, WORDS, spoken

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "tm_slurm" / "events" / "README.md").read_text()


def noted() -> set[str]:
    """The first argument of every `_note(…)` of the coordinator that is a literal."""
    found: set[str] = set()
    for path in (ROOT / "tm_slurm" / "coordinator").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            called = isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called in ("_note", "Note") and node.args and isinstance(node.args[0], ast.Constant):
                found.add(str(node.args[0].value))
    return found


def test_every_note_has_words() -> None:
    assert len(noted()) > 40
    known = WORDS.keys() | QUIET
    assert {what for what in noted() if not what.startswith("event_")} <= known


def pattern_of(words: str) -> str:
    return "".join(
        re.escape(text) + (".+" if field is not None else "")
        for text, field, _, _ in string.Formatter().parse(words)
    )


def test_every_kind_of_event_is_in_the_guide() -> None:
    told = re.findall(r"^### (.*)$", GUIDE, re.MULTILINE)
    assert {kind for line in told for kind in re.findall(r"`([a-z_]+)`", line)} == KINDS


@pytest.mark.parametrize("line", re.findall(r"^    \d\d:\d\d:\d\d  (.*)$", GUIDE, re.MULTILINE))
def test_lines_of_the_guide_are_as_printed(line: str) -> None:
    event = re.fullmatch(r"(.+): ([a-z ]+)(?:: (.+))? \(from (\w+)\)", line)
    if event and event[2].replace(" ", "_") in KINDS:
        entry = {"what": f"event_{event[2].replace(' ', '_')}", "source": event[4], "reason": event[3] or ""}
        assert spoken({**entry, "node": event[1]} if event[1] != "the job" else entry) == line
        return
    assert any(re.fullmatch(pattern_of(words), line) for words in WORDS.values()), line
