"""`tm-slurm doctor` with programs in the place of Slurm's, which print what real ones have printed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tm_slurm.cli.app import main

GOLDEN = Path(__file__).with_name("golden")

SCONTROL = """#!/bin/sh
case "$*" in
    ping) cat {golden}/doctor_ping_healthy.txt ;;
    "show config") cat {golden}/doctor_config_{name}.txt ;;
    --version) echo "slurm-wlm 22.05.8" ;;
    *partition) echo "PartitionName=batch Nodes=n[1-2] State=UP Default=YES" ;;
    *) for n in n1 n2; do echo "NodeName=$n NodeAddr=127.0.0.1 State=IDLE Version=22.05.8"; done ;;
esac
"""
SRUN = """#!/bin/sh
if [ "$1" = --help ]; then cat {golden}/doctor_srun_help_{name}.txt; exit; fi
echo "$*" >>{asked}
for word; do last=$word; done
SLURMD_NODENAME=n1 exec {python} -m tm_slurm.doctor.probe "$last"
"""


class Cluster:
    """Programs in a directory of their own."""

    def __init__(self, root: Path) -> None:
        self.bin = root / "bin"
        self.bin.mkdir()
        self.asked = root / "asked"
        self.jobs = root / "jobs"

    def is_as(self, name: str) -> None:
        words = {"golden": GOLDEN, "name": name, "asked": self.asked, "python": sys.executable}
        self.program("scontrol", SCONTROL.format(**words))
        self.program("srun", SRUN.format(**words))

    def program(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def doctor(self, *words: str) -> Result:
        return CliRunner().invoke(main, ["doctor", f"--directory={self.jobs}", *words])


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    found = Cluster(tmp_path)
    for name in ("SLURM_CONF", "SLURM_JOB_ID", "SLURM_JOBID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{found.bin}:/usr/bin:/bin")
    monkeypatch.setenv("COLUMNS", "80")
    found.is_as("healthy")
    return found


def verdicts(done: Result) -> dict[str, str]:
    return {check["check"]: check["verdict"] for check in json.loads(done.stdout)["checks"]}


def test_a_cluster_without_failures_is_exit_code_0(cluster: Cluster) -> None:
    done = cluster.doctor("--nodes=1", "--partition=batch", "--json")
    found = verdicts(done)
    assert done.exit_code == 0 and json.loads(done.stdout)["ok"], done.output
    assert {"slurmctld", "Slurm releases", "job directory", "locks", "ports", "clocks"} <= set(found)
    assert found["job directory"] == found["locks"] == found["ports"] == "pass"
    asked = cluster.asked.read_text()
    assert "--partition=batch" in asked and "--immediate=20" in asked and "--overlap" not in asked
    assert not list(cluster.jobs.parent.glob(".tm-slurm-doctor-*")), "nothing is left there"


def test_inside_a_job_its_own_nodes_are_asked(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    cluster.doctor("--nodes=1", "--json")
    assert "--overlap" in cluster.asked.read_text() and "--immediate" not in cluster.asked.read_text()


def test_a_failure_is_exit_code_1_and_says_what_mends_it(cluster: Cluster) -> None:
    cluster.is_as("mistakes")
    done = cluster.doctor("--nodes=0")
    assert done.exit_code == 1 and max(map(len, done.output.splitlines())) <= 80
    assert "fail  RequeueExit" in done.output and "→ slurm.conf: no RequeueExit of 0 or 1" in done.output
    assert done.output.splitlines()[-1].endswith(" fail") and "\x1b" not in done.output
    assert not cluster.asked.exists(), "--nodes 0 asks none"


def test_nodes_that_are_not_to_be_had_are_a_warning(cluster: Cluster) -> None:
    cluster.program("srun", "#!/bin/sh\necho 'srun: error: Unable to allocate resources: busy' >&2\nexit 1\n")
    done = cluster.doctor("--json")
    check = json.loads(done.stdout)["checks"][-1]
    assert done.exit_code == 0 and check["check"] == "nodes" and check["verdict"] == "warn"
    assert "Unable to allocate resources: busy" in check["found"] and "salloc --nodes=2" in check["mend"]


def test_nodes_on_which_nothing_runs_are_a_failure(cluster: Cluster) -> None:
    error = "slurmstepd: error: execve(): /nowhere/python: No such file or directory"
    program = (cluster.bin / "srun").read_text().partition("echo")[0]
    cluster.program("srun", f"{program}\necho '{error}' >&2\nexit 2\n")
    done = cluster.doctor("--json", "--python=/nowhere/python")
    check = json.loads(done.stdout)["checks"][-1]
    assert done.exit_code == 1 and (check["check"], check["verdict"]) == ("nodes", "fail")
    assert check["found"] == error and "have /nowhere/python" in check["mend"]


def test_a_controller_that_is_down_is_all_that_is_said(cluster: Cluster) -> None:
    error = "slurm_load_ctl_conf error: Unable to contact slurm controller (connect failure)"
    cluster.program("scontrol", f"#!/bin/sh\necho '{error}' >&2\nexit 1\n")
    done = cluster.doctor("--json")
    assert done.exit_code == 1 and verdicts(done) == {"slurmctld": "fail"} and error in done.stdout


def test_a_machine_without_slurm(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = cluster.doctor("--json")
    assert done.exit_code == 1 and verdicts(done) == {"Slurm": "fail"}
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "nowhere.conf"))
    done = cluster.doctor()
    assert done.exit_code == 2 and "SLURM_CONF: no such file" in done.output


def test_a_directory_that_cannot_be_written(cluster: Cluster) -> None:
    cluster.jobs = Path("/proc/jobs")
    done = cluster.doctor("--json")
    assert done.exit_code == 1 and verdicts(done)["job directory"] == "fail"
