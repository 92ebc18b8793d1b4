"""`tm-slurm submit` finds out before submitting, says so in one line, and submits nothing."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from login_node import GOLDEN, Login

from tm_slurm.config import load
from tm_slurm.slurm import configuration
from tm_slurm.submit.submission import AgentTask


def test_a_job_is_submitted(login: Login) -> None:
    result = login.submit("--json", "--set", "train.steps=9", "--nodes", "3", "--job-name", "other")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["job_id"] == 7 and answer["job_dir"] == str(login.root / "tm-slurm-jobs" / "7")
    written = load(Path(answer["job_dir"]) / "config.yaml")
    assert (written.job.nodes, written.train.steps, written.job.name) == (3, 9, "other")
    assert written.train.script == str(login.root / "train.py")
    assert "#SBATCH --nodes=5\n" in (login.root / "script").read_text()
    log = Path(answer["job_dir"]) / "logs" / "job.log"
    assert os.readlink(log) == answer["log"]


def test_options_are_called_as_those_of_the_plugin(login: Login) -> None:
    typed = ["--tm-standbys=1", "--tm-policy=wait,fail", "--tm-lead=5", "--tm-off", "--json"]
    result = login.submit(*typed)
    assert result.exit_code == 0, result.output
    written = load(Path(json.loads(result.stdout)["job_dir"]) / "config.yaml")
    assert written.job.standbys == 1 and written.policy.on_no_standby == ["wait", "fail"]
    assert written.policy.window_lead_s == 300.0 and not written.policy.signed_events
    assert " --unheard) ||" in (login.root / "script").read_text(), "the plugin is told nothing of the job"


def test_what_is_said_to_people(login: Login) -> None:
    assert login.submit().stdout == (
        f"job 7: 4 nodes and 2 standbys\ndirectory {login.root / 'tm-slurm-jobs' / '7'}\ntm-slurm status 7\n"
    )


def test_a_dry_run_asks_nobody_and_leaves_nothing(login: Login) -> None:
    for name in ("scontrol", "sbatch"):
        login.program(name, "exit 1")
    before = sorted(login.root.rglob("*"))
    result = login.submit("--dry-run")
    assert result.exit_code == 0 and result.stdout.startswith("#!/bin/bash\n")
    assert result.stdout.endswith("\n")
    assert sorted(login.root.rglob("*")) == before


def test_a_submission_from_inside_another_job_inherits_nothing_of_it(
    login: Login, monkeypatch: pytest.MonkeyPatch
) -> None:
    outer = {
        "SLURM_JOB_ID": "3",
        "SLURM_CPU_BIND": "quiet,mask_cpu:0x1",
        "SLURM_TRES_PER_TASK": "cpu:3",
        "SLURM_ARRAY_JOB_ID": "2",
        "SLURM_RESTART_COUNT": "1",
        "SUBMITIT_EXECUTOR": "slurm",
        "TM_SLURM_JOB_DIR": "/outer",
    }
    for name, value in outer.items():
        monkeypatch.setenv(name, value)
    (login.root / "slurm.conf").write_text("ClusterName=physics\n")
    monkeypatch.setenv("SLURM_CONF", str(login.root / "slurm.conf"))
    monkeypatch.setenv("SBATCH_ACCOUNT", "physics")
    assert login.submit().exit_code == 0
    seen = dict(line.partition("=")[::2] for line in (login.root / "environment").read_text().splitlines())
    assert not outer.keys() & seen.keys()
    assert seen["SLURM_CONF"] == str(login.root / "slurm.conf") and seen["SBATCH_ACCOUNT"] == "physics"


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("", ["--nodes", "0"], "--nodes: expected at least 1, found 0"),
        ("", ["--standbys", "-1"], "--standbys: expected at least 0, found -1"),
        ("", ["--nodes", "3", "--set", "job.nodes=0"], "--set job.nodes: expected at least 1, found 0"),
        (
            "",
            ["--set", "train.module=json"],
            "--set train.module: job.yaml:2 has train.script, too: add --set train.script=null",
        ),
        (
            "",
            ["--set", "train.stepz=1"],
            "--set train.stepz: unknown key train.stepz; did you mean train.steps?",
        ),
        ("", ["--set", "nonsense"], "--set nonsense: expected KEY=VALUE, such as train.steps=50"),
        ("train: {module: json.no}", [], "train.module: no module json.no in"),
        ("", ["--set", "job.directory=train.py/x"], "job.directory: {root}/train.py is not a directory"),
        ("", ["--set", "job.partition=gpu"], "job.partition: no partition 'gpu'; there are batch"),
        (
            "",
            ["--set", "job.exclude=n[5-6]"],
            "job.nodes 4 and job.standbys 2 need 6 nodes, partition batch has 4 for a job",
        ),
        (
            "",
            ["--tm-policy", "wait,pray"],
            "--policy: expected some of wait, double-up, shrink, requeue, fail, found 'pray'",
        ),
        (
            "",
            ["--set", "job.batch_feature=svc", "--launch", "allocation"],
            "--set job.batch_feature: expected none with launch: allocation, where there is no batch script",
        ),
        ("", ["--set", "job.exclude=n[5-"], "job.exclude: host list 'n[5-': a '[' is never closed"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(
    login: Login, text: str, arguments: list[str], message: str
) -> None:
    if text:
        login.write(text)
    result = login.submit(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(f"Error: {message.format(root=login.root)}")
    assert result.stderr.count("\n") == 1 and not login.submitted
    assert not (login.root / "tm-slurm-jobs").exists()


def test_longer_than_the_partition_allows(login: Login) -> None:
    recorded = (
        (GOLDEN / "scontrol_partitions.txt").read_text().replace("MaxTime=UNLIMITED", "MaxTime=01:00:00")
    )
    (login.root / "partitions").write_text(recorded)
    login.program("scontrol", f"cat '{login.root}/partitions'")
    result = login.submit("--set", "job.time_limit=1-0")
    assert result.exit_code == 2
    assert result.stderr.startswith(
        "Error: job.time_limit: 1440 minutes, partition batch allows 60: ask for less"
    )


def test_a_cluster_without_a_default_partition(login: Login) -> None:
    recorded = (GOLDEN / "scontrol_partitions.txt").read_text().replace("Default=YES", "Default=NO")
    (login.root / "partitions").write_text(recorded)
    login.program("scontrol", f"cat '{login.root}/partitions'")
    result = login.submit()
    assert result.exit_code == 2
    assert result.stderr == "Error: job.partition: the cluster has no default; choose one of batch\n"


@pytest.mark.parametrize(
    ("words", "code", "key"),
    [
        ("Invalid account or account/partition combination specified", 2, "job.account: "),
        ("Invalid qos specification", 2, "job.qos: "),
        ("Invalid feature specification", 2, "job.constraint: "),
        ("Invalid node name specified", 2, "job.exclude: "),
        ("Invalid generic resource (gres) specification", 2, "job.gpus_per_rank: "),
        ("Requested time limit is invalid (missing or exceeds some limit)", 2, "job.time_limit: "),
        ("Memory specification can not be satisfied", 2, "job.memory: "),
        ("Requested node configuration is not available", 2, "job: "),
        ("I/O error writing script/environment to file", 1, ""),
    ],
)
def test_sbatch_that_says_no_is_quoted(login: Login, words: str, code: int, key: str) -> None:
    login.program("sbatch", f"echo 'sbatch: error: Batch job submission failed: {words}' >&2; exit 1")
    result = login.submit()
    assert result.exit_code == code
    assert result.stderr == f"Error: {key}sbatch: error: Batch job submission failed: {words}\n"
    assert not (login.root / "tm-slurm-jobs" / "7").exists()


def test_a_feature_of_the_batch_host_that_there_is_not(login: Login) -> None:
    for why in (
        "Invalid feature specification",
        "Job --batch option is invalid or not a subset of --constraints",
    ):
        words = f"sbatch: error: Batch job submission failed: {why}"
        login.program("sbatch", f"echo '{words}' >&2; exit 1")
        result = login.submit("--set", "job.batch_feature=svc")
        assert (result.exit_code, result.stderr) == (2, f"Error: job.batch_feature: {words}\n")


def test_more_cpus_than_any_node_has(login: Login) -> None:
    recorded = GOLDEN / "scontrol_nodes_resumed.txt"
    login.program(
        "scontrol",
        f"case \"$*\" in *node*) cat '{recorded}';; *) cat '{GOLDEN}/scontrol_partitions.txt';; esac",
    )
    assert login.submit("--set", "job.cpus_per_rank=4").exit_code == 0
    (login.root / "script").unlink()
    result = login.submit("--set", "job.ranks_per_node=5")
    assert result.exit_code == 2 and not login.submitted
    assert result.stderr == (
        "Error: job.ranks_per_node 5 and job.cpus_per_rank 1 need 5 CPUs a node, "
        "the largest node of partition batch has 4\n"
    )


def test_a_configuration_of_slurm_that_is_gone_is_told_at_once(
    login: Login, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", str(login.root / "gone.conf"))
    for program in ("scontrol", "sbatch"):
        login.program(program, "sleep 60")
    result = login.submit()
    assert result.exit_code == 2 and not login.submitted
    assert result.stderr == f"Error: SLURM_CONF: no such file: {login.root}/gone.conf; is the cluster down?\n"


def test_a_shell_without_a_cluster_is_told_how_to_get_one(
    login: Login, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_CONF", raising=False)
    monkeypatch.setattr(configuration, "_PLACES", ())
    login.program(
        "scontrol", "echo 'scontrol: fatal: Could not establish a configuration source' >&2; exit 1"
    )
    result = login.submit()
    assert result.exit_code == 2 and not login.submitted
    assert result.stderr == (
        "Error: no Slurm configuration here: export SLURM_CONF=/path/to/slurm.conf, or "
        "`tm-slurm cluster run -- tm-slurm submit job.yaml`\n"
    )


def test_a_job_whose_directory_cannot_be_made_is_withdrawn(login: Login) -> None:
    (login.root / "tm-slurm-jobs" / "7").mkdir(parents=True)
    (login.root / "tm-slurm-jobs" / "7" / "thesis.tex").touch()
    login.program("scancel", f"echo \"$@\" > '{login.root}/cancelled'")
    result = login.submit()
    assert result.exit_code == 2 and result.stderr.endswith("; job 7 was cancelled\n")
    assert (login.root / "cancelled").read_text() == "7\n"


def test_a_controller_that_does_not_answer_is_said(login: Login) -> None:
    login.program("scontrol", "echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1")
    result = login.submit()
    assert result.exit_code == 1 and "Unable to contact slurm controller" in result.stderr
    assert not login.submitted


def test_looking_for_a_module_imports_none(login: Login) -> None:
    package = login.root / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')\n")
    (package / "train.py").write_text("raise SystemExit('imported')\n")
    login.write("job: {nodes: 1}\ntrain: {module: mine.train}\n")
    assert login.submit().exit_code == 0
    assert "mine" not in sys.modules


def test_a_package_that_is_installed_from_its_checkout_is_found_from_anywhere(login: Login) -> None:
    login.write("job: {nodes: 1}\ntrain: {module: tm_slurm.examples.char_gpt, steps: 1}\n")
    program = Path(sys.executable).with_name("tm-slurm")
    command = [str(program), "submit", "job.yaml", "--dry-run"]
    done = subprocess.run(command, cwd=login.root, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and done.stdout.startswith("#!/bin/bash"), done.stderr


def test_what_submissions_left_that_failed_long_ago_is_swept_up(login: Login) -> None:
    assert login.submit().exit_code == 0
    (folder,) = (login.root / "tm-slurm-jobs").glob(".submitit-*")
    orphan, young = folder / f"{'a' * 32}.pkl", folder / f"{'b' * 32}.pkl"
    for path in (orphan, young):
        path.touch()
    os.utime(orphan, (1, 1))
    kept = {path.name for path in folder.iterdir()} - {orphan.name}
    login.program("sbatch", "exit 1")
    assert login.submit().exit_code == 1
    left = {path.name for path in folder.iterdir()}
    assert orphan.name not in left and kept <= left


def test_a_requeued_task_is_the_same_task() -> None:
    task = AgentTask("train: {module: t}\n", "a")
    again = task.checkpoint()
    assert again.function is task
    copy = pickle.loads(pickle.dumps(task))
    assert (copy.config_text, copy.submission) == ("train: {module: t}\n", "a")


@pytest.mark.parametrize(
    ("parallel", "said"),
    [("{tp: 4}", "tp 4 * pp 1 is 4"), ("{tp: 3}", "the 4 heads"), ("{shards: 2}", "did you mean shard?")],
)
def test_an_example_whose_options_cannot_be_is_refused(login: Login, parallel: str, said: str) -> None:
    login.write(
        "job: {nodes: 2}\n"
        f"train: {{module: tm_slurm.examples.char_gpt, steps: 1, options: {{parallel: {parallel}}}}}\n"
    )
    result = login.submit()
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: train.options.parallel") and said in result.stderr
    assert result.stderr.count("\n") == 1 and not login.submitted
