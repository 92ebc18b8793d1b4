"""The recorded job (`make record`): char_gpt, a node drained, a rank killed, another node drained.

Which nodes those were is for the record to say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tm_slurm.observe.follow import JobFiles

RECORDED = Path(__file__).with_name("recorded_job")
TIMELINE: list[dict[str, Any]] = JobFiles(RECORDED).timeline()
NODES = [str(node["node"]) for node in (JobFiles(RECORDED).status() or {})["nodes"]]


def noted(what: str) -> list[dict[str, Any]]:
    """The entries of one kind."""
    return [entry for entry in TIMELINE if entry["what"] == what]


def parties(note: dict[str, Any]) -> str:
    """Who gave ranks to whom, as people read it."""
    (pair,) = note["pairs"]
    return f"{pair['leaver']} → {pair['joiner']}"


FIRST, LAST = noted("moved")
(DEATH,) = noted("recovered")
SEATS = {rank["rank"]: rank["node"] for rank in (JobFiles(RECORDED).status() or {})["ranks"]}
"""Where the ranks were at the end."""
