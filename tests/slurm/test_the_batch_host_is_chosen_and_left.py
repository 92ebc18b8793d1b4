"""The one node that Slurm cannot take out of a running job: it may be a service node (`job.batch_feature`),
and a drain of it may send the whole job back into the queue (`policy.batch_host_drain`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster_names import own_name
from training_jobs import TM_SLURM, TrainingJob, config_text, gates_of_a_move

from tm_slurm.localcluster import LocalCluster

pytestmark = pytest.mark.slurm
SERVICE, OTHERS = "n4", ["n1", "n2", "n3"]


@pytest.fixture(scope="module")
def featured_cluster() -> Iterator[LocalCluster]:
    """Four nodes, the last of which is for services."""
    features = {SERVICE: "service", **dict.fromkeys(OTHERS, "compute")}
    with LocalCluster(nodes=4, mode="namespaces", name=own_name("featured"), features=features) as cluster:
        yield cluster


@pytest.mark.parametrize("constraint", [None, "[compute*3&service*1]"])
def test_the_batch_script_runs_on_the_service_node_and_all_others_can_be_given_back(
    featured_cluster: LocalCluster,
    tmp_path: Path,
    undisturbed: Callable[..., list[str]],
    constraint: str | None,
) -> None:
    cluster, asked = featured_cluster, {"batch_feature": "service"}
    if constraint is not None:
        asked["constraint"] = constraint
    job = TrainingJob.submit(
        cluster, tmp_path, nodes=2, standbys=2, gates=[*gates_of_a_move(20), 40], **asked
    )
    job.warm(2)
    assert job.info().batch_host == SERVICE and set(job.info().nodes) == {SERVICE, *OTHERS}
    assert job.standing(SERVICE) == "standby", "the last to get ranks"
    node = job.active_nodes()[0]
    cluster.drain(node)
    job.note("event_drain", node=node)
    job.pass_gates(20)
    job.note("drained", node=node)
    assert SERVICE not in job.seats()
    job.open_gate(40)
    assert job.finish() == undisturbed()
    cluster.reset()


def test_a_feature_that_no_node_has_is_refused_where_it_is_typed(
    featured_cluster: LocalCluster, tmp_path: Path
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(config_text(tmp_path, batch_feature="gpu"))
    done = featured_cluster.run([TM_SLURM, "submit", str(config)], cwd=tmp_path, check=False)
    assert done.returncode == 2 and done.stderr.startswith("Error: job.batch_feature: "), done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert featured_cluster.run(["squeue", "--noheader"]).stdout == ""


def test_a_drained_batch_host_sends_the_job_back_into_the_queue(
    cluster: LocalCluster, tmp_path: Path, undisturbed: Callable[..., list[str]]
) -> None:
    job = TrainingJob.submit(
        cluster, tmp_path, standbys=1, gates=[20, 40], policy={"batch_host_drain": "requeue"}
    )
    job.warm(1)
    job.at_step(19)
    batch_host = str(job.info().batch_host)
    cluster.drain(batch_host)
    job.note("event_drain", node=batch_host)
    job.open_gate(20)  # the boundary at which the checkpoint is taken
    job.note("ended", state="requeue")
    cluster.wait_node(batch_host, "IDLE+DRAIN", timeout_s=30.0)
    job.runs_again()
    assert batch_host not in job.info().nodes
    job.open_gate(40)
    assert job.finish() == undisturbed()
    assert 0 < job.note("checkpoint_found")["step"] <= 40
    assert not job.files.notes("moved")
