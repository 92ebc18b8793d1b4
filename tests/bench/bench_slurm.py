"""What the administrators' part costs and brings, on a local cluster with the plugin loaded.

Drains: an ordinary user's job is drained node by node; how soon its coordinator knows, Slurm has the node
back, and another one is warm in its place. Events: 50 tasks are killed, one after the other; how long after
each death the coordinator has journalled it. Frozen coordinator: by how much longer a step takes whose
coordinator is stopped. Flood: 1,000 events a second for 10 s, each fact twice; how many distinct facts are
lost.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "slurm"))

from event_flood import flood
from event_receiver import Receiver, allocation, make_job_dir, receiver
from figures_record import stamp
from ordinary_user import let_in
from slurm_drains import measure
from suite_record import releases

from tm_slurm.cli.install import build_and_install
from tm_slurm.localcluster import LocalCluster
from tm_slurm.localcluster.requirements import slurm_release

RESULT = Path("build/bench/slurm.json")
NODES, DRAINS = 8, 6
TASKS = 50
PAIRS = 25
FLOOD_PER_S, FLOOD_S = 1000, 10.0
AWAIT_S = 20.0
BARS = {
    "drain_known_s": 1.2,
    "drain_released_s": 6.0,
    "spank_event_ms_median": 50.0,
    "frozen_coordinator_delay_ms": 250.0,
    "flood_facts_lost": 0.0,
}
"""At most."""


def event_times_ms(cluster: LocalCluster, job_id: int, coordinator: Receiver) -> list[float]:
    """From a task's death to its entry in the coordinator's journal, milliseconds."""
    died = coordinator.job_dir.parent / "died"
    script = f"echo $EPOCHREALTIME >>{died}; kill -9 $$"
    loop = f"for i in $(seq {TASKS}); do srun --jobid={job_id} bash -c '{script}'; done"
    told = {"TM_SLURM_EVENTS_TO": str(coordinator.job_dir)}
    cluster.run(["sh", "-c", loop], env=told, check=False)
    deadline = time.monotonic() + AWAIT_S
    while len(coordinator.events("task_exit")) < TASKS and time.monotonic() < deadline:
        time.sleep(0.05)
    known = sorted(event["at"] for event in coordinator.events("task_exit"))
    if len(known) != TASKS:
        raise SystemExit(f"{len(known)} of {TASKS} deaths were heard of within {AWAIT_S:g} s")
    times = sorted(float(word) for word in died.read_text().split())
    return [(seen - then) * 1e3 for seen, then in zip(known, times, strict=True)]


def step_ms(cluster: LocalCluster, job_id: int, to: Path | None) -> float:
    env = {} if to is None else {"TM_SLURM_EVENTS_TO": str(to)}
    began = time.perf_counter()
    cluster.run(["srun", f"--jobid={job_id}", "true"], env=env)
    return (time.perf_counter() - began) * 1e3


def frozen_delay_ms(cluster: LocalCluster, job_id: int, coordinator: Receiver) -> float:
    """Median of what a step takes longer, alternating pairs."""
    coordinator.freeze()
    try:
        return statistics.median(
            step_ms(cluster, job_id, coordinator.job_dir) - step_ms(cluster, job_id, None)
            for _ in range(PAIRS)
        )
    finally:
        coordinator.thaw()


def slurm_releases() -> tuple[list[str], list[dict[str, Any]]]:
    """The releases on which every test of tests/slurm has passed with these sources, by what its runs have
    written down; and what is missing elsewhere."""
    found = releases()
    about = [
        {**asdict(each), "missing": len(each.missing), "first_missing": each.missing[:3]} for each in found
    ]
    return [each.release for each in found if each.whole], about


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.parse_args()
    begun = stamp()
    with tempfile.TemporaryDirectory(prefix="bench-slurm-") as folder:
        os.chmod(folder, 0o755)
        prefix = Path(folder) / "installed"
        prefix.mkdir()
        build_and_install(prefix, state=prefix / "state")
        name = f"bench-{os.getpid()}"
        with LocalCluster(nodes=NODES, mode="namespaces", name=name, administration=prefix) as cluster:
            let_in(cluster)
            drains = measure(cluster, DRAINS)
            with (
                allocation(cluster, "--nodelist=n1") as job_id,
                receiver(cluster, make_job_dir(Path(folder) / "job"), job_id) as coordinator,
            ):
                times_ms = event_times_ms(cluster, job_id, coordinator)
                delay_ms = frozen_delay_ms(cluster, job_id, coordinator)
                flooded = flood(cluster, coordinator, job_id, per_s=FLOOD_PER_S, seconds=FLOOD_S)
    passed, about = slurm_releases()
    parts = {"event_ms": times_ms, "drains": asdict(drains), "suite": about}
    figures: dict[str, Any] = {
        "drain_known_s": statistics.median(drains.known),
        "drain_released_s": statistics.median(drains.released),
        "spank_event_ms_median": statistics.median(times_ms),
        "spank_event_ms_max": max(times_ms),
        "frozen_coordinator_delay_ms": delay_ms,
        "refill_s": statistics.median(drains.refilled),
        "slurm_releases": passed,
        "drain_known_s_max": max(drains.known),
        "drain_released_s_max": max(drains.released),
        "refill_s_max": max(drains.refilled),
        "flood_events_a_s": flooded.sent / flooded.seconds,
        "flood_facts_lost": flooded.facts - flooded.taken,
    }
    result = {
        "name": "slurm",
        "machine": {"cpus": os.cpu_count(), "kernel": platform.release(), "processor": platform.machine()},
        "versions": {"slurm": slurm_release(), "python": platform.python_version()},
        "made": dict.fromkeys(parts, begun),
        "bars": BARS,
        "figures": figures,
        "parts": parts,
    }
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    for figure, value in figures.items():
        bar = BARS.get(figure)
        judged = "" if bar is None else f"  bar {bar:g}{'  OVER' if value > bar else ''}"
        print(f"{figure:>32} {value if isinstance(value, list) else format(value, '.3f')}{judged}")


if __name__ == "__main__":
    main()
