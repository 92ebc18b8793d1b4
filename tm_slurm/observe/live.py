"""A job as it runs, kept up to date from its growing files: what `tm-slurm watch` shows."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tm_slurm.observe.follow import JobFiles, JsonLines

Entry = dict[str, Any]

PHASES = ("prepare", "freeze", "state", "switch", "resume")
LOSSES_KEPT = 4000
EVENTS_KEPT = 100
RATE_STEPS = 20
"""Steps whose pace is the rate."""

_AT_WORK = {
    "prepare": ("prepare",),
    "prepared": ("freeze",),
    "switching": ("state", "switch"),
    "moved": ("resume",),
    "recover": ("freeze",),
    "resolve": ("state", "switch"),
    "recovered": ("resume",),
}
"""What a note says is going on now. State moves and links are switched at the same time."""


@dataclass
class Moving:
    """The move or recovery in work, or the last one: `at_work` phases of PHASES, none when it is over."""

    what: str
    since: float
    at_work: tuple[str, ...] = ()
    over: str = ""
    ended_at: float = 0.0

    def done(self, phase: str) -> bool:
        """Whether a phase is behind it."""
        if self.over:
            return not self.over.startswith("given up")
        return PHASES.index(phase) < min(map(PHASES.index, self.at_work), default=0)


class LiveJob:
    """`refresh` reads what has come; the rest is what it was then."""

    def __init__(self, job_dir: Path) -> None:
        self.files = JobFiles(job_dir)
        self._timeline = JsonLines(job_dir / "timeline.jsonl")
        self._steps = JsonLines(job_dir / "steps.jsonl")
        self.status: Entry | None = None
        self.verdict: Entry | None = None
        self.losses: deque[float] = deque(maxlen=LOSSES_KEPT)
        self.first_loss: float | None = None
        self.events: deque[Entry] = deque(maxlen=EVENTS_KEPT)
        self.moving: Moving | None = None
        self.last_step: Entry | None = None
        self._recent: deque[Entry] = deque(maxlen=RATE_STEPS)
        self._first_at: float | None = None
        self._lost_s = 0.0
        self._starts = 0
        self._waiting_since: float | None = None
        self.total_steps, self.tokens_per_step = _told_by_config(job_dir)

    def refresh(self) -> list[Entry]:
        """Read on; returns the new entries, timeline and steps (`what` is "step") in order of time."""
        steps = [{"what": "step", **step} for step in self._steps.new()]
        entries = sorted([*self._timeline.new(), *steps], key=lambda entry: float(entry["at"]))
        for entry in entries:
            if entry["what"] == "step":
                self._take_step(entry)
            else:
                self._take_note(entry)
        self.status = self.files.status() or self.status
        verdict = self.files.verdict()
        self.verdict = verdict if verdict is None or verdict["state"] != "requeue" else None
        return entries

    def _take_step(self, step: Entry) -> None:
        at = float(step["at"])
        if self._first_at is None:
            self._first_at = at
        if self._waiting_since is not None:
            self._lost_s += max(0.0, at - self._waiting_since)
            self._waiting_since = None
        self.last_step = step
        self._recent.append(step)
        if step.get("loss") is not None:
            self.losses.append(float(step["loss"]))
            if self.first_loss is None:
                self.first_loss = self.losses[0]

    def _take_note(self, entry: Entry) -> None:
        what, at = str(entry["what"]), float(entry["at"])
        if what != "span":
            self.events.append(entry)
        if what == "started":
            self._starts += 1
            if self._starts > 1 and self.last_step is not None:
                self._waiting_since = float(self.last_step["at"])
            self._recent.clear()
        elif what in ("prepare", "recover"):
            if what == "prepare" or self.moving is None or self.moving.over:
                self.moving = Moving(_parties(entry), at)
        elif what == "recovered" and self.moving is not None:
            self.moving.what = _parties(entry)
        if self.moving is None:
            return
        if what in _AT_WORK:
            self.moving.at_work = _AT_WORK[what]
        elif what == "cancelled":
            self._over(f"given up: {entry['reason']}", at)
        elif what == "downtime":
            self._lost_s += max(0.0, float(entry["downtime_s"]))
            self._over(f"downtime {entry['downtime_s']:.3f} s", at)

    def _over(self, how: str, at: float) -> None:
        if self.moving is not None:
            self.moving.over, self.moving.at_work, self.moving.ended_at = how, (), at

    @property
    def ettr(self) -> float | None:
        """Useful time of all time so far; None before two steps."""
        if self._first_at is None or self.last_step is None:
            return None
        total = float(self.last_step["at"]) - self._first_at
        return max(0.0, 1.0 - self._lost_s / total) if total > 0 else None

    @property
    def steps_per_s(self) -> float | None:
        """The pace of the last steps."""
        if len(self._recent) < 2:
            return None
        seconds = float(self._recent[-1]["at"]) - float(self._recent[0]["at"])
        return (self._recent[-1]["step"] - self._recent[0]["step"]) / seconds if seconds > 0 else None

    @property
    def tokens_per_s(self) -> float | None:
        """None unless the config says how many tokens a step has."""
        rate = self.steps_per_s
        return None if rate is None or self.tokens_per_step is None else rate * self.tokens_per_step


def _parties(entry: Entry) -> str:
    if entry.get("pairs"):
        return ", ".join(f"{p['leaver']} → {p['joiner']}" for p in entry["pairs"])
    lost = entry.get("lost") or []
    return f"ranks {' '.join(map(str, lost))} lost" if lost else "a step is done again"


def _told_by_config(job_dir: Path) -> tuple[int | None, int | None]:
    """How many steps there will be, and how many tokens each has: `train.options.tokens_per_step`; else, as
    in char_gpt, batch_size * model.context for each replica or shard."""
    import yaml

    try:
        config = yaml.safe_load((job_dir / "config.yaml").read_text())
        job, train = config["job"], config["train"]
        steps = int(train["steps"]) if train.get("steps") is not None else None
        options = train.get("options") or {}
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError):
        return None, None
    try:
        if "tokens_per_step" in options:
            return steps, int(options["tokens_per_step"])
        parallel = options.get("parallel") or {}
        ranks = int(job["nodes"]) * int(job["ranks_per_node"])
        replicas = ranks // (int(parallel.get("tp", 1)) * int(parallel.get("pp", 1)))
        return steps, int(options["batch_size"]) * int(options["model"]["context"]) * replicas
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return steps, None
