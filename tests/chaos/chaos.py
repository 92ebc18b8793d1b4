"""Random faults of all kinds against a training run on the local cluster; the end must be as if nothing had
been.

    python tests/chaos/chaos.py --seed 7 --faults 5            one seed
    python tests/chaos/chaos.py --seeds 20                     seeds 1 to 20, one cluster
    python tests/chaos/chaos.py --seed 7 --plan-only           what it would do

A seed draws the same faults in the same order each time. Writes build/chaos/seed-N.json; of a run that went
wrong also its job directory, prints the plan, the timeline and the ends of the logs, and ends with 1.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "slurm"))

from chaos_judge import complaints
from chaos_plan import CHECKPOINT_EVERY, KINDS, RANKS, STANDBYS, START_GATE, Plan, draw
from chaos_play import DidNotEnd, Play
from cluster_names import own_name
from training_jobs import TrainingJob

from tm_slurm.localcluster import LocalCluster

REPORTS = Path(__file__).parents[2] / "build" / "chaos"
PAUSE_S = 0.02
UNDISTURBED_LIMIT_S = 120.0
LAST_ENTRIES = 80
TAIL_BYTES = 3000


class Chaos:
    """Runs under faults on one cluster, one after another."""

    def __init__(self, cluster: LocalCluster, jobs: Path) -> None:
        self._cluster = cluster
        self._jobs = jobs
        self._undisturbed: dict[int, list[str]] = {}

    def undisturbed(self, steps: int) -> list[str]:
        """The digests of every rank after so many steps without a fault."""
        if steps not in self._undisturbed:
            directory = self._jobs / f"undisturbed-{steps}"
            directory.mkdir()
            job = TrainingJob.submit(self._cluster, directory, nodes=RANKS, standbys=0, steps=steps)
            self._undisturbed[steps] = job.finish(UNDISTURBED_LIMIT_S)
        return self._undisturbed[steps]

    def run(self, plan: Plan) -> dict[str, Any]:
        """Play one plan; the report of it, in which `complaints` is empty when all was well."""
        print(plan, flush=True)
        expected = self.undisturbed(plan.steps)
        directory = self._jobs / f"seed-{plan.seed}-{time.monotonic_ns()}"
        directory.mkdir()
        began = time.monotonic()
        policy = {
            "snapshots": plan.snapshots,
            "checkpoint_every_steps": CHECKPOINT_EVERY,
            "max_failures_per_step": 2 * len(plan.faults),
        }
        job = TrainingJob.submit(
            self._cluster,
            directory,
            nodes=RANKS,
            standbys=STANDBYS,
            steps=plan.steps,
            gates=[START_GATE],
            pause_s=PAUSE_S,
            policy=policy,
        )
        play = Play(job, plan)
        try:
            play.run()
            found = complaints(play, expected)
        except (AssertionError, DidNotEnd) as error:
            found = [str(error).splitlines()[0]]
        downtimes = [note["downtime_s"] for note in job.files.notes("downtime")]
        report = {
            "plan": plan.to_json(),
            "complaints": found,
            "seconds": time.monotonic() - began,
            "events": play.events,
            "recoveries": len(job.files.notes("recovered")),
            "moves": len(job.files.notes("moved")),
            "downtimes_s": downtimes,
        }
        _write(plan, report, job)
        self._cluster.reset()
        return report


def _write(plan: Plan, report: dict[str, Any], job: TrainingJob) -> None:
    REPORTS.mkdir(parents=True, exist_ok=True)
    (REPORTS / f"seed-{plan.seed}.json").write_text(json.dumps(report, indent=1) + "\n")
    kept = REPORTS / f"seed-{plan.seed}-job"
    shutil.rmtree(kept, ignore_errors=True)
    if report["complaints"]:
        shutil.copytree(job.files.job_dir, kept, symlinks=True)
        print(_story(report, job), flush=True)


def _story(report: dict[str, Any], job: TrainingJob) -> str:
    """What happened, for whoever has to find out why."""
    lines = ["", "what was done:", *(json.dumps(event) for event in report["events"]), "", "timeline:"]
    lines += [json.dumps(entry)[:600] for entry in job.files.timeline()[-LAST_ENTRIES:]]
    for path in sorted((job.files.job_dir / "logs").glob("*.log"), key=lambda p: p.stat().st_mtime)[-10:]:
        lines += ["", f"--- {path.name}", path.read_text(errors="replace")[-TAIL_BYTES:]]
    return "\n".join([*lines, "", *(f"COMPLAINT: {complaint}" for complaint in report["complaints"])])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, action="append", default=[])
    parser.add_argument("--seeds", type=int, help="seeds 1 to this one")
    parser.add_argument("--faults", type=int, default=5)
    parser.add_argument("--kinds", default=",".join(KINDS), help="only these kinds, with commas between them")
    parser.add_argument("--plan-only", action="store_true")
    given = parser.parse_args()
    seeds = given.seed + list(range(1, (given.seeds or 0) + 1))
    plans = [draw(seed, given.faults, given.kinds.split(",")) for seed in seeds or [1]]
    if given.plan_only:
        print(*plans, sep="\n")
        return 0
    failed = []
    with (
        LocalCluster(nodes=RANKS + STANDBYS, mode="namespaces", name=own_name("chaos")) as cluster,
        tempfile.TemporaryDirectory(prefix="tm-slurm-chaos-") as jobs,
    ):
        chaos = Chaos(cluster, Path(jobs))
        for plan in plans:
            report = chaos.run(plan)
            verdict = "; ".join(report["complaints"]) or "ok"
            print(
                f"seed {plan.seed}: {verdict} ({report['seconds']:.0f} s, {report['recoveries']} recoveries, "
                f"{report['moves']} moves)\n",
                flush=True,
            )
            if report["complaints"]:
                failed.append(plan.seed)
    if failed:
        print(f"failed seeds: {' '.join(map(str, failed))}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
