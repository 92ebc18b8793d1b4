"""What the guides have people type to Slurm and to a job is typed, as it stands there, on a real cluster."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from training_jobs import TrainingJob

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from guide_commands import ON_A_CLUSTER, ROOT

from tm_slurm.localcluster import LocalCluster

pytestmark = pytest.mark.slurm
GATE = 30


class Shell:
    """A shell on the cluster, in a directory of its own. `typed`: the commands that have been, as in the
    guides."""

    def __init__(self, cluster: LocalCluster, directory: Path) -> None:
        self.cluster = cluster
        self.directory = directory
        self.path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.typed: list[str] = []
        self.put_in: dict[str, str] = {}

    def type(self, command: str, more: str = "", *, expected: int = 0) -> str:
        """Run a command of the guides; `more`: words after it, where a test must not do all of it. What it
        has printed."""
        self.typed.append(command)
        line = command
        for words, instead in self.put_in.items():
            line = re.sub(words, instead, line)
        env = {"PATH": self.path, "COLUMNS": "200"}
        done: subprocess.CompletedProcess[str] = self.cluster.run(
            ["bash", "-c", f"{line} {more}"], cwd=self.directory, env=env, timeout_s=60.0, check=False
        )
        assert done.returncode == expected, f"{line} {more}: {done.stdout}{done.stderr}"
        return done.stdout


def test_each_is_typed_to_a_job(cluster: LocalCluster, tmp_path: Path) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    shell = Shell(cluster, tmp_path)
    job = TrainingJob.submit(cluster, tmp_path, gates=[GATE])
    job.warm(2)
    job.at_step(GATE - 1)
    node = job.active_nodes()[1]
    name = str(job.job_id)
    shell.put_in = {
        r"\b1234\b": name,
        r"\bJOB\b": name,
        r" 1$": f" {name}",
        r"n\[3-4\]": "n[5-6]",
        r"\bn3\b": node,
    }
    shell.type("until tm-slurm status | grep -q training; do sleep 1; done")
    for reading in ("tm-slurm status", "tm-slurm status JOB", "tm-slurm status 1"):
        assert f"job {name}  training" in shell.type(reading)
    assert "training starts" in shell.type("tm-slurm events JOB")
    assert "report.html" in shell.type("tm-slurm report")
    assert "2 of them warm" in shell.type("tm-slurm standbys")
    assert name in shell.type('squeue -o "%i %T %k"') and name in shell.type("squeue --me")

    for asking in (
        "tm-slurm migrate 1234 --node n3",
        "tm-slurm migrate JOB --node n3",
        "tm-slurm migrate --node n3",
    ):
        assert "will move" in shell.type(asking)
        shell.type("tm-slurm cancel-move --node n3")
    shell.type("scontrol update nodename=n3 state=drain reason=disk")
    job.note("event_drain", node=node)
    shell.type("scontrol update nodename=n3 state=resume")
    job.note("event_resume", node=node)
    reservation = next(command for command in ON_A_CLUSTER if "create reservation" in command)
    shell.type(reservation)
    shell.type("scontrol delete reservationname=fans")

    job.open_gate(GATE)
    job.finish()
    for following in (
        "tm-slurm watch JOB",
        "tm-slurm watch 1",
        "tm-slurm events --follow",
        "tm-slurm events -f",
    ):
        shell.type(
            following, "" if "watch" in following else name
        )  # nothing runs any more that could be meant
    for report in ("tm-slurm report JOB", "tm-slurm report 1"):
        assert "report.html" in shell.type(report)
    assert (tmp_path / f"report-{name}" / "report.html").exists()
    assert shell.type("tm-slurm report JOB --json").startswith("{")
    shell.type("tm-slurm timeline JOB --format chrome -o trace.json")
    assert "traceEvents" in (tmp_path / "trace.json").read_text()

    small = f"--standbys=0 --nodes=1 --set train.steps=100000 --set job.directory={tmp_path}/gpt/%j"
    submitted = shell.type("tm-slurm submit configs/char_gpt.yaml", small)
    gpt = int(submitted.split()[1].rstrip(":"))
    shell.put_in = {r"\b1234\b": str(gpt)}
    running = TrainingJob(cluster, gpt, tmp_path / "gpt" / str(gpt))
    running.at_step(1)
    shell.type("scancel 1234")
    running.until("it is over", lambda: running.info().is_over)
    assert set(shell.typed) == set(ON_A_CLUSTER)
