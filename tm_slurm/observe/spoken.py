"""An entry of the timeline as one line for people: no markup, nothing that could steer a terminal."""

from __future__ import annotations

import time
from typing import Any

Entry = dict[str, Any]

WORDS = {
    "leads": "coordinator runs on {node} (term {term})",
    "cut_off": "coordinator on {node} hears hardly anybody and steps down",
    "resigned": "coordination goes to {to}",
    "started": "training starts: {world_size} ranks on {nodes}",
    "warm": "standby {node} is warm for rank {rank}",
    "prepare": "preparing {pairs}, training goes on",
    "prepared": "prepared in {seconds:.2f} s",
    "switching": "switching at step {step}",
    "moved": "moved {pairs}",
    "cancelled": "the move was given up: {reason}",
    "too_late": "too late to give the move up: {reason}",
    "waiting": "{node} should be left: {why}",
    "failed": "{node} failed, ranks {ranks}: {how}",
    "recover": "all stop, lost ranks: {lost}",
    "resolve": "going on at step {step} from {source}",
    "recovered": "recovered at step {step}: {pairs}",
    "downtime": "downtime {downtime} (a step takes {steady_step_s:.3f} s)",
    "released": "{node} given back to Slurm",
    "drained": "{node} is {state}, {after_notice_s:.1f} s after the notice",
    "release_refused": "Slurm does not take {node} back: {why}",
    "kept": "{node} stays in the job: {why}",
    "standby_leaves": "standby {node} is given back",
    "standby_died": "standby {node} died: {how}",
    "node_lost": "{node} is lost: {reason}",
    "hangs": "no step for {seconds:.0f} s at step {step}: asking the ranks where they are",
    "stuck": "ranks {ranks} are stuck in step {step}: {how}",
    "slow_everywhere": "rank {rank} is slower than its replicas on {nodes}: it has more to do",
    "late": "too late: {how}",
    "double_up": "{node} hosts ranks {ranks} as well",
    "restart": "ranks {ranks} start again on {node}",
    "shrunk": "going on without ranks {ranks}",
    "grown": "ranks {ranks} are back on {nodes}",
    "checkpoint": "checkpoint of step {step} written",
    "checkpoint_failed": "no checkpoint: {why}",
    "checkpoint_found": "checkpoint of step {step} found",
    "window": "reservation over {nodes} in {opens_in_s:.0f} s",
    "window_gone": "{node}: reservation {window} is gone",
    "stop_cancelled": "the job stays: {window} is no reason to stop any more",
    "substituted": "{by} starts in place of {node}, which has not come",
    "promoted": "standby {node} is rank {rank}",
    "join_failed": "rank {rank} could not join on {node}: {why}",
    "unwell": "{node}: {how}",
    "gives_up": "rank {rank} on {node} gives up: {why}",
    "cannot_shrink": "cannot go on without ranks {ranks}: {why}",
    "recorded": "first steps of role class {role_class} recorded ({bytes} bytes)",
    "recording_failed": "no recording of role class {role_class}, standbys warm up without: {why}",
    "asked": "Slurm is asked for another node",
    "standby_job": "standby job {job} is in the queue",
    "refilled": "{node} has come as a standby, {seconds:.1f} s after it was asked for",
    "standby_job_over": "standby job {job} is over",
    "ask_refused": "Slurm refuses another node: {why}",
    "ask_withdrawn": "standby job {job} is not needed any more: {why}",
    "snapshot_given_up": "the snapshot of step {step} cannot be used",
    "checkpoint_given_up": "the checkpoint of step {step} cannot be used: {path}",
    "trained": "training is done at step {step}",
    "ended": "job {state}: {reason}",
}

QUIET = frozenset({"span", "broken", "interrupted", "left_behind", "moved_in_recovery"})
"""Entries for programs, or that others explain."""


def spoken(entry: Entry) -> str | None:
    """What an entry says; None for those that people need not see."""
    what = str(entry["what"])
    if what in QUIET:
        return None
    if what.startswith("event_"):
        kind, place = what.removeprefix("event_").replace("_", " "), entry.get("node", "the job")
        why = f": {entry['reason']}" if entry.get("reason") else ""
        return plain(f"{place}: {kind}{why} (from {entry.get('source', 'unknown')})")
    words = WORDS.get(what)
    try:
        return plain(words.format(**{**entry, **in_words(entry)})) if words is not None else plain(what)
    except (KeyError, TypeError, ValueError):  # told by another version
        return plain(what)


def line_of(entry: Entry) -> str | None:
    """The same with the time of day, here."""
    text = spoken(entry)
    return None if text is None else f"{time.strftime('%H:%M:%S', time.localtime(entry['at']))}  {text}"


def of_downtime(seconds: float) -> str:
    """None also where the next step came sooner than a steady one would have."""
    return f"{seconds:.3f} s" if seconds > 0 else "none"


def plain(text: str) -> str:
    """Control characters (a drain's reason may hold any) are shown as ?."""
    return "".join(c if c.isprintable() else " " if c in "\n\t" else "?" for c in text)


def in_words(entry: Entry) -> Entry:
    """What of an entry's fields is not said as it stands."""
    words: Entry = {}
    if "downtime_s" in entry:
        words["downtime"] = of_downtime(entry["downtime_s"])
    if "pairs" in entry:
        words["pairs"] = ", ".join(f"{p['leaver']} → {p['joiner']}" for p in entry["pairs"]) or "nobody"
    for key in ("nodes", "ranks", "lost"):
        if isinstance(entry.get(key), list):
            words[key] = " ".join(map(str, entry[key])) or "none"
    return words
