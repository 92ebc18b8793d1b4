"""Output recorded from real daemons (Slurm 22.05.8) is read as meant, whatever people wrote into it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tm_slurm.slurm.scontrol_text import (
    ScontrolFormatError,
    parse_duration,
    parse_jobs,
    parse_nodes,
    parse_partitions,
)

GOLDEN = Path(__file__).with_name("golden")


def recorded(name: str) -> str:
    return (GOLDEN / name).read_text()


def test_leaving_nodes_are_read_with_their_reasons() -> None:
    nodes = parse_nodes(recorded("scontrol_nodes_leaving.txt"))
    assert {name: node.state.leaving() for name, node in nodes.items()} == {
        "n1": "reboot",
        "n2": "drain",
        "n3": "fail",
        "n4": "reboot",
        "n5": None,
        "n6": "drain",
    }
    assert nodes["n6"].state.is_drained and not nodes["n2"].state.is_drained
    assert (nodes["n3"].reason, nodes["n3"].reason_user) == ("failing", "root")
    assert nodes["n2"].address == "10.91.0.2" and nodes["n2"].hostname == "n2"
    assert nodes["n2"].partitions == ("batch",) and nodes["n2"].version == "22.05.8"
    assert nodes["n2"].boot_time is not None and nodes["n2"].slurmd_start_time is not None


def test_what_an_administrator_writes_is_never_taken_for_the_state() -> None:
    node = parse_nodes(recorded("scontrol_nodes_leaving.txt"))["n2"]
    assert node.reason == "disk State=IDLE fan=3"
    assert str(node.state) == "MIXED+DRAIN"
    assert node.reason_at is not None and 1795963000 < node.reason_at < 1795964000


def test_a_reason_of_two_lines_is_one_reason_and_no_second_node() -> None:
    nodes = parse_nodes(recorded("scontrol_nodes_leaving.txt"))
    assert nodes["n6"].reason == "two lines NodeName=n1"
    assert len(nodes) == 6


def test_a_comment_beside_the_reason_is_no_part_of_it() -> None:
    line = "NodeName=n1 State=IDLE+DRAIN Reason=disk [root@1795963030] Comment=State=DOWN Extra=x y\n"
    node = parse_nodes(line)["n1"]
    assert (node.reason, str(node.state)) == ("disk", "IDLE+DRAIN")
    swapped = "NodeName=n1 State=IDLE+DRAIN Comment=State=DOWN x Reason=disk [root@1795963030]\n"
    node = parse_nodes(swapped)["n1"]
    assert (node.reason, node.reason_user, str(node.state)) == ("disk", "root", "IDLE+DRAIN")


def test_resumed_nodes_have_no_reason_and_do_not_leave() -> None:
    nodes = parse_nodes(recorded("scontrol_nodes_resumed.txt"))
    assert all(node.state.leaving() is None and node.reason == "" for node in nodes.values())
    assert "NOT_RESPONDING" in nodes["n2"].state.flags


def test_a_dead_node_is_down() -> None:
    nodes = parse_nodes(recorded("scontrol_nodes_one_down.txt"))
    assert [name for name, node in nodes.items() if node.state.leaving() == "down"] == ["n4"]
    assert nodes["n4"].reason == "Not responding"


def test_a_running_job_is_read_in_spite_of_its_name_and_comment() -> None:
    (job,) = parse_jobs(recorded("scontrol_job_running.txt"))
    assert job.state == "RUNNING" and not job.is_over
    assert job.name == "we ird=name JobState=PENDING"
    assert job.comment == "hello JobState=FAILED NodeList=n9"
    assert job.nodes == ("n1", "n2", "n3", "n4", "n5") and job.batch_host == "n1"
    assert (job.job_id, job.user, job.partition) == (2, "root", "batch")
    assert job.time_limit_s == 95400 and job.requeue and job.restarts == 0
    assert job.start_time is not None and job.end_time == job.start_time + 95400
    assert job.work_dir == "/home/user/run"


def test_a_job_that_lost_a_node_goes_on_without_it() -> None:
    (job,) = parse_jobs(recorded("scontrol_job_lost_a_node.txt"))
    assert job.state == "RUNNING" and job.nodes == ("n1", "n2", "n3", "n5")


def test_a_pending_job_has_no_nodes_and_no_times() -> None:
    (job,) = parse_jobs(recorded("scontrol_job_pending.txt"))
    assert job.state == "PENDING" and job.nodes == () and job.batch_host is None
    assert job.start_time is None and job.end_time is None and job.time_limit_s is None
    assert job.comment == "" and not job.is_over


def test_a_cancelled_job_is_over() -> None:
    (job,) = parse_jobs(recorded("scontrol_job_cancelled.txt"))
    assert job.is_over and (job.exit_code, job.exit_signal) == (0, 15)


def test_partitions_are_read() -> None:
    partition = parse_partitions(recorded("scontrol_partitions.txt"))["batch"]
    assert partition.is_default and partition.state == "UP"
    assert partition.nodes == ("n1", "n2", "n3", "n4", "n5", "n6")
    assert partition.max_nodes is None and partition.max_time_s is None


def test_a_record_without_a_state_is_an_error_not_a_healthy_node() -> None:
    with pytest.raises(ScontrolFormatError):
        parse_nodes("NodeName=n1 Arch=x86_64 CPUTot=4\n")
    with pytest.raises(ScontrolFormatError):
        parse_jobs("JobId=1 JobName=x UserId=root(0) GroupId=root(0)\n")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("00:30:00", 1800),
        ("1-02:30:00", 95400),
        ("05:00", 300),
        ("UNLIMITED", None),
        ("Partition_Limit", None),
    ],
)
def test_durations_are_seconds(text: str, seconds: float | None) -> None:
    assert parse_duration(text) == seconds


def test_what_is_no_duration_is_an_error() -> None:
    with pytest.raises(ScontrolFormatError):
        parse_duration("soon")
