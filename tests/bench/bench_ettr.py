"""What a job gets done although it is moved again and again, and although a node is slow: char_gpt on 2
nodes, 2 standbys.

    python tests/bench/bench_ettr.py [--part moves|calm|short|straggler] [--moves 8] [--repeat 3]

moves       a planned move every 600 s-equivalent. A step here stands for one of a large model, of
            REFERENCE_STEP_S: 600 s are 600 / REFERENCE_STEP_S steps. ETTR = 1 - (downtimes of the moves) /
            (time), the downtime as the design defines it; `ettr_by_steps` = steps x median undisturbed step
            / time, in which the warm-up of the node that comes back as a standby counts, since it shares the
            processors here
calm        1,000 steps with the detection of stragglers on, and no node slow: nobody may be evicted. Steps
            here and below are longer (LARGER), since on this machine half a second is a time in which one
            rank has a processor to itself and the other has not
short       the same with the steps of the config
straggler   one node's rank is stopped for a fifth of the time (SIGSTOP and SIGCONT, forty times a
            second), so that it takes 25 % longer. The loss is how much longer the next 100 steps take than
            the 100 undisturbed ones before, as in the paper (section 8), detection and move included

Writes build/bench/ettr.json; a part that is not run keeps its figures from the run before.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "slurm"))

from results import Result
from training_jobs import TrainingJob

from tm_slurm.localcluster import LocalCluster

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "char_gpt.yaml"
ACTIVE, STANDBYS = 2, 2
REFERENCE_STEP_S = 6.0
EVERY_STEPS = round(600 / REFERENCE_STEP_S)
SETTLED = 30
CALM_STEPS = 1000
WINDOW = 100
PARTS = ("moves", "calm", "short", "straggler")
SLOWER = 0.1
LARGER = {"batch_size": 32}
STOPPED_S, RUNS_S = 0.005, 0.02
"""Short beside a step, so that each of its steps is slower."""
LIMIT_S = 900.0
BARS = {"ettr_600s": ("least", 0.99), "straggler_loss": ("most", 0.05), "false_evictions": ("most", 0.0)}


@contextlib.contextmanager
def a_job(
    cluster: LocalCluster, directory: Path, steps: int, *, options: Mapping[str, Any] = {}, **policy: Any
) -> Iterator[TrainingJob]:
    directory.mkdir(parents=True)
    settings = {"job__directory": str(directory / "%j")}
    settings["train__options"] = json.dumps({"eval_every": 0, **options})
    settings |= {"train__steps": str(steps), "job__nodes": str(ACTIVE), "job__standbys": str(STANDBYS)}
    settings |= {f"policy__{key}": str(value) for key, value in policy.items()}
    job = TrainingJob.submit_config(cluster, CONFIG, **settings)
    job.warm(STANDBYS)
    job.at_step(SETTLED)
    yield job
    cluster.reset()


def commits(job: TrainingJob) -> dict[int, float]:
    """step → when it was committed."""
    return {int(step["step"]): float(step["at"]) for step in job.files.steps()}


def last_step(job: TrainingJob) -> int:
    return max(commits(job), default=0)


def seconds(job: TrainingJob, first: int, last: int) -> list[float]:
    """What the steps from `first` to before `last` took."""
    return [float(step["seconds"]) for step in job.files.steps() if first <= int(step["step"]) < last]


def moves(cluster: LocalCluster, directory: Path, count: int) -> dict[str, Any]:
    """As many moves, one every so many steps."""
    with a_job(cluster, directory, 100 * CALM_STEPS) as job:
        first = last_step(job)
        job.at_step(first + EVERY_STEPS)
        undisturbed = statistics.median(seconds(job, first + 1, first + EVERY_STEPS))
        begin = last_step(job)
        for number in range(count):
            known = len(job.files.notes("downtime"))
            asked = job.tm_slurm("migrate", str(job.files.job_dir), "--node", job.seats()[number % ACTIVE])
            assert asked.returncode == 0, asked.stderr
            after = job.unless_failed(lambda known=known: job.files.notes("downtime")[known:])
            cost = job.until(f"move {number + 1}", after)[0]
            print(f"move {number + 1}: downtime {cost['downtime_s']:.3f} s", flush=True)
            job.at_step(begin + (number + 1) * EVERY_STEPS)
        at = commits(job)
        end = begin + count * EVERY_STEPS
        total_s = at[end] - at[begin]
        down_s = sum(max(0.0, cost["downtime_s"]) for cost in job.files.notes("downtime")[-count:])
        return {
            "moves": count,
            "every_steps": EVERY_STEPS,
            "reference_step_s": REFERENCE_STEP_S,
            "undisturbed_step_s": undisturbed,
            "downtimes_s": [cost["downtime_s"] for cost in job.files.notes("downtime")[-count:]],
            "total_s": total_s,
            "ettr": 1 - down_s / total_s,
            "ettr_by_steps": (end - begin) * undisturbed / total_s,
            "ettr_of_600_s": 1 - down_s / count / 600,
            "load": os.getloadavg()[0],
        }


def policy_of_stragglers() -> dict[str, Any]:
    return {"straggler_slower": SLOWER}


def calm(cluster: LocalCluster, directory: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """Nobody is slow."""
    with a_job(cluster, directory, 100 * CALM_STEPS, options=options, **policy_of_stragglers()) as job:
        first = last_step(job)
        job.until(
            "undisturbed steps", job.unless_failed(lambda: last_step(job) >= first + CALM_STEPS), LIMIT_S
        )
        events = job.files.notes("event_straggler")
        took = seconds(job, first, first + CALM_STEPS)
        return {
            "steps": CALM_STEPS,
            "false_evictions": len(events),
            "events": events,
            "step_s": statistics.median(took),
            "step_s_max": max(took),
            "load": os.getloadavg()[0],
        }


class Slowed(threading.Thread):
    """Stops a process for a fifth of the time, as long as it lives or until `over`."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self.over = threading.Event()

    def run(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            while not self.over.is_set():
                os.kill(self._pid, signal.SIGSTOP)
                self.over.wait(STOPPED_S)
                os.kill(self._pid, signal.SIGCONT)
                self.over.wait(RUNS_S)

    def end(self) -> None:
        self.over.set()
        self.join()


def straggler(cluster: LocalCluster, directory: Path, rank: int) -> dict[str, Any]:
    """A node is slow from some step on."""
    with a_job(cluster, directory, 100 * CALM_STEPS, options=LARGER, **policy_of_stragglers()) as job:
        first = last_step(job)
        job.at_step(first + WINDOW)
        node = job.seats()[rank]
        before = job.files.notes("event_straggler")
        if before:
            raise AssertionError(f"nobody was slow yet: {before}")
        slowed = Slowed(job.rank_pid(node))
        begin = last_step(job)
        slowed.start()
        try:
            event = job.note("event_straggler")
            if event["node"] != node:
                raise AssertionError(f"{node} is slow, and {event['node']} was left: {event['reason']}")
            moved = job.until("the move", job.unless_failed(lambda: job.files.notes("moved")))[0]
        finally:
            slowed.end()
        job.at_step(begin + WINDOW + 1)
        print(f"straggler {node}: left after {int(moved['step']) - begin} steps", flush=True)
        at = commits(job)
        undisturbed = (at[begin] - at[begin - WINDOW]) / WINDOW
        took_s = at[begin + WINDOW] - at[begin]
        slow = seconds(job, begin + 1, int(moved["step"]))
        return {
            "node": node,
            "found": event["node"],
            "reason": event["reason"],
            "undisturbed_step_s": undisturbed,
            "slow_step_s": statistics.fmean(slow),
            "found_after_steps": sum(when <= event["at"] for when in at.values()) - begin,
            "left_after_steps": int(moved["step"]) - begin,
            "loss": took_s / (WINDOW * undisturbed) - 1,
            "loss_without_eviction": statistics.fmean(slow) / undisturbed - 1,
            "load": os.getloadavg()[0],
        }


def figures(parts: dict[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    if "moves" in parts:
        found["ettr_600s"] = parts["moves"]["ettr"]
        found["ettr_600s_by_steps"] = parts["moves"]["ettr_by_steps"]
        found["move_downtime_s"] = statistics.median(parts["moves"]["downtimes_s"])
    if "short" in parts:
        found["false_evictions_short_steps"] = float(parts["short"]["false_evictions"])
    if "calm" in parts:
        found["false_evictions"] = float(parts["calm"]["false_evictions"])
    rows = parts.get("straggler", [])
    if rows:
        found["straggler_loss"] = statistics.median(row["loss"] for row in rows)
        found["straggler_found_after_steps"] = statistics.median(row["found_after_steps"] for row in rows)
        found["straggler_loss_without_eviction"] = statistics.median(
            row["loss_without_eviction"] for row in rows
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--moves", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    chosen = arguments.part or PARTS
    result = Result(
        "ettr",
        lambda parts: (figures(parts), {}),
        how={
            "scaling": f"a step stands for {REFERENCE_STEP_S:g} s, so 600 s are {EVERY_STEPS} steps",
            "slowed": f"stopped {STOPPED_S:g} s, runs {RUNS_S:g} s",
            "policy": policy_of_stragglers(),
            "options_of_calm_and_straggler": LARGER,
        },
        bars={name: bar for name, (_, bar) in BARS.items()},
    )
    with (
        LocalCluster(nodes=ACTIVE + STANDBYS, mode="namespaces", name="bench-ettr") as cluster,
        tempfile.TemporaryDirectory(prefix="tm-slurm-bench-") as jobs,
    ):
        runs: dict[str, Callable[[], Any]] = {
            "moves": lambda: moves(cluster, Path(jobs) / "moves", arguments.moves),
            "calm": lambda: calm(cluster, Path(jobs) / "calm", LARGER),
            "short": lambda: calm(cluster, Path(jobs) / "short", {}),
            "straggler": lambda: [
                straggler(cluster, Path(jobs) / f"straggler-{number}", number % ACTIVE)
                for number in range(arguments.repeat)
            ],
        }
        for part in chosen:
            result.measure(part, runs[part])
    for name, value in result.figures.items():
        way, bar = BARS.get(name, ("", 0.0))
        missed = value < bar if way == "least" else value > bar
        print(
            f"{name:>32} {value:8.4f}" + (f"  at {way} {bar:g}{'  MISSED' if missed else ''}" if way else "")
        )


if __name__ == "__main__":
    main()
