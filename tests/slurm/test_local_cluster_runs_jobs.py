"""The local cluster is a Slurm cluster: jobs run at once, for every user, and can give nodes back."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
from waiting import until

from tm_slurm.localcluster import LocalCluster, LocalClusterError
from tm_slurm.localcluster.processes import command_name

pytestmark = pytest.mark.slurm


def submit(
    cluster: LocalCluster, *options: str, wrap: str, user: str | None = None, cwd: Path | None = None
) -> str:
    return cluster.run(
        ["sbatch", "--parsable", *options, f"--wrap={wrap}"], user=user, cwd=cwd
    ).stdout.strip()


def programs(cluster: LocalCluster, node: str) -> set[str]:
    return {command_name(pid) for pid in cluster.node_pids(node)}


def test_a_batch_job_runs_on_six_hosts_with_their_own_names_and_addresses(
    cluster: LocalCluster, shared_dir: Path
) -> None:
    submit(cluster, "-N6", f"--output={shared_dir}/out", wrap="srun -l sh -c 'hostname; hostname -i'")
    out = shared_dir / "out"
    lines = until(lambda: out.exists() and len(found := out.read_text().split()) == 24 and found)
    said = set(lines[1::2])
    assert said == set(cluster.node_names) | {cluster.address(node) for node in cluster.node_names}


def test_a_batch_job_starts_within_the_schedulers_second(cluster: LocalCluster, shared_dir: Path) -> None:
    asked = time.time()
    submit(cluster, f"--output={shared_dir}/out", wrap="date +%s.%N")
    started = float(until(lambda: (shared_dir / "out").exists() and (shared_dir / "out").read_text()))
    assert started - asked < 3.0, "slurmctld looks at its queue every second"


def test_an_ordinary_user_runs_jobs(cluster: LocalCluster, shared_dir: Path) -> None:
    done = cluster.run(
        ["srun", "-N2", "sh", "-c", "id -un; touch from-$(hostname); pwd"], user="nobody", cwd=shared_dir
    )
    assert sorted(done.stdout.split()) == sorted(["nobody", "nobody", str(shared_dir), str(shared_dir)])
    assert {path.owner() for path in shared_dir.glob("from-*")} == {"nobody"}
    assert len(list(shared_dir.glob("from-*"))) == 2


def test_the_calling_shell_needs_only_the_environment(cluster: LocalCluster) -> None:
    environment = {"PATH": os.environ["PATH"], **cluster.environment()}
    done = subprocess.run(
        ["srun", "-N6", "hostname"], env=environment, capture_output=True, text=True, timeout=30, check=True
    )
    assert set(done.stdout.split()) == set(cluster.node_names)


def test_a_running_job_gives_back_one_drained_node_after_the_other(cluster: LocalCluster) -> None:
    job = submit(
        cluster,
        "-N6",
        "--no-kill",
        "--output=/dev/null",
        wrap="srun --no-kill --kill-on-bad-exit=0 --wait=0 sleep 600",
    )
    for node in cluster.node_names:
        until(lambda node=node: "slurmstepd" in programs(cluster, node))
    kept = list(cluster.node_names)
    for node in ("n4", "n2"):
        cluster.drain(node, "test")
        assert "DRAIN" in cluster.node_state(node) and "IDLE" not in cluster.node_state(node)
        kept.remove(node)
        cluster.run(["scontrol", "update", f"jobid={job}", f"NodeList={','.join(kept)}"])
        cluster.wait_node(node, "IDLE+DRAIN", timeout_s=5.0)
        # Slurm calls the node DRAINED a moment before the last step daemon there has ended.
        until(lambda node=node: "slurmstepd" not in programs(cluster, node), timeout_s=5.0)
    assert cluster.run(["squeue", "-h", "-o", "%T %D"]).stdout.split() == ["RUNNING", "4"]
    for node in kept:
        assert "slurmstepd" in programs(cluster, node)


def test_a_command_that_hangs_is_ended_with_its_children(cluster: LocalCluster) -> None:
    with pytest.raises(LocalClusterError, match=r"had not ended after 0\.5 s"):
        cluster.run(["srun", "-w", "n1", "sleep", "600"], timeout_s=0.5)
    until(lambda: not cluster.run(["squeue", "-h"]).stdout.strip())


def test_a_plain_cluster_runs_jobs_on_loopback(plain_cluster: LocalCluster, shared_dir: Path) -> None:
    job = submit(
        plain_cluster, "-N6", f"--output={shared_dir}/out", wrap="srun sh -c 'echo $SLURMD_NODENAME'"
    )
    until(lambda: "JobState=COMPLETED" in plain_cluster.run(["scontrol", "show", "job", job]).stdout)
    assert set((shared_dir / "out").read_text().split()) == set(plain_cluster.node_names)
    assert plain_cluster.run(["srun", "id", "-un"], user="nobody").stdout == "nobody\n"
