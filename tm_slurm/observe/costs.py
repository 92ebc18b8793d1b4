"""What a run's interruptions have cost, and what restarts would have cost instead: from a job's files alone.

ETTR (effective training time ratio) = useful time / total time. Total is from the first step to the last one;
useful is what is left of it without the downtime of the interruptions and without the waits of a job that
went back into the queue. A downtime that comes out below nothing (a step takes longer than another) counts
as nothing.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tm_slurm.observe.follow import JobFiles, read_json
from tm_slurm.observe.spans import UNPLANNED
from tm_slurm.observe.trace import interruptions

Entry = dict[str, Any]

PUBLISHED_RESTARTS = ((32, 80.0), (128, 190.0), (256, 230.0), (512, 260.0), (1024, 300.0), (8192, 388.0))
"""Ranks → seconds of a restart with Megatron-LM (TrainMover, OSDI '26, §1 and §8)."""

_TELLING = frozenset({"downtime", "prepared", "prepare", "recover"})
BASELINES = Path("build/bench/baselines.json")
PARTS = ("detect", "decide", "switch", "state", "redo", "other")


@dataclass(frozen=True)
class Restart:
    """What one restart of the job would cost, seconds; `source` says where that is known from."""

    planned_s: float
    unplanned_s: float
    measured: bool
    source: str

    def of(self, kind: str) -> float:
        return self.unplanned_s if kind in UNPLANNED else self.planned_s


@dataclass
class Interruption:
    """One interruption as people read it. Times: Unix seconds; `parts`: seconds by phase, which add up to the
    downtime; None while they are not known."""

    number: int
    kind: str
    outcome: str
    begin: float
    end: float
    step: int | None
    pairs: list[Entry]
    reason: str
    prepare_s: float | None
    downtime_s: float | None
    parts: dict[str, float] = field(default_factory=dict)
    spans: list[Entry] = field(default_factory=list)


@dataclass
class Costs:
    """`hours` are of processors: GPUs where the job asked for them, else CPUs."""

    interruptions: list[Interruption]
    total_s: float
    lost_s: float
    queued_s: float
    ettr: float | None
    steady_step_s: float | None
    unit: str
    processors: int
    standby_processors: int
    restart: Restart
    restarts_s: float
    """what restarts would have lost instead"""

    @property
    def saved_s(self) -> float:
        return self.restarts_s - self.lost_s

    def hours(self, seconds: float) -> float:
        """Hours of all processors with ranks."""
        return seconds * self.processors / 3600.0

    @property
    def standby_hours(self) -> float:
        """What it took to hold the standbys."""
        return self.total_s * self.standby_processors / 3600.0

    def as_json(self) -> Entry:
        """All figures: seconds, hours of processors, and each interruption with its parts."""
        restart = asdict(self.restart)
        told = {
            "ettr": self.ettr,
            "total_s": self.total_s,
            "lost_s": self.lost_s,
            "queued_s": self.queued_s,
            "restarts_s": self.restarts_s,
            "saved_hours": self.hours(self.saved_s),
            "standby_hours": self.standby_hours,
            "hours_of": self.unit,
            "restart": restart,
        }
        return {**told, "interruptions": [asdict(one) for one in self.interruptions]}


def restart_of(ranks: int, *, asked_s: float | None, baselines: Path = BASELINES) -> Restart:
    """A restart's cost: as `asked_s` says; as measured by `make bench-baselines` (figures restart_planned_s
    and restart_unplanned_s of its JSON); else the published curve, as an assumption."""
    if asked_s is not None:
        return Restart(asked_s, asked_s, True, f"{asked_s:g} s a restart, as given")
    found = (read_json(baselines) or {}).get("figures", {})
    planned, unplanned = found.get("restart_planned_s"), found.get("restart_unplanned_s")
    if planned is not None and unplanned is not None:
        text = f"restarts measured here: {planned:.1f} s planned, {unplanned:.1f} s after a failure"
        return Restart(float(planned), float(unplanned), True, f"{text} ({baselines})")
    curve = _on_curve(ranks)
    at = max(PUBLISHED_RESTARTS[0][0], ranks)
    source = f"assumption: {curve:.0f} s a restart, the published figure for Megatron-LM at {at} ranks"
    return Restart(curve, curve, False, f"{source} (give --restart-s, or run make bench-baselines)")


def _on_curve(ranks: int) -> float:
    """The published curve, straight between its points over the logarithm of the ranks; flat beyond them."""
    points = PUBLISHED_RESTARTS
    if ranks <= points[0][0]:
        return points[0][1]
    for (low, low_s), (high, high_s) in itertools.pairwise(points):
        if ranks <= high:
            return low_s + (high_s - low_s) * math.log(ranks / low) / math.log(high / low)
    return points[-1][1]


def costs_of(files: JobFiles, restart_s: float | None = None, baselines: Path = BASELINES) -> Costs:
    """Everything about a job, running or not."""
    timeline, steps = files.timeline(), files.steps()
    status = files.status() or {}
    job = _job_of(files.job_dir)
    started = [entry for entry in timeline if entry["what"] == "started"]
    ranks = int(started[0]["world_size"]) if started else len(status.get("ranks", ()))
    unit = "GPU" if int(job.get("gpus_per_rank") or 0) > 0 else "CPU"
    each = int(job.get("gpus_per_rank") or 0) or int(job.get("cpus_per_rank") or 1)
    standbys = int(job.get("standbys") or 0) * int(job.get("ranks_per_node") or 1)
    total = steps[-1]["at"] - steps[0]["at"] if len(steps) > 1 else 0.0
    told = [entry for entry in timeline if entry["what"] in _TELLING or entry["what"].startswith("event_")]
    found = [_told(one, told) for one in interruptions(timeline)]
    queued = _queued_s(started, steps)
    lost = sum(max(0.0, one.downtime_s or 0.0) for one in found)
    restart = restart_of(ranks, asked_s=restart_s, baselines=baselines)
    happened = [one for one in found if one.outcome in ("moved", "recovered")]
    return Costs(
        interruptions=found,
        total_s=total,
        lost_s=lost,
        queued_s=queued,
        ettr=max(0.0, 1.0 - (lost + queued) / total) if total > 0 else None,
        steady_step_s=status.get("steady_step_s"),
        unit=unit,
        processors=ranks * each,
        standby_processors=standbys * each,
        restart=restart,
        restarts_s=sum(restart.of(one.kind) for one in happened),
    )


def _queued_s(started: list[Entry], steps: list[Entry]) -> float:
    """How long a job that went back into the queue did no step."""
    waits = 0.0
    for again in started[1:]:
        before = [step["at"] for step in steps if step["at"] <= again["at"]]
        after = [step["at"] for step in steps if step["at"] > again["at"]]
        if before and after:
            waits += max(0.0, min(after) - max(before))
    return waits


def _told(one: Entry, timeline: list[Entry]) -> Interruption:
    """Beside its spans, what the coordinator's notes say of an interruption."""

    def last(what: str) -> Entry | None:
        mine = [e for e in timeline if e["what"] == what and e.get("epoch") == one["epoch"]]
        within = [e for e in mine if one["begin"] - 1e-3 <= e["at"] <= one["at"] + 1e-3]
        return within[-1] if within else None

    cost, prepared = last("downtime"), last("prepared")
    pairs = one["pairs"] or (last("prepare") or {}).get("pairs", [])
    return Interruption(
        number=one["number"],
        kind=one["kind"],
        outcome=one["outcome"] or "not finished",
        begin=one["begin"],
        end=one["at"],
        step=None if cost is None else int(cost["step"]),
        pairs=pairs,
        reason=one.get("reason") or _reason(one, pairs, timeline),
        prepare_s=None if prepared is None else float(prepared["seconds"]),
        downtime_s=one["downtime_s"],
        parts=_parts(cost),
        spans=one["spans"],
    )


def _reason(one: Entry, pairs: list[Entry], timeline: list[Entry]) -> str:
    """Why: the newest notice about a leaver, or how a rank died."""
    leavers = {pair["leaver"] for pair in pairs}
    text = ""
    for entry in timeline:
        if entry["at"] > one["at"]:
            break
        if one["kind"] in UNPLANNED:
            if entry["what"] == "recover" and entry["at"] >= one["begin"]:
                text = str(entry["how"]).split("; its log:")[0]
        elif entry["what"] == f"event_{one['kind']}" and entry.get("node") in leavers:
            text = str(entry.get("reason", ""))
    return text


def _parts(cost: Entry | None) -> dict[str, float]:
    if cost is None:
        return {}
    told = {name: float(seconds) for name, seconds in cost.get("parts", {}).items()}
    if told:
        parts = {name.removesuffix("_s"): seconds for name, seconds in told.items()}
        parts["detect"] = float(cost["downtime_s"]) - sum(parts.values())
        return {name: parts[name] for name in PARTS}
    after = [float(report.get("told_after_s", 0.0)) for report in cost.get("resumed", {}).values()]
    state = float(cost.get("state_s", 0.0))
    switch = max(0.0, max(after, default=state) - state)
    return {"switch": switch, "state": state, "other": float(cost["downtime_s"]) - switch - state}


def _job_of(job_dir: Path) -> Entry:
    """The `job` part of the job's config; nothing when it cannot be read."""
    import yaml

    try:
        config = yaml.safe_load((job_dir / "config.yaml").read_text())
    except (OSError, yaml.YAMLError):
        return {}
    job = config.get("job") if isinstance(config, dict) else None
    return job if isinstance(job, dict) else {}
