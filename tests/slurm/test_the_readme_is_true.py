"""The README's training script and config are run as they stand: alone, and as a job."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from training_jobs import TM_SLURM, TrainingJob

from tm_slurm.localcluster import LocalCluster

README = (Path(__file__).parents[2] / "README.md").read_text()


def block(language: str) -> str:
    """The first code block of a language."""
    found = re.search(rf"```{language}\n(.*?)```", README, re.DOTALL)
    assert found, f"the README has no {language} block"
    return found.group(1)


def write_script(directory: Path) -> Path:
    script = directory / "train.py"
    script.write_text(block("python"))
    return script


def test_the_script_runs_in_one_process(tmp_path: Path) -> None:
    script = write_script(tmp_path)
    script.write_text(script.read_text().replace("steps=1000", "steps=5") + '\nprint("done")\n')
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr


@pytest.mark.slurm
def test_the_script_runs_as_a_job(cluster: LocalCluster, tmp_path: Path) -> None:
    write_script(tmp_path)
    (tmp_path / "config.yaml").write_text(block("yaml"))
    words = [TM_SLURM, "submit", "config.yaml", "--json", "--nodes=2", "--standbys=1"]
    words += [f"--set=job.directory={tmp_path}/%j"]
    submitted = cluster.run(words, cwd=tmp_path)
    job_id = int(re.search(r'"job_id": (\d+)', submitted.stdout)[1])  # type: ignore[index]
    job = TrainingJob(cluster, job_id, tmp_path / str(job_id))
    assert len(set(job.finish())) == 1  # nothing in it differs between ranks
    assert job.files.steps()[-1]["step"] == 999
