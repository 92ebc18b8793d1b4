"""What people are shown of a job on the real cluster: its metrics while it runs, its story as lines, its
report."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from training_jobs import TrainingJob, gates_of_a_move

from tm_slurm.localcluster import LocalCluster

pytestmark = pytest.mark.slurm

ASK = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=10).read().decode())"


def metrics(job: TrainingJob) -> dict[str, float]:
    """As Prometheus would find them, from a node of the cluster."""
    targets = job.files.job_dir / "metrics_targets.json"
    job.until("the coordinator says where its metrics are", targets.exists)
    (address,) = json.loads(targets.read_text())[0]["targets"]
    words = [sys.executable, "-c", ASK, f"http://{address}/metrics"]
    lines = job.cluster.run(words, timeout_s=30.0).stdout.splitlines()
    found = [line.rsplit(" ", 1) for line in lines if line and not line.startswith("#")]
    label = f'job_id="{job.job_id}"'
    assert all(label in name for name, _ in found)
    return {name.replace(f"{label},", "").replace(f"{{{label}}}", ""): float(value) for name, value in found}


def test_a_drained_job_is_seen_in_metrics_lines_and_report(cluster: LocalCluster, tmp_path: Path) -> None:
    gates = [*gates_of_a_move(20), 40]
    job = TrainingJob.submit(cluster, tmp_path, gates=gates, policy={"metrics_port": 0})
    job.warm(2)
    assert metrics(job)['tm_slurm_standbys{warmth="warm"}'] == 2
    leaver = job.active_nodes()[0]
    job.at_step(19)
    cluster.drain(leaver, reason="to be seen")
    job.note("event_drain", node=leaver)
    job.pass_gates(20)
    job.note("downtime")
    job.until("all ranks have told of a step at the gate", lambda: (job.files.status() or {})["step"] == 39)
    found = metrics(job)
    assert found["tm_slurm_steps_total"] == 40 and found["tm_slurm_epoch"] == 1
    assert found['tm_slurm_interruptions_total{kind="drain",outcome="moved"}'] == 1
    assert found['tm_slurm_downtime_seconds_count{kind="drain"}'] == 1
    assert found['tm_slurm_events_total{kind="drain",source="poll"}'] == 1
    assert found['tm_slurm_nodes{standing="active"}'] == 2
    job.open_gate(40)
    job.finish()
    story = job.tm_slurm("watch", str(job.files.job_dir))
    assert story.returncode == 0, story.stderr
    assert f"{leaver}: drain: to be seen (from poll)" in story.stdout
    (drain,) = json.loads(job.tm_slurm("timeline", str(job.files.job_dir), "--format", "json").stdout)
    joiner = drain["pairs"][0]["joiner"]
    moved = {(span["name"], span["node"], span["rank"]) for span in drain["spans"]}
    assert {(name, joiner, 0) for name in ("prepare", "switch", "transfer", "resume")} <= moved
    out = tmp_path / "report"
    made = job.tm_slurm("report", str(job.files.job_dir), "-o", str(out))
    assert made.returncode == 0, made.stderr
    assert "to be seen" in (out / "report.html").read_text()
