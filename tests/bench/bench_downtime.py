"""What unplanned failures cost, from the instant of the fault (4 ranks on 4 nodes, 2 standbys, char_gpt), and
how the cost of interruptions grows with ranks, leavers, state, bandwidth and groups.

    python tests/bench/bench_downtime.py [--repeat 6]
        [--part process_death|power_off|unplugged|frozen|leader_node|state|snapshots]
        [--part ranks|leavers|sizes|bandwidth|groups]

Downtime = (commit time of the first new step at the slowest rank) - (instant of the fault) - (median steady
step). Its parts add up to it: detect_s (until the job has heard of it), decide_s (until the survivors have
stopped and agreed), switch_s (until the successor has built its role, links and private state), state_s
(its transfer), redo_s (steps that had been committed and were done again), other_s (the rest of the first
new step, less a steady one; less than nothing when the survivors have done their share of it by then).
Beside them: a state's transfer against raw sockets, and what snapshots cost an undisturbed run. What the
parts of the second line are, and how they take CPU over-subscription out, is said in planned_growth.py.

Writes build/bench/downtime.json after each part; one that is not run keeps its figures from the run before.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "slurm"))

import growth_figures
import planned_growth
import snapshot_overhead
import state_transfer
from injected_faults import FAULTS
from results import Parts, Result
from training_jobs import TrainingJob

from tm_slurm.config import load
from tm_slurm.localcluster import LocalCluster

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "char_gpt.yaml"
ACTIVE, STANDBYS = 4, 2
STEPS = 100_000
"""More than are ever done: the job is cancelled when its faults are through."""
BETWEEN = 10
"""Steps between two faults."""
PARTS = ("detect_s", "decide_s", "switch_s", "state_s", "redo_s", "other_s")
SILENT_MARGIN_S = 0.6
STATES = {"state_256mb_ratio_floor": 256 << 20, "state_1gb_ratio_floor": 1 << 30}
STATE_BAR = 1.5
SNAPSHOT_BAR = 0.01


def bars(detection_limit_s: float) -> dict[str, float]:
    """Seconds that the median of each kind must not exceed."""
    silent = detection_limit_s + SILENT_MARGIN_S
    return {
        "process_death": 0.45,
        "power_off": 1.0,
        "unplugged": silent,
        "frozen": silent,
        "leader_node": 4.0,
    }


def all_bars() -> dict[str, float]:
    """What no figure may exceed."""
    return {
        **{f"{kind}_s": limit for kind, limit in bars(detection_limit_s()).items()},
        **dict.fromkeys(STATES, STATE_BAR),
        "snapshot_overhead": SNAPSHOT_BAR,
        **growth_figures.BARS,
    }


class Experiment:
    """One job, into which faults are injected one after another."""

    def __init__(self, cluster: LocalCluster, directory: Path) -> None:
        directory.mkdir(parents=True)
        self.job = TrainingJob.submit_config(
            cluster,
            CONFIG,
            train__steps=STEPS,
            job__nodes=ACTIVE,
            job__standbys=STANDBYS,
            job__directory=str(directory / "%j"),
        )
        self.job.warm(STANDBYS)
        self.job.at_step(2 * BETWEEN)

    def inject(self, kind: str, rank: int, standbys: int) -> dict[str, Any]:
        """One fault on the node of `rank` once `standbys` are warm; what it cost."""
        job = self.job
        calm = job.unless_failed(lambda: self._is_calm(standbys))
        job.until(f"{standbys} warm standbys and a running pace", calm)
        node = job.seats()[rank]
        known = len(job.files.notes("downtime"))
        warm_for = {str(entry["node"]): int(entry["rank"]) for entry in job.files.notes("warm")}
        at = FAULTS[kind](job, node)
        new = job.unless_failed(lambda: job.files.notes("downtime")[known:])
        cost = job.until(f"the downtime of {kind} on {node}", new)[0]
        detected_at = float(cost["started_at"])
        parts = {"detect_s": detected_at - at, **cost["parts"]}
        downtime = growth_figures.since_the_fault(at, cost)
        parts["other_s"] += downtime - sum(parts.values())
        joiners = {rank: pair["joiner"] for pair in cost["pairs"] for rank in pair["ranks"]}
        return {
            "kind": kind,
            "rank": rank,
            "node": node,
            "joiner": joiners.get(rank),
            "joiner_was_warm_for": warm_for.get(joiners.get(rank, "")),
            "source": cost.get("source"),
            "downtime_s": downtime,
            "steady_step_s": cost["steady_step_s"],
            "parts": parts,
            "resumed": cost["resumed"],
        }

    def _is_calm(self, standbys: int) -> bool:
        status = self.job.files.status()
        if status is None or None in (rank["step"] for rank in status["ranks"]):
            return False
        ready = sum(node["standing"] == "standby" and node["warm"] for node in status["nodes"])
        over = self.job.files.notes("recovered")
        last = over[-1]["step"] if over else 0
        return ready >= standbys and min(rank["step"] for rank in status["ranks"]) >= last + BETWEEN

    def leader(self) -> str:
        status = self.job.until("a status", self.job.files.status)
        return str(status["leader"])

    def end(self) -> None:
        """Cancel the job and put the cluster back in order."""
        self.job.cluster.reset()


def process_deaths(cluster: LocalCluster, directory: Path, repeat: int) -> list[dict[str, Any]]:
    """One job: a node whose rank has died comes back as a standby."""
    experiment = Experiment(cluster, directory)
    rows = [shown(experiment.inject("process_death", n % ACTIVE, STANDBYS)) for n in range(repeat)]
    experiment.end()
    return rows


def node_losses(cluster: LocalCluster, directory: Path, kind: str, repeat: int) -> list[dict[str, Any]]:
    """As many faults a job as it has standbys: nodes that are lost do not come back into it."""
    rows: list[dict[str, Any]] = []
    while len(rows) < repeat:
        experiment = Experiment(cluster, directory / str(len(rows)))
        for left in range(min(STANDBYS, repeat - len(rows)), 0, -1):
            rows.append(shown(experiment.inject(kind, len(rows) % ACTIVE, left)))
        experiment.end()
    return rows


def leader_losses(cluster: LocalCluster, directory: Path, repeat: int) -> list[dict[str, Any]]:
    """The leader sits on a standby at first: ranks die until its node has one. Then it is powered off."""
    rows = []
    for number in range(repeat):
        experiment = Experiment(cluster, directory / str(number))
        for victim in range(2 * ACTIVE):
            if experiment.leader() in experiment.job.seats():
                break
            experiment.inject("process_death", (number + victim) % ACTIVE, STANDBYS)
        rank = experiment.job.seats().index(experiment.leader())
        rows.append(shown(experiment.inject("leader_node", rank, STANDBYS)))
        experiment.end()
    return rows


def shown(row: dict[str, Any]) -> dict[str, Any]:
    parts = "  ".join(f"{name[:-2]} {row['parts'][name]:6.3f}" for name in PARTS)
    warm = f"{row['joiner']} (warm for {row['joiner_was_warm_for']})"
    where = f"rank {row['rank']} on {row['node']} -> {warm}"
    print(f"{row['kind']:>13} {where:40} downtime {row['downtime_s']:6.3f} s = {parts}", flush=True)
    return row


def figures(parts: Parts) -> dict[str, Any]:
    """Of the parts that are there."""
    found: dict[str, Any] = {"detection_limit_s": detection_limit_s()}
    for kind in FAULTS:
        if kind in parts:
            found[f"{kind}_s"] = statistics.median(row["downtime_s"] for row in parts[kind])
    for name, measured in parts.get("state", {}).items():
        found[name] = statistics.median(measured["ratios"])
    if "snapshots" in parts:
        found["snapshot_overhead"] = parts["snapshots"]["overhead"]
    return found | growth_figures.figures(parts)


def detection_limit_s() -> float:
    return load(CONFIG).policy.keepalive_s


def table(faults: dict[str, list[dict[str, Any]]], limits: dict[str, float]) -> None:
    heads = ("downtime (s)", "n", "median", "min", "max", "bar")
    print("\n{:>13} {:>3} {:>7} {:>7} {:>7} {:>6}  medians of the parts".format(*heads))
    for kind, rows in faults.items():
        times = [row["downtime_s"] for row in rows]
        low, median, high = min(times), statistics.median(times), max(times)
        medians = [
            f"{name[:-2]} {statistics.median(row['parts'][name] for row in rows):.3f}" for name in PARTS
        ]
        print(f"{kind:>13} {len(rows):3} {median:7.3f} {low:7.3f} {high:7.3f} {limits[kind]:6.2f}", end="  ")
        print(*medians, "OVER" if median > limits[kind] else "", sep="  ")


@contextlib.contextmanager
def injecting(repeat: int) -> Iterator[Callable[[str], list[dict[str, Any]]]]:
    """What measures faults of one kind, on one cluster for all of them: their rows."""

    def measure(kind: str) -> list[dict[str, Any]]:
        directory = Path(jobs) / kind
        if kind == "process_death":
            return process_deaths(cluster, directory, 2 * repeat)
        if kind == "leader_node":
            return leader_losses(cluster, directory, repeat)
        return node_losses(cluster, directory, kind, repeat)

    with (
        LocalCluster(nodes=ACTIVE + STANDBYS, mode="namespaces", name="bench-downtime") as cluster,
        tempfile.TemporaryDirectory(prefix="tm-slurm-bench-") as jobs,
    ):
        yield measure


def states() -> dict[str, dict[str, Any]]:
    """A state of each size against the floor of the same run, from one source and from two."""
    found = {}
    for name, size in STATES.items():
        found[name] = state_transfer.measure(size)
        print(f"{name}: {state_transfer.shown(found[name])}, bar {STATE_BAR}", flush=True)
    return found


def snapshots() -> dict[str, Any]:
    with (
        LocalCluster(nodes=ACTIVE, mode="namespaces", name="bench-snapshots") as cluster,
        tempfile.TemporaryDirectory(prefix="tm-slurm-bench-") as jobs,
    ):
        measured = snapshot_overhead.measure(cluster, Path(jobs))
    print(f"snapshot_overhead: {measured['overhead']:.4f}, bar {SNAPSHOT_BAR}")
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = [*FAULTS, "state", "snapshots", *planned_growth.PARTS]
    parser.add_argument("--part", action="append", choices=parts)
    parser.add_argument("--repeat", type=int, default=6)
    arguments = parser.parse_args()
    chosen = arguments.part or parts
    how = {"over_subscription": planned_growth.OVER_SUBSCRIPTION}
    result = Result("downtime", lambda parts: (figures(parts), {}), bars=all_bars(), how=how)
    if kinds := [part for part in chosen if part in FAULTS]:
        with injecting(arguments.repeat) as inject:
            for kind in kinds:
                result.measure(kind, partial(inject, kind))
    if "state" in chosen:
        result.measure("state", states)
    if "snapshots" in chosen:
        result.measure("snapshots", snapshots)
    if sizes := [part for part in chosen if part in planned_growth.PARTS]:
        with planned_growth.growing(sizes, arguments.repeat) as grow:
            for part in sizes:
                result.measure(part, partial(grow, part))
        planned_growth.table({part: result.parts[part] for part in sizes})
    faults = {kind: result.parts[kind] for kind in FAULTS if kind in result.parts}
    table(faults, bars(detection_limit_s()))
    for name, bar in all_bars().items():
        value = result.figures.get(name)
        told = "not measured" if value is None else f"{value:8.4f}{'  OVER' if value > bar else ''}"
        print(f"{name:>42} bar {bar:6.3f}  {told}")


if __name__ == "__main__":
    main()
