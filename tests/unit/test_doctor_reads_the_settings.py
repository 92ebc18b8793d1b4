"""Checks of `tm-slurm doctor` on settings: what real daemons have printed, and single changes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tm_slurm.doctor import settings, versions
from tm_slurm.doctor.finding import Finding
from tm_slurm.doctor.settings import Settings, parse_config

RECORDED = Path(__file__).with_name("golden")


def config(name: str, **changes: str) -> Settings:
    return parse_config((RECORDED / f"doctor_config_{name}.txt").read_text()) | changes


def verdicts(of: Settings) -> dict[str, str]:
    return {finding.check: finding.verdict for finding in (check(of) for check in settings.CHECKS)}


def test_the_text_is_read_whole() -> None:
    healthy = config("healthy")
    assert healthy["SLURM_VERSION"] == "22.05.8" and healthy["SlurmdTimeout"] == "10 sec"
    assert healthy["Prolog"] == "" and healthy["SlurmctldHost"] == "ctl(10.77.130.254)"
    assert healthy["SchedulerParameters"] == "batch_sched_delay=0,sched_interval=1,bf_interval=1"
    assert parse_config("Prolog[0] = /a\nProlog[1] = /b\n")["Prolog"] == "/a,/b"


@pytest.mark.parametrize("name", ["healthy", "healthy_26.05"])
def test_a_healthy_cluster_has_no_failure(name: str) -> None:
    found = verdicts(config(name))
    assert "fail" not in found.values()
    assert {check for check, verdict in found.items() if verdict == "warn"} == {
        "SlurmdTimeout",
        "ProctrackType",
    }
    production = config(name, SlurmdTimeout="300 sec", ProctrackType="proctrack/cgroup")
    assert set(verdicts(production).values()) == {"pass"}


def test_every_mistake_is_found() -> None:
    assert verdicts(config("mistakes")) == {
        "slurm.conf": "pass",
        "SlurmdTimeout": "warn",
        "KillWait": "warn",
        "ReturnToService": "warn",
        "PreemptMode": "fail",
        "RequeueExit": "fail",
        "PrologFlags": "warn",
        "InactiveLimit": "pass",
        "PrivateData": "fail",
        "resizing": "warn",
        "ProctrackType": "warn",
    }


@pytest.mark.parametrize(
    ("check", "changes", "verdict", "words"),
    [
        (
            "same_configuration",
            {"HASH_VAL": "Different Ours=0x9c Slurmctld=0x59"},
            "fail",
            "scontrol reconfigure",
        ),
        ("slurmd_timeout", {"SlurmdTimeout": "0 sec"}, "warn", "never calls a silent node DOWN"),
        ("slurmd_timeout", {"SlurmdTimeout": "5 min"}, "pass", "300 s"),
        ("slurmd_timeout", {"SlurmdTimeout": ""}, "warn", "scontrol show config | grep SlurmdTimeout"),
        ("kill_wait", {"KillWait": "30 sec"}, "pass", "30 s"),
        ("kill_wait", {"KillWait": "2 sec"}, "warn", "KillWait=30"),
        ("return_to_service", {"ReturnToService": "0"}, "warn", "state=resume"),
        ("return_to_service", {"ReturnToService": "1"}, "pass", "1"),
        (
            "preempt_mode",
            {"PreemptMode": "REQUEUE", "PreemptType": "preempt/qos"},
            "warn",
            "preempt_send_user",
        ),
        ("preempt_mode", {"PreemptMode": "CANCEL", "PreemptType": "preempt/qos"}, "warn", "is lost"),
        (
            "preempt_mode",
            {
                "PreemptMode": "REQUEUE",
                "PreemptType": "preempt/qos",
                "SlurmctldParameters": "preempt_send_user_signal",
            },
            "pass",
            "checkpoint",
        ),
        ("preempt_mode", {"PreemptMode": "GANG,SUSPEND", "PreemptType": "preempt/qos"}, "fail", "frozen"),
        ("requeue_exit", {"RequeueExit": "3-5"}, "pass", "3-5"),
        ("requeue_exit", {"RequeueExit": "1,9"}, "warn", "max_requeues"),
        ("requeue_exit", {"RequeueExitHold": "0-2"}, "fail", "trains again"),
        ("prolog_flags", {"PrologFlags": "Alloc,Contain"}, "pass", "Alloc,Contain"),
        ("prolog_flags", {"PrologFlags": "Alloc,Serial"}, "warn", "without Serial"),
        ("prolog_flags", {"PrologFlags": "Alloc,NoHold"}, "warn", "health"),
        ("inactive_limit", {"InactiveLimit": "120 sec"}, "pass", "no job with launch: allocation"),
        ("inactive_limit", {"InactiveLimit": ""}, "warn", "scontrol show config | grep InactiveLimit"),
        ("private_data", {"PrivateData": "reservations,jobs"}, "warn", "maintenance windows"),
        ("private_data", {"PrivateData": "nodes"}, "fail", "never leaves them"),
        ("private_data", {"PrivateData": "jobs,usage"}, "pass", "jobs,usage"),
        ("resizing", {"AccountingStorageType": ""}, "warn", "slurmdbd"),
        ("resizing", {"AccountingStorageType": "", "SLURM_VERSION": "25.11.2"}, "pass", "25.11.2"),
        ("process_tracking", {"ProctrackType": "proctrack/pgid"}, "warn", "proctrack/cgroup"),
    ],
)
def test_one_setting(check: str, changes: dict[str, str], verdict: str, words: str) -> None:
    finding: Finding = getattr(settings, check)(config("healthy", **changes))
    assert finding.verdict == verdict and words in " ".join((finding.found, finding.meaning, finding.mend))
    assert bool(finding.mend) == (verdict != "pass")


@pytest.mark.parametrize(
    ("ping", "verdict"),
    [
        ((RECORDED / "doctor_ping_healthy.txt").read_text(), "pass"),
        ("Slurmctld(primary) at c1 is UP\nSlurmctld(backup) at c2 is DOWN\n", "warn"),
        ("Slurmctld(primary) at c1 is DOWN\n", "fail"),
        ("", "fail"),
    ],
)
def test_the_controller(ping: str, verdict: str) -> None:
    assert versions.controller(ping).verdict == verdict


def test_pyslurm() -> None:
    assert versions.pyslurm(is_installed=False, problem=None).verdict == "pass"
    assert versions.pyslurm(is_installed=True, problem=None).verdict == "pass"
    finding = versions.pyslurm(is_installed=True, problem="pyslurm is of 25.11, slurmctld of 22.05")
    assert finding.verdict == "warn" and "25.11" in finding.found


@pytest.mark.parametrize(
    ("client", "server", "nodes", "verdict"),
    [
        ("22.05.8", "22.05.8", {"n1": "22.05.8", "n2": ""}, "pass"),
        ("22.05.9", "22.05.8", {"n1": "22.05.2"}, "pass"),
        ("22.05.8", "23.02.1", {"n1": "23.02.1"}, "warn"),
        ("23.02.1", "23.02.1", {"n1": "22.05.8", "n2": "23.02.1"}, "warn"),
        ("22.05.8", "22.05.8", {"n1": "22.05.8", "n2": "23.02.1"}, "fail"),
    ],
)
def test_releases(client: str, server: str, nodes: dict[str, str], verdict: str) -> None:
    assert versions.versions(client, server, nodes).verdict == verdict
