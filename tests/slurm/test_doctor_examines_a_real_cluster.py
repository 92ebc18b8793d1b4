"""`tm-slurm doctor` on real daemons: a cluster that is well, and one with mistakes in its slurm.conf."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from administration import administered_cluster, installed, open_directory  # noqa: F401
from cluster_names import own_name
from training_jobs import TM_SLURM
from waiting import until

from tm_slurm.doctor.settings import release
from tm_slurm.localcluster import LocalCluster
from tm_slurm.slurm.pyslurm_client import is_installed

pytestmark = pytest.mark.slurm

ASKED_OF_NODES = {
    "tm_slurm",
    "job directory",
    "locks",
    "addresses",
    "names",
    "ports",
    "clocks",
    "open files",
    "interfaces",
    "installed files",
}
MISTAKES = """
SlurmdTimeout=0
KillWait=1
ReturnToService=0
PreemptType=preempt/partition_prio
PreemptMode=SUSPEND,GANG
RequeueExit=0-1
PrologFlags=Serial
InactiveLimit=60
PrivateData=nodes,reservations
HealthCheckProgram=/nowhere/tm_slurm/health
HealthCheckInterval=60
AccountingStorageType=accounting_storage/none
PlugStackConfig={plugstack}
"""


@pytest.fixture(scope="module")
def mistaken_cluster() -> Iterator[LocalCluster]:
    with open_directory("mistakes") as folder:
        plugstack = folder / "plugstack.conf"
        plugstack.write_text("optional /nowhere/lib/tm_slurm/tm_slurm.so\n")
        extra = MISTAKES.format(plugstack=plugstack)
        with LocalCluster(nodes=3, mode="namespaces", name=own_name("mistakes"), extra_conf=extra) as cluster:
            yield cluster


def examine(
    cluster: LocalCluster,
    directory: Path,
    *words: str,
    code: int,
    inside: bool = False,
    node: str | None = None,
) -> Any:
    """What the doctor says beside the controller or on a node, or `inside` an allocation of two nodes."""
    before = ["salloc", "-Q", "--nodes=2"] if inside else []
    command = [*before, TM_SLURM, "doctor", "--json", f"--directory={directory}", *words]
    done = cluster.run(command, cwd=directory, check=False, timeout_s=100.0, node=node)
    assert done.returncode == code, done.stdout + done.stderr
    return {check["check"]: check for check in json.loads(done.stdout)["checks"]}


def test_a_healthy_cluster_has_no_failure(
    administered_cluster: LocalCluster,  # noqa: F811
    shared_dir: Path,
) -> None:
    for inside, node in ((False, None), (True, None), (False, "n1")):
        found = examine(administered_cluster, shared_dir, code=0, inside=inside, node=node)
        assert set(found) >= ASKED_OF_NODES
        warned = {name for name, check in found.items() if check["verdict"] != "pass"}
        assert warned == {"SlurmdTimeout", "ProctrackType"}, "what the local cluster does otherwise"
        assert (
            "for Slurm" in found["plugin build"]["found"]
            and "4 the same" in found["installed files"]["found"]
        )
        assert found["pyslurm"]["found"] == ("answers" if is_installed() else "not installed")
    assert list(shared_dir.iterdir()) == []
    until(lambda: administered_cluster.run(["squeue", "--noheader"]).stdout == "")


def test_every_mistake_is_named(mistaken_cluster: LocalCluster, shared_dir: Path) -> None:
    found = examine(mistaken_cluster, shared_dir, code=1)
    verdicts = {name: check["verdict"] for name, check in found.items()}
    failed = {name for name, verdict in verdicts.items() if verdict == "fail"}
    assert failed == {
        "PreemptMode",
        "RequeueExit",
        "PrivateData",
        "SPANK plugin",
        "HealthCheckProgram",
        "installed files",
    }
    warned = {name for name, verdict in verdicts.items() if verdict == "warn"}
    assert warned >= {"SlurmdTimeout", "KillWait", "ReturnToService", "PrologFlags"}
    assert verdicts["InactiveLimit"] == "pass", "see test_inactive_limit_ends_no_training_job.py"
    shrinks_once = release(found["resizing"]["found"]) <= (24, 5)
    assert verdicts["resizing"] == ("warn" if shrinks_once else "pass")
    assert "there is no such file" in found["SPANK plugin"]["meaning"]
    assert all(found[name]["mend"] for name in failed | warned)


def test_a_directory_of_each_node_s_own_is_found_out(
    mistaken_cluster: LocalCluster, shared_dir: Path
) -> None:
    mistaken_cluster.run(["mount", "-t", "tmpfs", "none", str(shared_dir)], node="n2")
    found = examine(mistaken_cluster, shared_dir, "--nodelist=n1,n2", code=1)
    assert found["job directory"]["verdict"] == "fail" and "n2" in found["job directory"]["found"]
    assert found["locks"]["verdict"] == "fail" and found["ports"]["verdict"] == "pass"


def test_a_python_that_nodes_do_not_have_is_a_failure(
    mistaken_cluster: LocalCluster, shared_dir: Path
) -> None:
    found = examine(mistaken_cluster, shared_dir, "--python=/nowhere/python", code=1)
    assert found["nodes"]["verdict"] == "fail" and "/nowhere/python: No such file" in found["nodes"]["found"]


def test_nodes_that_are_taken_are_not_waited_for_long(
    mistaken_cluster: LocalCluster, shared_dir: Path
) -> None:
    words = [
        "sbatch",
        "--parsable",
        "--nodes=3",
        "--exclusive",
        "--output=/dev/null",
        "--wrap=exec sleep 600",
    ]
    job = mistaken_cluster.run(words).stdout.strip()
    try:
        found = examine(mistaken_cluster, shared_dir, "--wait=2", code=1)
        assert found["nodes"]["verdict"] == "warn" and not ASKED_OF_NODES & set(found)
        assert "Unable to allocate resources" in found["nodes"]["found"], found["nodes"]
    finally:
        mistaken_cluster.run(["scancel", job])


def test_a_configuration_that_has_changed_under_slurmctld(
    mistaken_cluster: LocalCluster, shared_dir: Path
) -> None:
    conf = Path(mistaken_cluster.environment()["SLURM_CONF"])
    written = conf.read_text()
    try:
        conf.write_text(written + "# edited, and not yet read\n")
        found = examine(mistaken_cluster, shared_dir, "--nodes=0", code=1)
        assert found["slurm.conf"]["verdict"] == "fail" and "reconfigure" in found["slurm.conf"]["mend"]
    finally:
        conf.write_text(written)
