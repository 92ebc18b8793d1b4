"""Records a real job for the tests that read job directories: char_gpt on the local cluster, a node drained,
a rank killed, another node drained.

    make record        # writes tests/unit/recorded_job/
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from training_jobs import TrainingJob

from tm_slurm.localcluster import LocalCluster

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "tests" / "unit" / "recorded_job"
FILES = ("timeline.jsonl", "steps.jsonl", "status.json", "verdict.json", "config.yaml")
ACTIVE, STANDBYS, STEPS = 4, 3, 110


def main() -> None:
    with (
        LocalCluster(nodes=ACTIVE + STANDBYS, name="record") as cluster,
        tempfile.TemporaryDirectory(prefix="tm-slurm-record-") as jobs,
    ):
        job = TrainingJob.submit_config(
            cluster,
            ROOT / "configs" / "char_gpt.yaml",
            train__steps=STEPS,
            job__nodes=ACTIVE,
            job__standbys=STANDBYS,
            job__directory=f"{jobs}/%j",
        )
        job.warm(STANDBYS)
        job.at_step(25)
        cluster.drain(job.active_nodes()[1], reason="disk is to be replaced")
        job.note("moved")
        job.at_step(55)
        job.kill_rank(job.seats()[3])
        job.note("recovered")
        job.at_step(80)
        cluster.drain(job.seats()[0], reason="fan is loud")
        job.finish()
        (again,) = [pair["leaver"] for entry in job.files.notes("recovered") for pair in entry["pairs"]]
        if sum(entry["node"] == again for entry in job.files.notes("warm")) < 1:
            raise SystemExit(f"training ended before {again} was a warm standby again: record once more")
        RECORDED.mkdir(exist_ok=True)
        for name in FILES:
            text = (job.files.job_dir / name).read_text()
            (RECORDED / name).write_text(
                text.replace(jobs, "/shared/jobs").replace(sys.executable, "python3")
            )
    print(f"recorded in {RECORDED}")


if __name__ == "__main__":
    main()
