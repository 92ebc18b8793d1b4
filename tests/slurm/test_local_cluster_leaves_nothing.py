"""The local cluster starts quickly, mends what crashed, stops what it started, and touches nothing else."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_names import own_name
from waiting import until

from tm_slurm.localcluster import LocalCluster
from tm_slurm.localcluster.lifecycle import stop_processes
from tm_slurm.localcluster.network import machine_link
from tm_slurm.localcluster.plain import marked, strays
from tm_slurm.localcluster.processes import ProcessId
from tm_slurm.localcluster.record import Record

pytestmark = pytest.mark.slurm

Trace = dict[str, set[str]]


def trace() -> Trace:
    """Everything on this machine that a cluster could leave behind."""
    links = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True).stdout
    return {
        "links": {line.split("@")[0].split()[0] for line in links.splitlines()},
        "mounts": {line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()},
    }


def assert_nothing_left(cluster: LocalCluster, before: Trace) -> None:
    assert not marked(cluster.layout) and not strays(cluster.layout)
    assert not cluster.directory.exists()
    after = trace()
    assert after["mounts"] <= before["mounts"]
    assert not any(str(cluster.directory) in place for place in after["mounts"])
    assert machine_link(cluster.layout) not in after["links"]


def slurmctld(cluster: LocalCluster) -> ProcessId:
    record = Record.load(cluster.layout)
    assert record is not None
    found = record.process("slurmctld")
    assert found is not None
    return found


def kill(*pids: int) -> None:
    processes = [found for pid in pids if (found := ProcessId.of(pid))]
    for process in processes:
        process.send(signal.SIGKILL)
    until(lambda: not any(process.alive() for process in processes), timeout_s=5.0)


@pytest.fixture(params=["namespaces", "plain"])
def fresh(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    """A cluster of its own that is not up yet."""
    cluster = LocalCluster(nodes=6, mode=request.param, name=own_name("fresh"))
    yield cluster
    cluster.down()


def test_up_is_quick_twice_is_harmless_and_down_leaves_nothing(fresh: LocalCluster) -> None:
    before = trace()
    started = time.monotonic()
    assert fresh.up() is True
    took_s = time.monotonic() - started
    print(f"up in {took_s:.2f} s")
    assert took_s < 10.0, "expected under 5 s on a quiet machine"
    assert set(fresh.node_states().values()) == {"IDLE"}

    controller = slurmctld(fresh)
    job = fresh.run(
        ["sbatch", "--parsable", "-N2", "--output=/dev/null", "--wrap=srun sleep 600"]
    ).stdout.strip()
    until(lambda: "RUNNING" in fresh.run(["squeue", "-h", "-j", job, "-o", "%T"]).stdout)
    again = LocalCluster(nodes=6, mode="auto" if fresh.mode == "namespaces" else "plain", name=fresh.name)
    assert again.up() is False
    with again:
        pass
    assert slurmctld(fresh) == controller
    assert "RUNNING" in fresh.run(["squeue", "-h", "-j", job, "-o", "%T"]).stdout

    fresh.down()
    assert_nothing_left(fresh, before)
    fresh.down()
    assert fresh.status().state == "down"


def test_up_mends_what_crashed_and_keeps_the_jobs(fresh: LocalCluster) -> None:
    fresh.up()
    job = fresh.run(
        ["sbatch", "--parsable", "-w", "n1", "--output=/dev/null", "--wrap=exec sleep 600"]
    ).stdout.strip()
    until(lambda: "RUNNING" in fresh.run(["squeue", "-h", "-j", job, "-o", "%T"]).stdout)
    fresh.drain("n5", "to stay")
    record = Record.load(fresh.layout)
    assert record is not None
    slurmctld(fresh).send(signal.SIGTERM)  # kill -9 loses what Slurm saw in its last five seconds
    kill(record.processes["munged"].pid, record.processes["n2"].pid)
    until(lambda: record.process("slurmctld") is None)
    fresh.kill_slurmd("n3")
    fresh.freeze("n4")
    assert fresh.status().state == "broken"

    assert fresh.up() is False
    assert {node.host for node in fresh.status().nodes} == {"on"}
    assert "RUNNING" in fresh.run(["squeue", "-h", "-j", job, "-o", "%T"]).stdout
    assert fresh.node_state("n5") == "IDLE+DRAIN"
    assert "n2" in fresh.run(["srun", "-w", "n2", "sh", "-c", "echo $SLURMD_NODENAME"]).stdout
    fresh.reset()


def test_after_everything_was_killed_up_starts_afresh_and_down_removes(fresh: LocalCluster) -> None:
    before = trace()
    fresh.up()
    first = slurmctld(fresh)
    stop_processes(fresh.layout)  # its files stay behind, as after kill -9 of all of it
    assert fresh.layout.record.exists() and fresh.status().state == "broken"
    assert fresh.up() is True
    assert slurmctld(fresh) != first and set(fresh.node_states().values()) == {"IDLE"}

    record = Record.load(fresh.layout)
    assert record is not None
    kill(*(process.pid for process in record.processes.values()))
    fresh.down()
    assert_nothing_left(fresh, before)


def test_a_lost_record_does_not_hide_a_cluster_from_down(fresh: LocalCluster) -> None:
    before = trace()
    fresh.up()
    shutil.rmtree(fresh.directory)
    assert marked(fresh.layout)
    fresh.down()
    assert_nothing_left(fresh, before)


def test_a_start_that_is_killed_is_cleaned_up_by_the_next(fresh: LocalCluster) -> None:
    script = (
        "from tm_slurm.localcluster import LocalCluster; "
        f"LocalCluster(name={fresh.name!r}, mode={fresh._mode!r}).up()"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    starter = subprocess.Popen([sys.executable, "-c", script], env=environment)
    until(lambda: marked(fresh.layout))
    starter.kill()
    starter.wait(timeout=5)
    fresh.up()
    assert set(fresh.node_states().values()) == {"IDLE"}


def running_jobs(cluster: LocalCluster) -> list[str]:
    return cluster.run(["squeue", "-h", "-t", "R", "-o", "%A"]).stdout.split()


def test_two_clusters_side_by_side_do_not_meet(shared_dir: Path) -> None:
    with (
        LocalCluster(nodes=2, mode="namespaces", name=own_name("left")) as left,
        LocalCluster(nodes=2, mode="namespaces", name=own_name("right")) as right,
        LocalCluster(nodes=2, mode="plain", directory=Path("/tmp", own_name("p1"))) as third,
        LocalCluster(nodes=2, mode="plain", directory=Path("/tmp", own_name("p2"))) as fourth,
    ):
        clusters = (left, right, third, fourth)
        assert len({cluster.address("n1") for cluster in (left, right)}) == 2
        for number, cluster in enumerate(clusters):
            for _ in range(number):
                cluster.run(["srun", "true"])
            cluster.run(["sbatch", "-N2", "--output=/dev/null", "--wrap=srun sleep 600"])
        for number, cluster in enumerate(clusters):
            jobs = until(lambda cluster=cluster: running_jobs(cluster))
            assert jobs == [str(number + 1)]
        left.down()
        third.down()
        for cluster in (right, fourth):
            assert cluster.run(["squeue", "-h", "-t", "R", "-o", "%T"]).stdout.split() == ["RUNNING"]
            assert {node.host for node in cluster.status().nodes} == {"on"}


def test_down_spares_bystanders_and_ends_leftover_commands(fresh: LocalCluster) -> None:
    fresh.up()
    shell = subprocess.Popen(["sleep", "600"], env={**os.environ, **fresh.environment()})
    words, environment = fresh.command(["srun", "-N2", "sleep", "600"])
    leftover = subprocess.Popen(words, env=environment, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        until(lambda: "R" in fresh.run(["squeue", "-h", "-o", "%t"]).stdout)
        fresh.down()
        leftover.wait(timeout=5)
        assert shell.poll() is None, "a shell of the user that merely knows the cluster is not the cluster's"
    finally:
        shell.kill()
        leftover.kill()
        shell.wait(timeout=5)
        leftover.wait(timeout=5)


def test_a_process_that_took_over_a_number_is_not_signalled() -> None:
    bystander = subprocess.Popen(["sleep", "600"])
    try:
        identity = ProcessId.of(bystander.pid)
        assert identity is not None and identity.alive()
        earlier = ProcessId(identity.pid, identity.start - 1)
        assert not earlier.alive() and earlier.send(signal.SIGKILL) is False
        assert bystander.poll() is None
        assert identity.send(signal.SIGKILL) is True
        assert bystander.wait(timeout=5) == -signal.SIGKILL
    finally:
        bystander.kill()


def ordinary_users_python(folder: Path) -> tuple[str, dict[str, str]]:
    """An interpreter and environment with which any user can import the cluster from any checkout."""
    package = Path(__file__).parents[2] / "tm_slurm"
    (folder / "lib" / "tm_slurm").mkdir(parents=True)
    shutil.copy(package / "__init__.py", folder / "lib" / "tm_slurm")
    shutil.copytree(package / "localcluster", folder / "lib" / "tm_slurm" / "localcluster")
    shutil.copytree(Path(sysconfig.get_path("purelib"), "filelock"), folder / "lib" / "filelock")
    home = tempfile.mkdtemp(prefix="tm", dir="/tmp")  # sockets lie below it: not a long path
    shutil.chown(home, "nobody")
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(folder / "lib"), "HOME": home}
    for python in (sys.executable, "/usr/bin/python3"):
        trial = [python, "-c", "import sys, tm_slurm.localcluster; assert sys.version_info >= (3, 10)"]
        try:
            subprocess.run(trial, env=environment, user="nobody", cwd=folder, timeout=20, check=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        return python, environment
    pytest.skip("no Python that an ordinary user may start: install /usr/bin/python3")


ORDINARY = """
import getpass, json, sys
from tm_slurm.localcluster import LocalCluster, LocalClusterError
cluster = LocalCluster(nodes=2)
try:
    LocalCluster(nodes=2, mode="namespaces").up()
except LocalClusterError as error:
    refusal = str(error)
with cluster:
    said = cluster.run(["srun", "-N2", "id", "-u"]).stdout.split()
    cluster.power_off("n2")
    cluster.restore("n2")
    answer = {"mode": cluster.mode, "said": said, "directory": str(cluster.directory), "refusal": refusal}
    print(json.dumps(answer))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_an_ordinary_user_has_a_plain_cluster(shared_dir: Path) -> None:
    python, environment = ordinary_users_python(shared_dir)
    done = subprocess.run(
        [python, "-c", ORDINARY],
        env=environment,
        user="nobody",
        group="nogroup",
        extra_groups=[],
        cwd=shared_dir,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    uid = str(pwd.getpwnam("nobody").pw_uid)
    assert answer["mode"] == "plain" and answer["said"] == [uid, uid]
    assert answer["directory"] == f"{environment['HOME']}/.local/state/tm_slurm/local"
    assert not Path(answer["directory"]).parent.exists()
    shutil.rmtree(environment["HOME"])
    assert "needs root" in answer["refusal"] and "--mode plain" in answer["refusal"]
