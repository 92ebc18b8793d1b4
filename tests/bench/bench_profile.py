"""Where the time goes, by py-spy: a steady step of char_gpt on backend "tm", and the switch of a move.

    python tests/bench/bench_profile.py [--part step|native|switch] [--moves 10] [--seconds 15]

A job of two ranks and a standby on this machine, without Slurm; no process is stopped for being looked at,
but for the native part.

step     what the training threads of both ranks do, waits for each other included
native   the same down to the functions of native libraries; each sample stops the process
switch   at each of several moves in turn: the leaver from when the switch has been agreed on until all is
         sent; the joiner from the first byte of its state until it begins its first step; the stayer's change
         of links. The transfer itself is seen at both ends. A move whose switch was over between two samples,
         as on a busy machine, is left out

The three largest costs of each by their share: a function is charged with what it does itself, not with what
it calls. Writes build/bench/profile.json after each part; one that is not run keeps its figures from the run
before.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from job_without_slurm import JobWithoutSlurm
from profiles import Recording, Span, Stack, largest, main_thread, raw_stacks, read_spans
from results import Result

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "char_gpt.yaml"
ACTIVE, STANDBYS = 2, 1
STEPS = 100_000
"""More than are ever done: the job is ended when it has been looked at."""

SETTLED = 20
RATE, NATIVE_RATE, SWITCH_RATE = 200, 100, 1000
"""Samples a second."""

MOST, SHOWN = 10, 3
"""Costs that are kept, and that are told."""

AFTER = 2
"""Steps after a move that its recording goes on for."""

Costs = dict[Stack, float]


def sampled(
    job: JobWithoutSlurm, folder: Path, seconds: float, *, rate: int, native: bool = False
) -> Counter[Stack]:
    """What the training threads of both ranks do in so many seconds, in samples."""
    nodes = [str(rank["node"]) for rank in job.calm()["ranks"]]
    about = {"form": "raw", "rate": rate, "native": native}
    recordings = [Recording(job.rank_pid(node), folder / f"{node}-{native}.raw", **about) for node in nodes]
    try:
        for recording in recordings:
            recording.await_begin()
        step = job.last_step()
        job.at_step(step + max(1, round(seconds / median_step_s(job))))
        stacks: Counter[Stack] = Counter()
        for recording in recordings:
            stacks += main_thread(raw_stacks(recording.end().read_text(), ROOT))
    finally:
        for recording in recordings:
            recording.abandon()
    return stacks


def median_step_s(job: JobWithoutSlurm) -> float:
    return statistics.median(float(step["seconds"]) for step in job.files.steps()[SETTLED // 2 :])


def of_step(stacks: Counter[Stack], step_s: float) -> dict[str, Any]:
    costs: Costs = {stack: float(count) for stack, count in stacks.items()}
    return {"samples": sum(stacks.values()), "step_s": step_s, "largest": largest(costs, MOST)}


def leaver_s(spans: list[Span]) -> Costs:
    """From when the switch has been agreed on until all is sent; what it waits for then is the joiner."""
    mine = [span for span in spans if span.has("_leave") and not span.has("await_resolution")]
    sending = [number for number, span in enumerate(mine) if span.has("in_parallel")]
    last = sending[-1] if sending else len(mine)
    return added(mine[: last + 1])


def joiner_s(spans: list[Span]) -> Costs:
    """From the first byte of the state until its first step begins. Nothing when it was not seen."""
    taking = [number for number, span in enumerate(spans) if span.has("_take")]
    if not taking:
        return {}
    rest = spans[taking[0] :]
    end = next((number for number, span in enumerate(rest) if span.has("train_step")), len(rest))
    return added(rest[:end])


def stayer_s(spans: list[Span]) -> Costs:
    """Its change of links, and what that brings with it."""
    return added(
        [span for span in spans if span.has("_at_boundary") and (span.has("switch") or span.has("at_epoch"))]
    )


def added(spans: list[Span]) -> Costs:
    return summed([{span.stack: span.seconds} for span in spans])


SIDES: dict[str, Callable[[list[Span]], Costs]] = {"leaver": leaver_s, "joiner": joiner_s, "stayer": stayer_s}


def one_move(job: JobWithoutSlurm, folder: Path, number: int) -> dict[str, Any]:
    """A move with py-spy at all three: side → its costs, and the downtime by the design's definition."""
    status = job.calm()
    seats = [str(rank["node"]) for rank in status["ranks"]]
    leaver = seats[number % ACTIVE]
    nodes = {
        "leaver": leaver,
        "stayer": seats[(number + 1) % ACTIVE],
        "joiner": next(str(node["node"]) for node in status["nodes"] if node["standing"] == "standby"),
    }
    recordings = {
        side: Recording(
            job.rank_pid(node), folder / f"{number}-{side}.json", form="chrometrace", rate=SWITCH_RATE
        )
        for side, node in nodes.items()
    }
    try:
        for recording in recordings.values():
            recording.await_begin()
        known = len(job.files.notes("downtime"))
        job.move_away(leaver)
        cost = job.until(f"move {number + 1}", lambda: job.files.notes("downtime")[known:])[0]
        job.at_step(int(cost["step"]) + AFTER)
        spans = {side: read_spans(recording.end(), ROOT) for side, recording in recordings.items()}
    finally:
        for recording in recordings.values():
            recording.abandon()
    return {"downtime_s": cost["downtime_s"], "costs": {side: SIDES[side](spans[side]) for side in SIDES}}


def switches(job: JobWithoutSlurm, folder: Path, moves: int) -> dict[str, Any]:
    rows = []
    for number in range(moves):
        rows.append(one_move(job, folder, number))
        seen = {side: sum(costs.values()) for side, costs in rows[-1]["costs"].items()}
        told = "  ".join(f"{side} {seconds * 1e3:.1f} ms" for side, seconds in seen.items())
        print(f"move {number + 1}: downtime {rows[-1]['downtime_s'] * 1e3:.1f} ms  {told}", flush=True)
    seen = [row for row in rows if row["costs"]["leaver"] and row["costs"]["joiner"]]
    if not seen:
        raise SystemExit(
            f"no switch of {moves} was seen: this machine is too busy for {SWITCH_RATE} samples a second"
        )
    sides = {side: of_side([row["costs"][side] for row in seen]) for side in SIDES}
    both = [row["costs"][side] for row in seen for side in ("leaver", "joiner")]
    return {
        "moves": moves,
        "seen": len(seen),
        "downtime_s": [row["downtime_s"] for row in rows],
        "largest": largest(summed(both), MOST),
        "sides": sides,
    }


def of_side(each: list[Costs]) -> dict[str, Any]:
    seconds = [sum(costs.values()) for costs in each]
    return {
        "seconds": seconds,
        "median_s": statistics.median(seconds),
        "largest": largest(summed(each), MOST),
    }


def summed(each: list[Costs]) -> Costs:
    total: Costs = {}
    for costs in each:
        for stack, seconds in costs.items():
            total[stack] = total.get(stack, 0.0) + seconds
    return total


def figures(parts: dict[str, Any]) -> dict[str, Any]:
    """The three largest costs of each part, by their share of it; and how long it takes."""
    found: dict[str, Any] = {name: part["largest"][:SHOWN] for name, part in parts.items()}
    if "step" in parts:
        found["step_s"] = parts["step"]["step_s"]
    if "switch" in parts:
        sides = parts["switch"]["sides"]
        found |= {f"{side}_s": sides[side]["median_s"] for side in ("leaver", "joiner")}
    return found


def show(name: str, costs: list[dict[str, Any]]) -> None:
    for cost in costs:
        caller = f"  by {cost['called_by']}" if cost["called_by"] else ""
        print(f"{name:>14} {cost['share']:6.1%}  {cost['file']}:{cost['function']}{caller}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", action="append", choices=["step", "native", "switch"])
    parser.add_argument("--moves", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=15.0)
    arguments = parser.parse_args()
    chosen = arguments.part or ["step", "native", "switch"]
    versions = {package: version(package) for package in ("torch", "py-spy")}
    versions["python"] = platform.python_version()
    result = Result("profile", lambda parts: (figures(parts), {}), versions=versions)
    settings = {"job__nodes": ACTIVE, "job__standbys": STANDBYS, "train__steps": STEPS}
    settings["train__options"] = {"eval_every": 0}
    with tempfile.TemporaryDirectory(prefix="tm-slurm-bench-") as name:
        folder = Path(name)
        with JobWithoutSlurm(CONFIG, folder / "job", **settings) as job:
            job.at_step(SETTLED)

            def steps(rate: int, native: bool) -> dict[str, Any]:
                stacks = sampled(job, folder, arguments.seconds, rate=rate, native=native)
                return of_step(stacks, median_step_s(job))

            runs: dict[str, Callable[[], dict[str, Any]]] = {
                "step": lambda: steps(RATE, False),
                "native": lambda: steps(NATIVE_RATE, True),
                "switch": lambda: switches(job, folder, arguments.moves),
            }
            for part, run in runs.items():
                if part in chosen:
                    result.measure(part, run)
    for part, about in result.parts.items():
        show(part, about["largest"][:SHOWN])


if __name__ == "__main__":
    main()
