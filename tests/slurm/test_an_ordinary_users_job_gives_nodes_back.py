"""An ordinary user's job, with Slurm's standard permissions, where slurmctld runs as the user slurm: it knows
at once that a node is wanted back, and the administrator has the node within seconds."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest
from cluster_names import own_name
from ordinary_user import USER, directory_of, let_in
from training_jobs import TrainingJob, gates_of_a_move, until

from tm_slurm.localcluster import LocalCluster

pytestmark = pytest.mark.slurm

KNOWN_LIMIT_S = 1.2
"""From the administrator's command to the coordinator's journal, polls being a second apart."""

FREE_LIMIT_S = 6.0
"""From the administrator's command until Slurm has the node back."""

WORDS = {
    "drain": ["scontrol", "update", "nodename=NODE", "state=drain", "reason=disk"],
    "fail": ["scontrol", "update", "nodename=NODE", "state=fail", "reason=disk"],
    "reboot": ["scontrol", "reboot", "ASAP", "reason=kernel", "NODE"],
}
"""What an administrator types. The reboot is last: the local cluster's nodes do not come back from it."""

CONF = """
RebootProgram=/bin/true
ResumeTimeout=600
SlurmUser=slurm
StateSaveLocation={own}
SlurmctldLogFile={own}/slurmctld.log
SlurmctldPidFile={own}/slurmctld.pid
"""

STATE: dict[str, set[str]] = {"drain": {"IDLE", "DRAIN"}, "fail": {"IDLE", "FAIL"}, "reboot": set()}


@pytest.fixture(scope="module")
def users_cluster() -> Iterator[LocalCluster]:
    """Eight nodes that can be asked to reboot, by a program that does nothing."""
    with directory_of("slurm") as own:
        conf = CONF.format(own=own)
        with LocalCluster(nodes=8, mode="namespaces", name=own_name("users"), extra_conf=conf) as cluster:
            let_in(cluster)
            yield cluster


def test_drain_fail_and_reboot_are_known_at_once_and_the_node_is_free_soon(
    users_cluster: LocalCluster,
) -> None:
    cluster, gates = users_cluster, [20, 30, 40]
    gated = [step for gate in gates for step in gates_of_a_move(gate)]
    size = {"nodes": 3, "policy": {"poll_interval_s": 1.0}}
    with directory_of(USER) as directory:
        undisturbed = TrainingJob.submit(cluster, directory, user=USER, standbys=0, **size).finish()
        job = TrainingJob.submit(cluster, directory, user=USER, standbys=4, gates=[*gated, 50], **size)
        job.warm(4)
        assert job.info().user == USER and job.files.job_dir.owner() == USER
        assert re.search(r"SlurmUser +=.slurm\(", cluster.run(["scontrol", "show", "config"]).stdout)
        nodes = job.active_nodes()
        assert job.info().batch_host not in nodes
        for number, (node, gate, kind) in enumerate(zip(nodes, gates, WORDS, strict=True), 1):
            called_at = time.time()
            cluster.run([word.replace("NODE", node) for word in WORDS[kind]], timeout_s=20.0)
            known = job.note(f"event_{kind}", node=node)
            job.pass_gates(gate, moves=number)
            free = job.note("drained", node=node)
            print(f"{kind} known_s={known['at'] - called_at:.2f} free_s={free['at'] - called_at:.2f}")
            assert known["at"] - called_at <= KNOWN_LIMIT_S
            assert free["at"] - called_at <= FREE_LIMIT_S
            assert set(cluster.node_state(node).split("+")) >= STATE[kind], cluster.node_state(node)
            assert node not in job.info().nodes
        job.open_gate(50)
        assert job.finish() == undisturbed
        until("an empty queue", lambda: not cluster.run(["squeue", "--noheader"]).stdout.strip(), 20.0)
