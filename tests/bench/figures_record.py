"""What is kept of a benchmark's run: its figures and bars, how far the trials lie apart, and where, when and
on which commit each part of it was made. One small file each in tests/bench/figures, from which the README's
tables are made (readme_tables.py)."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from baselines import summary

RECORDS = Path(__file__).parent / "figures"
NAMES = ("baselines", "downtime", "slurm", "overhead", "ettr", "scale", "warmup", "cli", "profile")
"""In the order of the tables."""

FAULTS = ("process_death", "power_off", "unplugged", "frozen", "leader_node")
"""Parts of bench_downtime.py that are lists of trials."""

DIGITS = 4
"""A figure is kept with so many significant digits."""

Record = dict[str, Any]
Columns = dict[str, list[float]]
"""figure → the trials that it is the median of"""

Stamp = dict[str, str | None]


def stamp(sources: Path = Path(__file__).parent) -> Stamp:
    """When and of which sources a part is made that begins now: `at` in UTC, ISO 8601; `commit` as git
    describes it ("-dirty": with changes that are in no commit), None where git knows nothing of them."""
    words = ["git", "-C", str(sources), "describe", "--always", "--dirty"]
    found = subprocess.run(words, capture_output=True, text=True, check=False)
    now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"at": now, "commit": found.stdout.strip() or None}


def _of_downtime(result: Mapping[str, Any]) -> Columns:
    parts = result.get("parts", {})
    faults = {kind: parts[kind] for kind in FAULTS if kind in parts}
    columns = {f"{kind}_s": [row["downtime_s"] for row in rows] for kind, rows in faults.items()}
    return columns | {name: measured["ratios"] for name, measured in parts.get("state", {}).items()}


def _of_slurm(result: Mapping[str, Any]) -> Columns:
    drains = result["parts"]["drains"]
    return {
        "drain_known_s": drains["known"],
        "drain_released_s": drains["released"],
        "refill_s": drains["refilled"],
        "spank_event_ms_median": result["parts"]["event_ms"],
    }


def _of_scale(result: Mapping[str, Any]) -> Columns:
    return {f"move_ms_{row['nodes']}": row["move_ms"] for row in result["parts"].get("nodes", ())}


def _of_overhead(result: Mapping[str, Any]) -> Columns:
    rows = result["parts"].get("throughput", ())
    columns = {f"throughput_over_ddp_{name}": [row["over"][name] for row in rows] for name in ("tm", "gloo")}
    return columns | {"agent_cpu_s_a_minute": [row["agent_cpu_s_a_minute"] for row in rows]}


def _of_ettr(result: Mapping[str, Any]) -> Columns:
    parts = result["parts"]
    return {
        "move_downtime_s": parts.get("moves", {}).get("downtimes_s", []),
        "straggler_loss": [row["loss"] for row in parts.get("straggler", ())],
    }


def _of_warmup(result: Mapping[str, Any]) -> Columns:
    throughput = result["parts"].get("throughput")
    if throughput is None:
        return {}
    # the run keeps no more of its pairs
    return {"recording_off_throughput_ratio": [throughput[key] for key in ("min", "median", "max")]}


def _of_cli(result: Mapping[str, Any]) -> Columns:
    return {f"{name}_cpu_s": [cpu_s for _, cpu_s in calls] for name, calls in result["parts"].items()}


COLUMNS: dict[str, Callable[[Mapping[str, Any]], Columns]] = {
    "downtime": _of_downtime,
    "slurm": _of_slurm,
    "scale": _of_scale,
    "overhead": _of_overhead,
    "ettr": _of_ettr,
    "warmup": _of_warmup,
    "cli": _of_cli,
}


def record_of(result: Mapping[str, Any], *, at: str, commit: str | None) -> Record:
    """What is kept of a run whose JSON `result` is. `at`: when it was written, ISO 8601; `commit`: of which
    sources, None where that is not known."""
    name = result["name"]
    columns = COLUMNS[name](result) if name in COLUMNS else {}
    kept: Record = {
        "name": name,
        "at": at,
        "commit": commit,
        "machine": {key: result["machine"][key] for key in ("cpus", "kernel", "processor")},
        "versions": result["versions"],
        "made": _made(result),
        "bars": result.get("bars", {}),
        "figures": result["figures"],
        "spreads": {
            key: {"n": len(times), "min": min(times), "max": max(times)}
            for key, times in columns.items()
            if times
        },
    }
    if name == "warmup":
        for spread in kept["spreads"].values():
            spread["n"] = result["parts"]["throughput"]["pairs"]
    if name == "baselines":
        kept["bars"] = summary.BARS
        kept["trials"] = {rival: _trials(result["rivals"], rival) for rival in result["rivals"]}
    rounded: Record = _rounded(kept)
    return rounded


def _made(result: Mapping[str, Any]) -> dict[str, Stamp]:
    """Part → its stamp; one that says nothing for a part that has none, where others have."""
    if result["name"] == "baselines":
        rows = summary.rows_of_all(result["rivals"])
        stamps = [{"at": row["at"], "commit": row.get("commit")} for row in rows]
        stamps.sort(key=lambda stamp: stamp["at"], reverse=True)
        return {str(stamp["commit"]): stamp for stamp in stamps}  # the oldest of each commit
    made = dict(result.get("made", {}))
    without = result.get("parts", {}).keys() - made.keys() if made else ()
    return made | {part: {"at": None, "commit": None} for part in sorted(without)}


def _trials(parts: summary.Parts, rival: str) -> dict[str, Any]:
    """Of one rival: fault → why it cannot, or how many trials there are, what they have cost, seconds, and
    how many times ours that is. Without a median they are endless."""
    found: dict[str, Any] = {}
    for fault, about in parts[rival]["faults"].items():
        if "cannot" in about:
            found[fault] = {"cannot": about["cannot"]}
            continue
        times = summary.times(parts, rival, fault)
        found[fault] = {"n": len(about["rows"]), "failed": len(about["rows"]) - len(times)}
        median = summary.median(parts, rival, fault)
        if median is not None and math.isfinite(median):
            found[fault] |= {"median": median, "min": min(times), "max": max(times)}
        ratio = None if rival == summary.OURS else summary.over_ours(parts, rival, fault)
        if ratio is not None:
            mixed = len(summary.commits(parts, (rival, summary.OURS), fault)) > 1
            found[fault]["over_ours"] = {**ratio, "mixed_commits": mixed}
    return found


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return value


def commit_before(directory: Path, seconds: float) -> str | None:
    """The newest commit, in the checkout that `directory` is in, that is not younger than a file written at
    `seconds` since 1970; None outside of one."""
    words = ["git", "-C", str(directory), "log", "-1", f"--before=@{int(seconds)}", "--format=%h"]
    found = subprocess.run(words, capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


def take(results: Path, records: Path = RECORDS) -> list[str]:
    """Keep of each run in the folder `results` (build/bench) that is newer than what is kept; their names."""
    taken = []
    for name in NAMES:
        path, kept = results / f"{name}.json", records / f"{name}.json"
        if not path.exists():
            continue
        seconds = path.stat().st_mtime
        at = datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        if kept.exists() and json.loads(kept.read_text())["at"] >= at:
            continue
        result = json.loads(path.read_text())
        record = record_of(result, at=at, commit=commit_before(results, seconds))
        kept.write_text(json.dumps(record, indent=1) + "\n")
        taken.append(name)
    return taken


def kept_records(records: Path = RECORDS) -> list[Record]:
    """Of the benchmarks of which there is one, in the order of the tables."""
    paths = [records / f"{name}.json" for name in NAMES]
    return [json.loads(path.read_text()) for path in paths if path.exists()]
