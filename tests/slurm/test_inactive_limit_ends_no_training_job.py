"""A site's InactiveLimit ends an allocation whose salloc is gone. A training job with launch: allocation has
neither salloc nor srun once it runs, and goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_names import own_name
from training_jobs import TrainingJob, until

from tm_slurm.localcluster import LocalCluster

pytestmark = pytest.mark.slurm
LIMIT_S = 10
ENDED_LIMIT_S = 90.0
"""Slurm looks every half a minute."""


@pytest.fixture
def limited_cluster() -> Iterator[LocalCluster]:
    conf = f"InactiveLimit={LIMIT_S}"
    with LocalCluster(nodes=3, mode="namespaces", name=own_name("limited"), extra_conf=conf) as cluster:
        yield cluster


def test_an_allocation_without_srun_goes_on(limited_cluster: LocalCluster, tmp_path: Path) -> None:
    cluster, size = limited_cluster, {"nodes": 2, "standbys": 0}
    job = TrainingJob.submit(cluster, tmp_path, launch="allocation", gates=[20], **size)
    job.note("started")
    known = job.files.job_dir / "allocation.json"
    job.until("its srun is gone", lambda: json.loads(known.read_text())["launched"])
    command, environment = cluster.command(
        ["salloc", "--nodelist=n3", "--job-name=abandoned", "sleep", "600"]
    )
    salloc = subprocess.Popen(command, env=environment, start_new_session=True, stderr=subprocess.DEVNULL)
    try:
        shown = ["squeue", "--noheader", "--name=abandoned", "--states=RUNNING", "--format=%A"]
        until("an salloc", lambda: cluster.run(shown).stdout)
    finally:
        os.killpg(salloc.pid, signal.SIGKILL)
        salloc.wait(10)
    until("Slurm has ended it", lambda: not cluster.run(shown).stdout, ENDED_LIMIT_S)
    job.open_gate(20)
    assert job.finish() == TrainingJob.submit(cluster, tmp_path, **size).finish()
