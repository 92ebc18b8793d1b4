"""Ranks whose parameters nobody else has, jobs without a standby, jobs whose time is over: what was kept
brings them back, with the same bits."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from training_jobs import TrainingJob

from tm_slurm.localcluster import LocalCluster
from tm_slurm.state.checkpoint_directory import complete, step_of

pytestmark = pytest.mark.slurm
Digests = Callable[..., list[str]]
SHARDED = {"nodes": 3, "steps": 300, "pause_s": 0.01, "sharded": True}


def test_all_go_back_to_the_snapshot_when_a_shard_is_lost(
    cluster: LocalCluster, tmp_path: Path, undisturbed: Digests
) -> None:
    job = TrainingJob.submit(cluster, tmp_path, standbys=2, **SHARDED, policy={"snapshot_every_steps": 20})
    job.warm(2)
    job.at_step(70)
    job.kill_rank(job.seats()[1])
    recovered = job.note("recovered")
    assert recovered["source"] == "snapshot" and recovered["step"] % 20 == 0
    job.until("training goes on", lambda: job.files.steps()[-1]["step"] > recovered["step"] + 45)
    cluster.power_off(job.seats()[2])
    job.until("it is survived", lambda: len(job.files.notes("recovered")) > 1)
    assert job.files.notes("recovered")[1]["source"] == "snapshot"
    assert job.finish() == undisturbed(**SHARDED)


def test_the_checkpoint_is_used_where_there_is_no_snapshot(
    cluster: LocalCluster, tmp_path: Path, undisturbed: Digests
) -> None:
    policy = {"snapshots": "never", "checkpoint_every_steps": 40}
    job = TrainingJob.submit(cluster, tmp_path, standbys=1, **SHARDED, policy=policy)
    job.warm(1)
    job.note("checkpoint")
    job.at_step(90)
    job.kill_rank(job.seats()[0])
    recovered = job.note("recovered")
    assert recovered["source"] == "checkpoint" and recovered["step"] % 40 == 0
    assert job.finish() == undisturbed(**SHARDED)
    assert len(list((job.files.job_dir / "checkpoints").iterdir())) == 2  # older ones are removed


def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    cluster: LocalCluster, tmp_path: Path, undisturbed: Digests
) -> None:
    """In a running job, and at the start of a requeued one."""
    policy = {"snapshots": "never", "checkpoint_every_steps": 40}
    job = TrainingJob.submit(cluster, tmp_path, standbys=1, **SHARDED, gates=[85, 205], policy=policy)
    job.warm(1)
    damage(Path(job.note("checkpoint", step=80)["path"]))
    job.kill_rank(job.seats()[0])
    job.note("recover")
    job.open_gate(85)
    assert job.note("recovered", step=40)["source"] == "checkpoint"
    job.at_step(204)
    cluster.run(["scancel", "--signal=USR2", str(job.job_id)], timeout_s=10.0)
    job.note("event_time_limit")
    job.open_gate(205)
    job.until("the last checkpoint", lambda: "time_limit" in str(job.files.verdict()))
    last, before = complete(job.files.job_dir / "checkpoints")[:2]
    damage(last)
    job.runs_again()
    job.note("checkpoint_given_up", step=step_of(last))
    job.note("resolve", step=step_of(before))
    assert job.finish(limit_s=200.0) == undisturbed(**SHARDED)


def damage(checkpoint: Path) -> None:
    """One byte of what the first rank has written is another."""
    path = next((checkpoint / "shard-00000").glob("*.distcp"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_job_whose_time_is_over_goes_on_from_its_checkpoint(
    cluster: LocalCluster, tmp_path: Path, undisturbed: Digests
) -> None:
    shape = {"nodes": 2, "steps": 200, "pause_s": 0.02}
    job = TrainingJob.submit(cluster, tmp_path, standbys=0, **shape)
    job.at_step(30)
    cluster.run(["scancel", "--signal=USR2", str(job.job_id)], timeout_s=10.0)
    stopped = job.note("checkpoint")
    assert stopped["step"] > 30
    job.runs_again()
    found = job.note("checkpoint_found")
    assert found["step"] == stopped["step"]
    assert job.finish(limit_s=200.0) == undisturbed(**shape)
    assert job.info().restarts == 1
    steps = [s["step"] for s in job.files.steps()]
    assert steps == list(range(200)), steps


def test_a_rank_without_a_standby_starts_again_where_it_was(
    cluster: LocalCluster, tmp_path: Path, undisturbed: Digests
) -> None:
    job = TrainingJob.submit(cluster, tmp_path, standbys=0, gates=[20])
    job.at_step(19)
    node = job.active_nodes()[0]
    job.kill_rank(node)
    job.note("recover")
    job.open_gate(20)
    assert job.note("recovered")["pairs"] == [{"leaver": node, "joiner": node, "ranks": [0]}]
    assert job.finish() == undisturbed()


def test_a_surviving_node_hosts_the_ranks_of_a_lost_one_when_there_is_no_standby(
    cluster: LocalCluster, tmp_path: Path, undisturbed: Digests
) -> None:
    job = TrainingJob.submit(cluster, tmp_path, standbys=0, gates=[20])
    job.at_step(19)
    gone, host = job.active_nodes()[1], job.active_nodes()[0]
    cluster.power_off(gone)
    job.note("recover")
    job.open_gate(20)
    assert job.note("recovered")["pairs"] == [{"leaver": gone, "joiner": host, "ranks": [1]}]
    job.until("the host has both ranks", lambda: job.seats() == [host, host])
    assert job.finish() == undisturbed()


def test_gradients_that_are_not_numbers_are_computed_again_once(
    cluster: LocalCluster, tmp_path: Path, undisturbed: Digests
) -> None:
    job = TrainingJob.submit(cluster, tmp_path, standbys=0, nan_at=[1, 30], policy={"on_nonfinite": "redo"})
    assert job.finish() == undisturbed()


def test_gradients_that_are_not_numbers_end_the_job_at_once_if_the_config_says_so(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    policy = {"on_nonfinite": "stop", "checkpoint_every_steps": 10}
    job = TrainingJob.submit(cluster, tmp_path, standbys=0, nan_at=[1, 30], policy=policy)
    verdict = job.until("the job's verdict", job.files.verdict)
    assert verdict["state"] == "failed"
    assert "step 30: gradients are not finite" in verdict["reason"]
    assert not job.files.notes("recover"), "its checkpoint leads to the same step"


def test_a_step_that_crashes_every_time_ends_the_job_with_the_first_ones_last_words(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    job = TrainingJob.submit(cluster, tmp_path, standbys=2, crash_at=30)
    verdict = job.until("the job's verdict", job.files.verdict)
    assert verdict["state"] == "failed"
    assert "this batch is broken" in verdict["reason"]
    failure = verdict["failure"]
    assert failure["step"] == 30 and failure["rank"] in (0, 1)
    assert 'raise RuntimeError("this batch is broken")' in failure["traceback"]


def stock_torch_reads(path: Path) -> dict[str, list[int]]:
    """Names and shapes of a checkpoint's tensors, as a process without tm_slurm sees them."""
    code = (
        "import json, sys, torch.distributed.checkpoint as dcp\n"
        "metadata = dcp.FileSystemReader(sys.argv[1]).read_metadata().state_dict_metadata\n"
        "print(json.dumps({name: list(entry.size) for name, entry in metadata.items()}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def test_stock_torch_reads_a_jobs_checkpoint(cluster: LocalCluster, tmp_path: Path) -> None:
    job = TrainingJob.submit(cluster, tmp_path, standbys=0, policy={"checkpoint_every_steps": 25})
    job.finish()
    newest = sorted((job.files.job_dir / "checkpoints").glob("step-*"))[-1]
    shapes = stock_torch_reads(newest / "shard-00000")
    assert shapes["model/0.weight"] == [64, 32]
