"""The Slurm interface against real daemons: what is asked, what is changed, and what is refused."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from tm_slurm.localcluster import LocalCluster
from tm_slurm.slurm.scontrol_text import parse_reservations

pytestmark = pytest.mark.slurm

QUESTION = str(Path(__file__).with_name("slurm_question.py"))

way = "command_line"


@pytest.fixture(
    autouse=True, params=["command_line", *(["pyslurm"] if "TM_SLURM_NEXT" in os.environ else [])]
)
def ask_by(request: pytest.FixtureRequest) -> None:
    """Every promise holds whichever way Slurm is asked. There is no pyslurm for the release of Debian 12."""
    global way  # noqa: PLW0603
    way = request.param


def ask(cluster: LocalCluster, call: str, *arguments: Any, cwd: Path | None = None, **env: str) -> Any:
    """The answer of `connect().call(*arguments)`, asked beside the controller."""
    words = [sys.executable, QUESTION, json.dumps([call, arguments]), way]
    return json.loads(cluster.run(words, cwd=cwd, env=env, timeout_s=60.0).stdout)


def start(cluster: LocalCluster, directory: Path, *options: str, command: str = "exec sleep 600") -> int:
    """Submit a job of three nodes whose one step has a task on each, and wait until it runs."""
    command = f"srun --no-kill --kill-on-bad-exit=0 --wait=0 --overlap sh -c '{command}'"
    words = ["sbatch", "--parsable", "--nodes=3", "--ntasks-per-node=1", "--no-kill", "--requeue", *options]
    submitted = cluster.run([*words, "--output=/dev/null", f"--wrap={command}"], cwd=directory)
    job_id = int(submitted.stdout)
    until(lambda: ask(cluster, "job", job_id)["state"] == "RUNNING")
    return job_id


def test_nodes_give_their_state_reason_and_address(cluster: LocalCluster) -> None:
    cluster.drain("n2", reason="fan State=IDLE")
    nodes = ask(cluster, "nodes", ["n1", "n2", "no-such-node"])
    assert set(nodes) == {"n1", "n2"}
    assert nodes["n1"]["state"] == "IDLE" and nodes["n1"]["reason"] == ""
    assert nodes["n2"]["state"] == "IDLE+DRAIN" and nodes["n2"]["reason"] == "fan State=IDLE"
    assert nodes["n2"]["reason_at"] >= nodes["n2"]["slurmd_start_time"] > nodes["n2"]["boot_time"]
    assert nodes["n1"]["address"] == cluster.address("n1")
    assert ask(cluster, "nodes", ["no-such-node"])["raised"] == "SlurmRefused"


def test_nodes_are_given_back_one_after_the_other_and_the_batch_host_is_not(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    job_id = start(cluster, tmp_path)
    job = ask(cluster, "job", job_id)
    assert len(job["nodes"]) == 3 and job["batch_host"] == job["nodes"][0]
    batch_host, second, third = job["nodes"]
    inside = {"SLURM_JOB_ID": str(job_id), "SLURM_JOB_NUM_NODES": "3"}
    for left, keep in ((third, [batch_host, second]), (second, [batch_host])):
        cluster.drain(left)
        assert ask(cluster, "shrink", job_id, keep, cwd=tmp_path, **inside) is None
        assert ask(cluster, "job", job_id)["nodes"] == keep
        until(lambda left=left: cluster.node_state(left) == "IDLE+DRAIN")
    refused = ask(cluster, "shrink", job_id, [third], cwd=tmp_path, **inside)
    assert refused["raised"] == "SlurmRefused"
    assert ask(cluster, "job", job_id)["state"] == "RUNNING"
    assert not list(tmp_path.iterdir()), "scontrol leaves resize scripts where it runs"


def test_a_comment_is_seen_by_administrators(cluster: LocalCluster, tmp_path: Path) -> None:
    job_id = start(cluster, tmp_path)
    text = "n1 stays: it is the batch host; JobState=FAILED 'x' \"y\""
    assert ask(cluster, "set_comment", job_id, text) is None
    job = ask(cluster, "job", job_id)
    assert (job["comment"], job["state"]) == (text, "RUNNING")


def test_a_job_is_requeued_and_cancelled(cluster: LocalCluster, tmp_path: Path) -> None:
    job_id = start(cluster, tmp_path)
    assert ask(cluster, "requeue", job_id) is None
    until(lambda: ask(cluster, "job", job_id)["state"] == "PENDING")
    assert ask(cluster, "job", job_id)["restarts"] == 1
    assert ask(cluster, "cancel", job_id) is None
    until(lambda: ask(cluster, "job", job_id)["state"] == "CANCELLED")
    assert ask(cluster, "cancel", job_id) is None, "a job that is over already is no error"


def test_what_is_done_to_an_element_of_an_array_is_done_to_it_alone(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """One element has the array's own number as its id: by that number it would be done to all of them."""
    array, other, inside = start_array(cluster, tmp_path)
    assert ask(cluster, "set_comment", array, "mine", **inside) is None
    assert ask(cluster, "job", array)["comment"] == "mine" and ask(cluster, "job", other)["comment"] == ""
    keep = [ask(cluster, "job", array)["batch_host"]]
    assert ask(cluster, "shrink", array, keep, **inside) is None
    assert ask(cluster, "job", array)["nodes"] == keep and len(ask(cluster, "job", other)["nodes"]) == 2
    assert ask(cluster, "requeue", array, **inside) is None
    until(lambda: ask(cluster, "job", array)["restarts"] == 1)
    assert ask(cluster, "job", other)["state"] == "RUNNING" and ask(cluster, "job", other)["restarts"] == 0
    assert ask(cluster, "cancel", array, **inside) is None
    until(lambda: ask(cluster, "job", array)["state"] == "CANCELLED")
    assert ask(cluster, "job", other)["state"] == "RUNNING"


def start_array(cluster: LocalCluster, directory: Path) -> tuple[int, int, dict[str, str]]:
    """An array of two, both running on two nodes: the id of the element that has the array's, that of the
    other, and what the first one's environment says."""
    words = ["sbatch", "--parsable", "--array=0-1", "--nodes=2", "--no-kill", "--requeue"]
    submitted = cluster.run([*words, "--output=/dev/null", "--wrap=exec sleep 600"], cwd=directory)
    array = int(submitted.stdout)

    def elements() -> dict[int, str]:
        shown = cluster.run(["squeue", "--noheader", "--states=RUNNING", "--format=%A %K"]).stdout
        return {int(line.split()[0]): line.split()[1] for line in shown.splitlines()}

    until(lambda: len(elements()) == 2)
    (other,) = set(elements()) - {array}
    inside = {"SLURM_JOB_ID": str(array), "SLURM_ARRAY_JOB_ID": str(array)}
    return array, other, {**inside, "SLURM_ARRAY_TASK_ID": elements()[array]}


def test_a_requeued_job_begins_when_it_is_told_to(cluster: LocalCluster, tmp_path: Path) -> None:
    """Told while its processes are still being ended: Slurm's own delay after that does not undo it."""
    job_id = start(cluster, tmp_path)
    begins = time.time() + 7200.0
    assert ask(cluster, "begin_not_before", job_id, begins)["raised"] == "SlurmRefused"
    assert ask(cluster, "requeue", job_id) is None
    assert ask(cluster, "begin_not_before", job_id, begins) is None
    until(lambda: ask(cluster, "job", job_id)["state"] == "PENDING")
    assert abs(ask(cluster, "job", job_id)["start_time"] - begins) < 5.0


def test_reservations_say_when_and_over_which_nodes(cluster: LocalCluster, tmp_path: Path) -> None:
    assert ask(cluster, "reservations") == {}
    words = ["scontrol", "create", "reservation", "reservationname=fans", "users=root", "nodes=n[2-4]"]
    cluster.run([*words, "flags=maint", "starttime=now", "duration=60"])
    found = ask(cluster, "reservations")["fans"]
    assert found["nodes"] == ["n2", "n3", "n4"] and found["end_time"] - found["start_time"] == 3600.0
    assert abs(found["start_time"] - time.time()) < 30.0 and found["cpus"] == 12
    job_id = start(cluster, tmp_path, "--reservation=fans")
    assert ask(cluster, "job", job_id)["reservations"] == ["fans"]
    assert ask(cluster, "cancel", job_id) is None


def test_an_ordinary_user_reads_reservations_and_puts_off_a_job_of_their_own(
    cluster: LocalCluster, shared_dir: Path
) -> None:
    def as_user(*words: str) -> str:
        return cluster.run(words, user="nobody", cwd=shared_dir, timeout_s=20.0).stdout

    words = ["scontrol", "create", "reservation", "reservationname=fans", "users=root", "nodes=n6"]
    cluster.run([*words, "flags=maint", "starttime=now+600", "duration=60"])
    assert parse_reservations(
        as_user("env", "SLURM_TIME_FORMAT=%s", "scontrol", "-o", "show", "reservations")
    )
    options = ["--parsable", "--requeue", "--output=/dev/null", "--wrap=exec sleep 600"]
    job_id = as_user("sbatch", *options).strip()
    until(lambda: ask(cluster, "job", int(job_id))["state"] == "RUNNING")
    as_user("scontrol", "requeue", job_id)
    as_user("scontrol", "update", f"JobId={job_id}", "StartTime=now+7200seconds")
    until(lambda: ask(cluster, "job", int(job_id))["state"] == "PENDING")
    assert ask(cluster, "job", int(job_id))["start_time"] > time.time() + 7000.0


def test_what_does_not_exist_is_refused_in_slurms_words(cluster: LocalCluster) -> None:
    for call, arguments in (("job", [987654]), ("shrink", [987654, ["n1"]]), ("requeue", [987654])):
        answer = ask(cluster, call, *arguments)
        assert answer["raised"] == "SlurmRefused" and "Invalid job id" in answer["words"], answer


def test_a_controller_that_is_not_there_is_no_answer(cluster: LocalCluster, tmp_path: Path) -> None:
    conf = Path(cluster.environment()["SLURM_CONF"])
    elsewhere = tmp_path / "slurm.conf"
    lines = conf.read_text().splitlines()
    elsewhere.write_text(
        "\n".join("SlurmctldPort=1" if line.startswith("SlurmctldPort=") else line for line in lines)
    )
    answer = ask(cluster, "nodes", ["n1"], SLURM_CONF=str(elsewhere))
    assert answer["raised"] == "SlurmUnavailable", answer


def test_partitions_are_what_a_submission_is_checked_against(cluster: LocalCluster) -> None:
    (partition,) = ask(cluster, "partitions").values()
    assert partition["is_default"] and len(partition["nodes"]) == 6
