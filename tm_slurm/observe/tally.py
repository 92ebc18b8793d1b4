"""Counts for the metrics, from the timeline: a new leader that is given what there is goes on counting."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Upper ends of the downtimes' buckets."""


@dataclass
class Downtimes:
    """The downtimes of one kind of interruption: how many of each bucket (the last: all beyond), and their
    sum."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    sum_s: float = 0.0

    def add(self, seconds: float) -> None:
        """One more; less than nothing counts as nothing."""
        seconds = max(0.0, seconds)
        place = next((n for n, limit in enumerate(BUCKETS_S) if seconds <= limit), len(BUCKETS_S))
        self.counts[place] += 1
        self.sum_s += seconds


class Tally:
    """`take` each entry of the timeline, in order."""

    def __init__(self) -> None:
        self.interruptions: Counter[tuple[str, str]] = Counter()
        """(kind, outcome)"""
        self.events: Counter[tuple[str, str]] = Counter()
        """(kind, source)"""
        self.downtimes: dict[str, Downtimes] = {}
        """by kind"""

    def take(self, entry: dict[str, Any]) -> None:
        what = str(entry["what"])
        if what.startswith("event_"):
            self.events[what.removeprefix("event_"), str(entry.get("source", "unknown"))] += 1
        elif what == "span" and entry.get("name") == "interruption":
            kind = str(entry["kind"])
            self.interruptions[kind, str(entry["outcome"])] += 1
            if entry.get("downtime_s") is not None:
                self.downtimes.setdefault(kind, Downtimes()).add(float(entry["downtime_s"]))
        elif what == "failed":
            self.events["rank_death", "agent" if "log" in entry else "coordinator"] += 1
        elif what == "node_lost":
            self.events["node_lost", "coordinator"] += 1
