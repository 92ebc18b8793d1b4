"""The SPANK plugin, prolog, epilog, health and trigger programs, in real daemons, tell the coordinator."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from administration import administered_cluster, installed, open_directory  # noqa: F401
from event_flood import flood
from event_receiver import Receiver, allocation, make_job_dir, receiver
from ordinary_user import let_in
from waiting import until

from tm_slurm.control.frames import encode
from tm_slurm.coordinator.election import LeaderFile
from tm_slurm.events.signed import signed_frame
from tm_slurm.install import Installed
from tm_slurm.localcluster import LocalCluster
from tm_slurm.localcluster.processes import command_name
from tm_slurm.slurm.configuration import cluster_identity

pytestmark = pytest.mark.slurm

EVENT_LIMIT_MS = 50.0
DELAY_LIMIT_S = 0.25
SAMPLES = 9

USER, OTHER_USER = "daemon", "nobody"


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A directory that every user reaches."""
    with open_directory("jobs") as path:
        yield path


@pytest.fixture
def cluster(administered_cluster: LocalCluster) -> Iterator[LocalCluster]:  # noqa: F811
    yield administered_cluster
    administered_cluster.reset()


@pytest.fixture(scope="module")
def job(
    administered_cluster: LocalCluster,  # noqa: F811
    place: Path,
) -> Iterator[tuple[int, Receiver]]:
    """An allocation of n1 with a coordinator."""
    with allocation(administered_cluster, "--nodelist=n1") as job_id:
        job_dir = make_job_dir(place / "job")
        with receiver(administered_cluster, job_dir, job_id) as coordinator:
            yield job_id, coordinator


def step(cluster: LocalCluster, job_id: int, script: str, to: Path | None) -> float:
    """Run a shell line as a step; its seconds."""
    env = {} if to is None else {"TM_SLURM_EVENTS_TO": str(to)}
    began = time.monotonic()
    cluster.run(["srun", f"--jobid={job_id}", "sh", "-c", script], env=env, check=False)
    return time.monotonic() - began


def delay_s(cluster: LocalCluster, job_id: int, to: Path) -> float:
    """By how much longer a step takes whose events go to `to`, medians of alternating ones."""
    pairs = [(step(cluster, job_id, "true", to), step(cluster, job_id, "true", None)) for _ in range(SAMPLES)]
    return statistics.median(told for told, _ in pairs) - statistics.median(other for _, other in pairs)


def test_the_death_of_a_task_is_known_within_50_ms(
    administered_cluster: LocalCluster,  # noqa: F811
    job: tuple[int, Receiver],
    place: Path,
) -> None:
    job_id, coordinator = job
    script = f"echo $EPOCHREALTIME >>{place}/died; kill -9 $$"
    loop = f"for i in $(seq 50); do srun --jobid={job_id} bash -c '{script}'; done"
    administered_cluster.run(
        ["sh", "-c", loop], env={"TM_SLURM_EVENTS_TO": str(coordinator.job_dir)}, check=False
    )
    until(lambda: len(coordinator.events("task_exit")) >= 50)
    known = sorted(event["at"] for event in coordinator.events("task_exit"))
    died = sorted(float(word) for word in (place / "died").read_text().split())
    latency_ms = [(seen - then) * 1e3 for seen, then in zip(known, died, strict=True)]
    assert statistics.median(latency_ms) <= EVENT_LIMIT_MS, sorted(latency_ms)
    reasons = {event["reason"].partition(" was ")[2] for event in coordinator.events("task_exit")}
    assert reasons == {"killed by signal 9"}
    until(lambda: len(coordinator.events("step_end")) >= 50)


def test_the_prolog_of_a_node_is_one_event_whoever_tells_it(
    administered_cluster: LocalCluster,  # noqa: F811
    place: Path,
) -> None:
    """The plugin and the program tell it; neither tries for longer than 250 ms, so that one may be lost."""
    with allocation(administered_cluster, "--nodelist=n2,n3") as job_id:
        job_dir = make_job_dir(place / "joining")
        with receiver(administered_cluster, job_dir, job_id) as coordinator:
            command = ["srun", f"--jobid={job_id}", "--nodes=2", "true"]
            administered_cluster.run(command, env={"TM_SLURM_EVENTS_TO": str(job_dir)})
            until(lambda: len(coordinator.events("node_join")) >= 2)
            coordinator.await_count("duplicate")
            joined = sorted(event["node"] for event in coordinator.events("node_join"))
            assert joined == ["n2", "n3"]


def test_a_thousand_events_a_second_lose_no_distinct_fact(
    administered_cluster: LocalCluster,  # noqa: F811
    job: tuple[int, Receiver],
) -> None:
    job_id, coordinator = job
    flooded = flood(administered_cluster, coordinator, job_id, per_s=1000, seconds=10.0)
    assert (flooded.sent, flooded.facts, flooded.taken) == (10_000, 5_000, 5_000)


def test_a_coordinator_that_is_frozen_flooded_or_gone_delays_no_step(
    administered_cluster: LocalCluster,  # noqa: F811
    job: tuple[int, Receiver],
) -> None:
    job_id, coordinator = job
    coordinator.freeze()
    try:
        assert delay_s(administered_cluster, job_id, coordinator.job_dir) <= DELAY_LIMIT_S
    finally:
        coordinator.thaw()
    leader = LeaderFile.read(coordinator.job_dir)
    assert leader is not None
    with contextlib.ExitStack() as flood:
        coordinator.freeze()  # nobody accepts: its queue of connections is full, and no more are let in
        try:
            enter_flood(flood, administered_cluster, leader.port)
            assert delay_s(administered_cluster, job_id, coordinator.job_dir) <= DELAY_LIMIT_S
        finally:
            coordinator.thaw()
    coordinator.process.kill()
    assert delay_s(administered_cluster, job_id, coordinator.job_dir) <= DELAY_LIMIT_S
    states = administered_cluster.node_states()
    assert "DRAIN" not in "".join(states.values()), states


def enter_flood(flood: contextlib.ExitStack, cluster: LocalCluster, port: int) -> None:
    """Connections to the coordinator's port until no more are taken, from the controller's own host."""
    code = (
        "import socket,sys\n"
        "held=[]\n"
        "while len(held) < 4096:\n"
        "    s=socket.socket(); s.settimeout(0.2)\n"
        f"    try: s.connect(('{cluster.address('ctl')}',{port}))\n"
        "    except OSError: break\n"
        "    held.append(s)\n"
        "print(len(held),flush=True); sys.stdin.read()\n"
    )
    command, environment = cluster.command([sys.executable, "-c", code])
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    flood.callback(process.wait, 10)
    flood.callback(process.kill)
    assert process.stdout is not None and int(process.stdout.readline()) > 0


def test_what_the_epilog_and_slurmd_say_arrives(cluster: LocalCluster, place: Path) -> None:
    with allocation(cluster, "--nodelist=n2,n3") as job_id:
        job_dir = make_job_dir(place / "leaving")
        with receiver(cluster, job_dir, job_id) as coordinator:
            command = ["srun", f"--jobid={job_id}", "--nodelist=n2", "--nodes=1", "true"]
            cluster.run(command, env={"TM_SLURM_EVENTS_TO": str(job_dir)})
            for pid in cluster.node_pids("n2"):
                if command_name(pid) == "slurmd":
                    os.kill(pid, signal.SIGTERM)
            assert coordinator.await_event("node_stop")["node"] == "n2"
            cluster.restore("n2")
            cluster.run(["scancel", str(job_id)])
            assert coordinator.await_event("node_leave")["node"] == "n2"
            coordinator.await_count("duplicate")  # prolog and epilog are told by plugin and program
            assert len(coordinator.events("node_leave")) == 1


@contextlib.contextmanager
def failing_check(installed: Installed, script: str) -> Iterator[None]:  # noqa: F811
    """A check of the administrator's, which fails."""
    check = installed.libexec / "checks.d" / "90-test"
    check.write_text(f"#!/bin/sh\n{script}\n")
    check.chmod(0o755)
    try:
        yield
    finally:
        check.unlink()


@contextlib.contextmanager
def restored(settings: Path) -> Iterator[None]:
    """What a test writes there is gone afterwards."""
    usual = settings.read_text()
    try:
        yield
    finally:
        settings.write_text(usual)


def test_an_unhealthy_node_is_told_and_drained_only_if_the_administrator_says_so(
    cluster: LocalCluster,
    place: Path,
    installed: Installed,  # noqa: F811
) -> None:
    settings = installed.prefix / "etc" / "tm_slurm" / "tm_slurm.conf"
    with allocation(cluster, "--nodelist=n1,n2") as job_id:
        job_dir = make_job_dir(place / "unwell")
        with receiver(cluster, job_dir, job_id) as coordinator:
            told = {"TM_SLURM_EVENTS_TO": str(job_dir)}
            cluster.run(["srun", f"--jobid={job_id}", "--nodelist=n1", "--nodes=1", "true"], env=told)
            with failing_check(installed, "echo the fan stands still; exit 1"), restored(settings):
                health = [str(installed.libexec / "health")]
                cluster.run(health, node="n1", env={"SLURMD_NODENAME": "n1"})
                event = coordinator.await_event("unhealthy")
                assert (event["node"], event["source"], event["reason"]) == (
                    "n1",
                    "health",
                    "90-test: the fan stands still",
                )
                assert "DRAIN" not in cluster.node_state("n1")
                # The prolog of n2 runs the checks for this job, beside the step.
                cluster.run(["srun", f"--jobid={job_id}", "--nodelist=n2", "--nodes=1", "true"], env=told)
                until(lambda: [e["source"] for e in coordinator.events("unhealthy")] == ["health", "prolog"])
                settings.write_text("DRAIN=yes\n")
                cluster.run(health, node="n1", env={"SLURMD_NODENAME": "n1"})
                assert "DRAIN" in cluster.node_state("n1")
                said = cluster.run(["scontrol", "-o", "show", "node", "n1"]).stdout
                assert "Reason=tm_slurm: 90-test: the fan stands still" in said


def test_what_a_prolog_starts_outlives_its_process_group(
    cluster: LocalCluster,
    place: Path,
    installed: Installed,  # noqa: F811
) -> None:
    rounds = 20
    with failing_check(installed, "exit 1"), allocation(cluster, "--nodelist=n1") as job_id:
        job_dir = make_job_dir(place / "returned")
        with receiver(cluster, job_dir, job_id) as coordinator:
            job = {"SLURM_JOB_ID": str(job_id), "SLURM_JOB_UID": "0", "SLURMD_NODENAME": "n1"}
            job["SPANK_TM_SLURM_EVENTS_TO"] = str(job_dir)
            command, environment = cluster.command(
                [str(installed.libexec / "prolog.d" / "50-tm_slurm")], node="n1", env=job
            )
            for _ in range(rounds):
                prolog = subprocess.Popen(command, env=environment, start_new_session=True)
                assert prolog.wait(10) == 0
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(prolog.pid, signal.SIGKILL)  # as slurmd does
            # Each tells that the job comes, and that the node is not well.
            until(lambda: sum(coordinator.counts().values()) == 2 * rounds)


def test_a_trigger_of_slurm_tells_the_job(
    cluster: LocalCluster,
    place: Path,
    installed: Installed,  # noqa: F811
) -> None:
    named = cluster_identity(cluster.environment())
    home = Path(pwd.getpwuid(0).pw_dir) / ".local/state/tm_slurm/jobs" / str(named)
    with allocation(cluster, "--nodelist=n1,n3", "--no-kill") as job_id:
        job_dir = make_job_dir(place / "triggered")
        link = home / str(job_id)
        home.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(job_dir)
        try:
            with receiver(cluster, job_dir, job_id) as coordinator:
                comment = "comment=tm_slurm epoch=0"
                cluster.run(["scontrol", "update", f"jobid={job_id}", comment])
                program = f"--program={installed.libexec}/trigger-down"
                cluster.run(["strigger", "--set", "--node=n3", "--down", program])
                cluster.set_down("n3")
                event = coordinator.await_event("down", timeout_s=40.0)
                assert (event["node"], event["source"]) == ("n3", "strigger")
        finally:
            link.unlink()
            with contextlib.suppress(OSError):
                home.rmdir()


def test_two_users_jobs_on_a_node_do_not_reach_each_other(cluster: LocalCluster, place: Path) -> None:
    with contextlib.ExitStack() as stack:
        coordinators = {}
        for user in (USER, OTHER_USER):
            job_id = stack.enter_context(allocation(cluster, "--nodelist=n1", "--ntasks=1", user=user))
            folder = place / f"of-{user}"
            folder.mkdir()
            uid = pwd.getpwnam(user).pw_uid
            os.chown(folder, uid, uid)
            job_dir = make_job_dir(folder / "job", uid)
            coordinators[user] = job_id, stack.enter_context(receiver(cluster, job_dir, job_id, uid))
        (mine, own), (_, other) = coordinators[USER], coordinators[OTHER_USER]
        for to in (other, own):  # the second one shows that the first would have arrived by then
            cluster.run(
                ["srun", f"--jobid={mine}", "true"],
                user=USER,
                cwd="/",
                env={"TM_SLURM_EVENTS_TO": str(to.job_dir)},
            )
        own.await_event("task_exit")
        assert other.events() == []


def test_what_is_not_this_jobs_is_counted_and_changes_nothing(cluster: LocalCluster, place: Path) -> None:
    """From another host, by another user: unsigned, made up, signed with another job's secret, told again,
    and about another job. Of it all one event is taken, the one that root has signed."""
    with allocation(cluster, "--nodelist=n1", user=USER) as job_id:
        uid = pwd.getpwnam(USER).pw_uid
        folder = place / "judged"
        folder.mkdir()
        os.chown(folder, uid, uid)
        job_dir = make_job_dir(folder / "job", uid)
        with receiver(cluster, job_dir, job_id, uid) as coordinator:
            leader = LeaderFile.read(job_dir)
            assert leader is not None
            told = {"v": 1, "job": job_id, "restart": 0, "term": leader.term, "at": time.time(), "node": "n1"}
            told |= {"kind": "drain", "source": "strigger", "fact": "", "reason": "made up"}
            mine, theirs = (job_dir / "secret").read_bytes(), os.urandom(32)
            good = signed_frame(mine, {**told, "kind": "node_join", "nonce": "a"})
            frames = {
                "unsigned": {"kind": "event", "event": told},
                "malformed": signed_frame(mine, {**told, "v": 2, "nonce": "b"}),
                "forged": signed_frame(theirs, {**told, "nonce": "c"}),
                "accepted": good,
                "replayed": good,
                "foreign": signed_frame(mine, {**told, "job": job_id + 1, "nonce": "d"}),
            }
            send = ";".join(
                ["import socket", f"s=socket.create_connection(('{cluster.address('ctl')}',{leader.port}),5)"]
                + [f"s.sendall({encode(frame)!r});s.recv(4096)" for frame in frames.values()]
            )
            let_in(cluster)
            cluster.run([sys.executable, "-c", send], node="n2", user=OTHER_USER, cwd="/", timeout_s=20.0)
            coordinator.await_count("foreign")
            counted = {what: count for what, count in coordinator.counts().items() if count}
            assert counted == dict.fromkeys(frames, 1)
            assert [event["what"] for event in coordinator.events()] == ["event_node_join"]
            nodes = json.loads((job_dir / "status.json").read_text())["nodes"]
            assert [node["notice"] for node in nodes] == [None] * len(cluster.node_names)


def test_a_job_with_tm_off_is_not_told_of(cluster: LocalCluster, place: Path) -> None:
    with allocation(cluster, "--nodelist=n1") as job_id:
        job_dir = make_job_dir(place / "off")
        with receiver(cluster, job_dir, job_id) as coordinator:
            told = {"TM_SLURM_EVENTS_TO": str(job_dir)}
            cluster.run(["srun", f"--jobid={job_id}", "--tm-off", "true"], env=told)
            cluster.run(["srun", f"--jobid={job_id}", "true"], env=told)
            event = coordinator.await_event("task_exit")
            assert event["id"].endswith("/1.0"), "the second step, not the first"


def test_nothing_of_a_job_is_left_on_its_node(cluster: LocalCluster) -> None:
    def is_there() -> bool:
        commands = {Path(f"/proc/{pid}/cmdline") for pid in cluster.node_pids("n1")}
        return any(b"321.5" in command.read_bytes() for command in commands if command.exists())

    escape = "echo left >/dev/shm/left; setsid --fork sleep 321.5 </dev/null >/dev/null 2>&1"
    with allocation(cluster, "--nodelist=n1", user=USER) as job_id:
        cluster.run(["srun", f"--jobid={job_id}", "sh", "-c", escape], user=USER, cwd="/")
        assert is_there()
    until(lambda: not is_there())
    until(lambda: cluster.run(["ls", "/dev/shm"], node="n1").stdout == "")


def test_nobody_is_reached_through_a_directory_that_is_none(cluster: LocalCluster, place: Path) -> None:
    for hostile in ("relative", "/nowhere/at/all", "/" + "x" * 5000, "/tmp/a\nb", f"{place}/file"):
        (place / "file").touch()
        cluster.run(["srun", "-N1", "true"], env={"TM_SLURM_EVENTS_TO": hostile})
    assert "DRAIN" not in "".join(cluster.node_states().values())
