"""The JOB of a command: an id, a name, a directory, or nothing where only one is running."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
from click.shell_completion import ShellComplete
from job_on_disk import RECORD, VERDICT, Job, status_of

from tm_slurm.cli.app import main
from tm_slurm.submit.registry import register


def another(job: Job, job_id: int, name: str, **files: Any) -> Path:
    """A further job of this user."""
    path = job.dir.with_name(str(job_id))
    path.mkdir()
    (path / "config.yaml").write_text(f"job: {{name: {name}}}\ntrain: {{module: this}}\n")
    register(job_id, path)
    first, job.dir = job.dir, path
    for file, content in files.items():
        job.write(f"{file}.json", content)
    job.dir = first
    return path


@pytest.fixture
def small(job: Job) -> Job:
    """Job 7 has the name `small`, and runs."""
    (job.dir / "config.yaml").write_text("job: {name: small}\ntrain: {module: this}\n")
    job.write("status.json", status_of())
    return job


@pytest.mark.parametrize("words", [["status"], ["status", "small"], ["status", "7"]])
def test_the_only_one_that_is_running(small: Job, words: list[str]) -> None:
    another(small, 5, "small", verdict=VERDICT)
    another(small, 9, "large", verdict=VERDICT)
    shown = small.run(*words)
    assert shown.exit_code == 0 and shown.output.startswith("job 7  training"), shown.output


def test_every_command_about_a_job_takes_them(small: Job) -> None:
    small.slurm(f"echo '{RECORD.format('RUNNING', 'None')}'")
    for command in ("status", "standbys", "events"):
        for word in ([], ["small"], ["7"], [str(small.dir)]):
            assert small.run(command, *word).exit_code == 0, (command, word)
    for command in ("migrate", "cancel-move"):
        for word in ([], ["small"], ["7"], [str(small.dir)]):
            asked = small.run(command, *word, "--node=n1")
            assert asked.exit_code == 1 and "no coordinator" in asked.stderr, (command, asked.output)


def test_of_several_that_run_the_ids_are_told(small: Job) -> None:
    another(small, 9, "small", status=status_of(job_id=9))
    for words in (["status"], ["status", "small"]):
        asked = small.run(*words)
        assert asked.exit_code == 2 and "give one of the ids 7, 9" in asked.stderr
    assert small.run("status", "9").exit_code == 0


def test_of_several_that_have_ended_the_name_means_the_last(small: Job) -> None:
    small.write("verdict.json", VERDICT)
    another(small, 10, "small", verdict=VERDICT, status=status_of(job_id=10))
    another(small, 9, "small", verdict=VERDICT, status=status_of(job_id=9))
    assert small.run("status", "small").output.startswith("job 10  completed")


def test_none_is_running(small: Job) -> None:
    small.write("verdict.json", VERDICT)
    asked = small.run("status")
    assert asked.exit_code == 3 and "no job of yours is running here" in asked.stderr
    asked = small.run("status", "smal")
    assert asked.exit_code == 3 and "no tm_slurm job smal: expected a job id, a job's name" in asked.stderr


def test_slurm_is_asked_where_the_files_do_not_tell(small: Job) -> None:
    small.write("status.json", status_of(60))
    small.slurm(f"echo '{RECORD.format('RUNNING', 'None')}'")
    assert small.run("status").exit_code == 0
    small.write("verdict.json", {**VERDICT, "state": "requeue"})
    small.slurm(f"echo '{RECORD.format('PENDING', 'BeginTime')}'")
    assert small.run("status").output.startswith("job 7  pending")
    small.slurm(f"echo '{RECORD.format('NODE_FAIL', 'None')}'")
    assert small.run("status").exit_code == 3


def test_another_cluster_s_jobs_are_none_of_this_one(small: Job) -> None:
    (small.dir.parents[1] / "slurm.conf").write_text("ClusterName=other\n")
    assert small.run("status").exit_code == 3 and small.run("status", "small").exit_code == 3


def test_a_shell_completes_ids_commands_and_options(small: Job) -> None:
    another(small, 71, "large")
    assert isinstance(main, click.Command)
    shell = ShellComplete(main, {}, "tm-slurm", "_TM_SLURM_COMPLETE")

    def completed(words: list[str], incomplete: str) -> list[str]:
        return [found.value for found in shell.get_completions(words, incomplete)]

    assert completed(["status"], "7") == ["71", "7"] and completed(["migrate"], "") == ["71", "7"]
    assert completed([], "st") == ["standbys", "status"] and "--follow" in completed(["events"], "--f")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_what_a_shell_is_given(small: Job, shell: str) -> None:
    given = small.run("completion", shell)
    assert given.exit_code == 0 and f"_TM_SLURM_COMPLETE={shell}_complete" in given.output
