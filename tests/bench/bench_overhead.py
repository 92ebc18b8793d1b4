"""What tm_slurm costs a training that nothing happens to: on 4 nodes with a rank each.

    python tests/bench/bench_overhead.py [--rounds 5] [--part throughput|device|snapshots]

Throughput of a job with everything (agents, coordinator, vote, heartbeats), against the same model, data and
optimizer in plain torch on the same nodes (plain_training.py): DDP on gloo, DDP on backend "tm" without the
runtime, and that with the vote alone and heartbeats alone. A round is a job and a plain run; the plain
variants alternate within theirs. A ratio is, for each round, their mean step over ours (what comes once in
many steps, as heartbeats do, counts); quoted are median, least and largest. Snapshots alone:
snapshot_overhead.py. Beside that the processor time of each agent, and of the one that leads.

throughput  char_gpt. All that happens on the four nodes shares this machine's processors with its steps: each
            node's agent and slurmd, and the controller that answers the leader
device      the same with steps that wait 0.1 s as for a device and compute next to nothing
            (growing_training.py), as where a node has processors left

Writes build/bench/overhead.json; a part that is not run keeps its figures from the run before.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "slurm"))

import snapshot_overhead
from plain_training import DEVICE
from results import Result
from training_jobs import TrainingJob

from tm_slurm.localcluster import LocalCluster

PLAIN = Path(__file__).with_name("plain_training.py")
TRAININGS = {
    "char_gpt": {"module": "tm_slurm.examples.char_gpt", "options": {"eval_every": 0}},
    "device": {"script": str(Path(__file__).with_name("growing_training.py")), "options": DEVICE},
}
ACTIVE = 4
STEPS = 120
FIRST_STEPS = 20
BLOCK_STEPS, BLOCKS = 20, 4
VARIANTS = ("gloo", "tm", "tm_vote", "tm_beats")
LIMIT_S = 300.0
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
BARS = {"throughput_over_ddp_tm": 0.99, "throughput_over_ddp_gloo": 1.0}
"""At least."""


def cpu_s(pid: int) -> float:
    """Processor seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


def whole(cluster: LocalCluster, directory: Path, training: str) -> dict[str, Any]:
    """One undisturbed job: the mean step, and what agents have used a minute meanwhile."""
    directory.mkdir(parents=True)
    config = directory / "config.yaml"
    about = {"name": training, "nodes": ACTIVE, "standbys": 0, "directory": str(directory / "%j")}
    train = {"steps": STEPS, **TRAININGS[training]}
    config.write_text(json.dumps({"job": about, "train": train}))  # JSON is YAML
    job = TrainingJob.submit_config(cluster, config)
    job.at_step(FIRST_STEPS)
    status = job.until("a status", job.files.status)
    pids = {node: job.agent_pid(node) for node in job.active_nodes()}
    before, at = {node: cpu_s(pid) for node, pid in pids.items()}, time.monotonic()
    job.at_step(STEPS - FIRST_STEPS)  # it is told of with a heartbeat: some steps later
    took_s = time.monotonic() - at
    used = {node: (cpu_s(pid) - before[node]) / took_s * 60 for node, pid in pids.items()}
    job.finish(LIMIT_S)
    seconds = [float(step["seconds"]) for step in job.files.steps() if int(step["step"]) >= FIRST_STEPS]
    leader = str(status["leader"])
    followers = [value for node, value in used.items() if node != leader]
    return {
        "step_s": statistics.fmean(seconds),
        "median_step_s": statistics.median(seconds),
        "agent_cpu_s_a_minute": statistics.fmean(followers),
        "leader_cpu_s_a_minute": used.get(leader),
    }


def plain(cluster: LocalCluster, directory: Path, training: str) -> dict[str, list[float]]:
    """Mean steps of each variant, block by block."""
    directory.mkdir(parents=True)
    result = directory / "plain.json"
    words = [sys.executable, str(PLAIN), str(result), training, str(BLOCK_STEPS), str(BLOCKS), *VARIANTS]
    srun = [
        "srun",
        "--kill-on-bad-exit=1",
        f"--nodes={ACTIVE}",
        f"--ntasks={ACTIVE}",
        "--ntasks-per-node=1",
        "--time=10",
    ]
    cluster.run([*srun, *words], env={"OMP_NUM_THREADS": "1"}, timeout_s=LIMIT_S)
    found = json.loads(result.read_text())
    return {name: [statistics.fmean(block) for block in found[name]] for name in VARIANTS}


def throughput(training: str, rounds: int) -> list[dict[str, Any]]:
    rows = []
    with (
        LocalCluster(nodes=ACTIVE, mode="namespaces", name="bench-overhead") as cluster,
        tempfile.TemporaryDirectory(prefix="tm-slurm-bench-") as jobs,
    ):
        for number in range(rounds):
            ours = whole(cluster, Path(jobs) / f"whole-{number}", training)
            theirs = plain(cluster, Path(jobs) / f"plain-{number}", training)
            steps = {name: statistics.fmean(blocks) for name, blocks in theirs.items()}
            pairs = {name: [a / b for a, b in zip(theirs["tm"], theirs[name], strict=True)] for name in steps}
            row = {**ours, "plain_step_s": steps, "tm_over": pairs, "load": os.getloadavg()[0]}
            row["over"] = {name: steps[name] / ours["step_s"] for name in steps}
            rows.append(row)
            shown = "  ".join(f"{name} {value:.3f}" for name, value in row["over"].items())
            print(f"{training} {number}: step {ours['step_s']:.4f} s  throughput over {shown}", flush=True)
    return rows


def snapshots() -> dict[str, Any]:
    with (
        LocalCluster(nodes=ACTIVE, mode="namespaces", name="bench-overhead") as cluster,
        tempfile.TemporaryDirectory(prefix="tm-slurm-bench-") as jobs,
    ):
        return snapshot_overhead.measure(cluster, Path(jobs), pairs=2)


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def of_rows(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The ratios of one training."""
    found = {
        "throughput_over_ddp_tm": spread([row["over"]["tm"] for row in rows]),
        "throughput_over_ddp_gloo": spread([row["over"]["gloo"] for row in rows]),
        "tm_over_gloo_throughput": spread([1 / ratio for row in rows for ratio in row["tm_over"]["gloo"]]),
    }
    for name in ("tm_vote", "tm_beats"):
        alone = [ratio for row in rows for ratio in row["tm_over"][name]]
        found[f"{name.removeprefix('tm_')}_alone_throughput"] = spread(alone)
    return found


def figures(parts: dict[str, Any]) -> tuple[dict[str, float], dict[str, Any]]:
    """The figures, and the spread of those that are ratios."""
    found: dict[str, float] = {}
    spreads: dict[str, Any] = {}
    for part, name in (("device", "device_"), ("throughput", "")):
        if rows := parts.get(part, []):
            ratios = of_rows(rows)
            spreads |= {f"{name}{ratio}": values for ratio, values in ratios.items()}
    found |= {name: values["median"] for name, values in spreads.items()}
    if rows := parts.get("throughput", []):
        found["agent_cpu_s_a_minute"] = statistics.median(row["agent_cpu_s_a_minute"] for row in rows)
        led = [row["leader_cpu_s_a_minute"] for row in rows if row["leader_cpu_s_a_minute"] is not None]
        if led:
            found["coordinator_and_agent_cpu_s_a_minute"] = statistics.median(led)
    if "snapshots" in parts:
        found["snapshots_alone_overhead"] = parts["snapshots"]["overhead"]
    return found, spreads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", action="append", choices=["throughput", "device", "snapshots"])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    chosen = arguments.part or ["throughput", "device", "snapshots"]
    result = Result("overhead", lambda parts: (figures(parts)[0], {"spreads": figures(parts)[1]}), bars=BARS)
    runs = {
        "throughput": lambda: throughput("char_gpt", arguments.rounds),
        "device": lambda: throughput("device", arguments.rounds),
        "snapshots": snapshots,
    }
    for part in chosen:
        result.measure(part, runs[part])
    for name, value in result.figures.items():
        bar = BARS.get(name)
        judged = "" if bar is None else f"  bar {bar:g}{'  UNDER' if value < bar else ''}"
        print(f"{name:>40} {value:8.4f}{judged}")


if __name__ == "__main__":
    main()
