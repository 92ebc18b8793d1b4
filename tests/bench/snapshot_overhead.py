"""What snapshots into peer memory cost a training that goes on undisturbed, at the interval that the job
chooses.

    python tests/bench/snapshot_overhead.py           (a part of bench_downtime.py)

Two answers. Inside runs: how much longer than the steps around them the steps are that begin with a snapshot,
or while its bytes are on their way, times their share of all steps; this is the figure. And from run to run,
with and without snapshots in turn: on a machine that others use too these differ by more than what is looked
for.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "slurm"))

from training_jobs import TrainingJob

from tm_slurm.localcluster import LocalCluster

CONFIG = Path(__file__).parents[2] / "configs" / "char_gpt.yaml"
ACTIVE = 4
STEPS = 240
FIRST_STEPS = 20
"""Not looked at: caches and allocators fill."""

AFTER = 2
"""Steps after a snapshot that it may make longer: its bytes are still on their way."""

AROUND = 12
"""Steps before and after, of which those without a snapshot are what a step is compared with."""

PAIRS = 5
LIMIT_S = 240.0


def run(cluster: LocalCluster, directory: Path, snapshots: str) -> dict[str, Any]:
    """One undisturbed job: the seconds of each step, and after which steps a snapshot was taken."""
    directory.mkdir(parents=True)
    settings = {"job__directory": str(directory / "%j"), "policy__snapshots": snapshots}
    settings |= {"train__steps": str(STEPS), "job__nodes": str(ACTIVE), "job__standbys": "0"}
    job = TrainingJob.submit_config(cluster, CONFIG, **settings)
    job.finish(LIMIT_S)
    taken = set()
    for journal in job.files.job_dir.glob("journal.*.jsonl"):
        for line in journal.read_text().splitlines():
            given = json.loads(line)
            if given["kind"] == "snapshot_stored":
                taken.add(int(given["step"]))
    seconds = {int(step["step"]): float(step["seconds"]) for step in job.files.steps()}
    return {"seconds": {n: s for n, s in seconds.items() if n >= FIRST_STEPS}, "taken": sorted(taken)}


def inside(measured: dict[str, Any]) -> dict[str, Any]:
    """Of one run with snapshots: by what fraction each step that one touches is longer than the others around
    it, the share of such steps, and how many steps lie between two snapshots. ValueError when there are fewer
    than two."""
    seconds, taken = measured["seconds"], [step for step in measured["taken"] if step >= FIRST_STEPS]
    if len(taken) < 2:
        raise ValueError(
            f"expected two snapshots or more in the steps from {FIRST_STEPS} to {STEPS}, found {len(taken)}: "
            "the job chose an interval too long for so few steps"
        )
    # after `step` steps are done, the step with that number is the first that a snapshot makes longer
    touched = {step + n for step in taken for n in range(AFTER)} & set(seconds)
    longer = []
    for step in touched:
        near = range(step - AROUND, step + AROUND + 1)
        calm = [seconds[n] for n in near if n in seconds and n not in touched]
        if calm:
            longer.append(seconds[step] / statistics.median(calm) - 1)
    every = statistics.median(later - earlier for earlier, later in itertools.pairwise(taken))
    return {"longer": longer, "share": len(touched) / len(seconds), "every_steps": every}


def measure(cluster: LocalCluster, jobs: Path, pairs: int = PAIRS) -> dict[str, Any]:
    """`pairs` runs with and without snapshots in turn."""
    rows, longer = [], []
    for number in range(pairs):
        without = run(cluster, jobs / f"without-{number}", "never")
        having = run(cluster, jobs / f"with-{number}", "always")
        found = inside(having)
        longer += found.pop("longer")
        medians = [statistics.median(each["seconds"].values()) for each in (having, without)]
        means = [statistics.fmean(each["seconds"].values()) for each in (having, without)]
        rows.append({**found, "median_ratio": medians[0] / medians[1], "mean_ratio": means[0] / means[1]})
        print("  ".join(f"{key} {value:.4f}" for key, value in rows[-1].items()), flush=True)
    share = statistics.fmean(row["share"] for row in rows)
    return {"rows": rows, "touched_steps": len(longer), "overhead": statistics.median(longer) * share}


def main() -> None:
    with (
        LocalCluster(nodes=ACTIVE, mode="namespaces", name="bench-snapshots") as cluster,
        tempfile.TemporaryDirectory(prefix="tm-slurm-bench-") as jobs,
    ):
        print(measure(cluster, Path(jobs)))


if __name__ == "__main__":
    main()
