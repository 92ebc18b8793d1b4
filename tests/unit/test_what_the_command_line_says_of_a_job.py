"""`tm-slurm status` and `tm-slurm migrate`, from the files of a job and programs in the place of Slurm's."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
from job_on_disk import RECORD, VERDICT, Job, node, status_of

from tm_slurm.cli.migrate import _must_wait


@pytest.mark.parametrize(
    ("files", "slurm", "first_line", "migration"),
    [
        ({}, "PENDING Resources", "job 7  pending: Resources", "is pending (Resources)"),
        (
            {},
            "PENDING Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved_for_jobs_in_higher_partitions",
            "job 7  pending: Nodes required for job are DOWN, DRAINED or reserved for jobs in higher"
            " partitions: sinfo -R says which",
            "is pending (Nodes required for job are DOWN, DRAINED or",
        ),
        (
            {},
            "CANCELLED None",
            "job 7  ended before it started: Slurm calls it CANCELLED",
            "has ended: Slurm",
        ),
        ({}, "", "job 7  ended before it started: Slurm no longer knows it", "has ended: Slurm no longer"),
        ({}, "RUNNING None", "job 7  starting: no coordinator yet, Slurm calls it RUNNING", "no coordinator"),
        (
            {"status.json": status_of(60)},
            "NODE_FAIL None",
            "job 7  gone: ended without a verdict, Slurm calls it NODE_FAIL; see",
            "has ended: Slurm calls it NODE_FAIL",
        ),
        (
            {"status.json": status_of(60)},
            "",
            "job 7  gone: ended without a verdict, Slurm no",
            "has ended: Slurm",
        ),
        (
            {"status.json": status_of(60)},
            "RUNNING None",
            "job 7  training, 6",
            "no coordinator",
        ),
        (
            {"status.json": status_of(60), "verdict.json": VERDICT},
            "",
            "job 7  completed: trained to step 50",
            "job 7 has ended: completed",
        ),
        (
            {"status.json": status_of(60), "verdict.json": {**VERDICT, "state": "requeue"}},
            "PENDING BeginTime",
            "job 7  pending: BeginTime",
            "is pending (BeginTime)",
        ),
    ],
)
def test_how_a_job_stands(
    job: Job, files: dict[str, dict[str, Any]], slurm: str, first_line: str, migration: str
) -> None:
    for name, content in files.items():
        job.write(name, content)
    if slurm:
        job.slurm(f"echo '{RECORD.format(*slurm.split())}'")
    for word in ("7", str(job.dir)):
        shown = job.run("status", word)
        assert shown.exit_code == 0 and shown.output.startswith(first_line), shown.output
    asked = job.run("migrate", "7", "--node", "n1")
    assert asked.exit_code == (1 if migration == "no coordinator" else 2)
    assert migration in asked.stderr and asked.stderr.count("\n") == 1


def test_watch_and_events_say_why_nothing_happens(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tm_slurm.cli.watch.SILENT_S", 0.0)
    monkeypatch.setattr("tm_slurm.cli.watch.LOOK_S", 0.01)
    asked = job.dir.parent / "asked"
    job.slurm(
        f"if [ -e {asked} ]; then echo '{RECORD.format('CANCELLED', 'None')}'; else touch {asked}; "
        f"echo '{RECORD.format('PENDING', 'Resources')}'; fi"
    )
    shown = job.run("watch", "7")
    assert re.fullmatch(r"\d\d:\d\d:\d\d  pending: Resources\n", shown.stdout), shown.stdout
    assert "job 7 ended before it started" in shown.stderr
    shown = job.run("events", "7")
    assert shown.exit_code == 0 and not shown.stdout
    assert shown.stderr == "nothing has happened yet: tm-slurm status 7 says how it stands\n"


def test_nobody_is_asked_while_the_status_is_fresh_or_the_job_is_known_to_have_ended(job: Job) -> None:
    job.write("status.json", status_of())
    assert job.run("status", "7").output.startswith("job 7  training\n")
    job.write("status.json", status_of(60))
    job.write("verdict.json", VERDICT)
    assert job.run("status", "7").exit_code == 0
    assert not (job.bin / "asked").exists()


def test_a_job_of_another_cluster_is_not_judged_by_this_one(job: Job) -> None:
    (job.dir.parents[1] / "slurm.conf").write_text("ClusterName=other\n")
    job.slurm(f"echo '{RECORD.format('FAILED', 'None')}'")
    job.write("status.json", status_of(60))
    assert job.run("status", str(job.dir)).output.startswith("job 7  training, 6")
    assert not (job.bin / "asked").exists()


def test_a_job_in_the_queue_without_a_directory_is_told(job: Job) -> None:
    job.slurm("echo '" + RECORD.format("PENDING", "Priority").replace("JobId=7", "JobId=9") + "'")
    shown = job.run("status", "9")
    assert shown.exit_code == 3 and shown.stderr.startswith("Error: job 9 is pending (Priority)")


@pytest.mark.parametrize("columns", [70, 80, 200])
def test_the_table_keeps_to_the_width_and_has_no_trailing_blanks(
    job: Job, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    job.write("status.json", status_of())
    lines = job.run("status", "7").output.splitlines()
    assert max(map(len, lines)) <= columns and lines == [line.rstrip() for line in lines]
    assert any(line.startswith("n1    active, batch host  0 1    12    drain: a disk") for line in lines)
    assert "loss 1.234e-05" in lines[1]
    assert "\x1b" not in "".join(lines)


def test_what_slurm_has_in_store_is_shown(job: Job) -> None:
    window = {"name": "fans", "nodes": ["n1", "n2"], "opens": 1795986585.0, "closes": 1795987185.0}
    job.write("status.json", status_of(windows=[window], stopping="maintenance: reservation fans"))
    shown = job.run("status", "7").output
    assert "reservation fans over n1,n2 from 2026-11-29 21:09:45 UTC\n" in shown
    assert "back into the queue: maintenance: reservation fans\n" in shown
    job.write("verdict.json", VERDICT)
    assert "reservation" not in job.run("status", "7").output


def test_the_nodes_of_an_ended_job_have_no_standing(job: Job) -> None:
    job.write("status.json", status_of())
    job.write("verdict.json", VERDICT)
    shown = job.run("status", "7").output
    assert "n2    -" in shown and "warm" not in shown and "coordinator" not in shown


@pytest.mark.parametrize(
    ("nodes", "move", "must_wait"),
    [
        ([node("n1", "active", [0]), node("n2", "standby", [])], None, False),
        ([node("n1", "active", [0]), node("n2", "standby", [], "disk")], None, True),
        ([node("n1", "active", [0]), node("n2", "active", [1])], None, True),
        ([node("n1", "active", [0])], {"pairs": [["n1", "n2"]]}, False),
        ([node("n1", "active", [0])], {"pairs": [["n3", "n2"]]}, True),
        ([node("n1", "leaving", [])], None, False),
    ],
)
def test_a_move_that_has_to_wait_is_told(
    nodes: list[dict[str, Any]], move: dict[str, Any] | None, must_wait: bool
) -> None:
    assert _must_wait("n1", {"nodes": nodes, "move": move}) is must_wait


def tm_slurm(words: str) -> subprocess.CompletedProcess[str]:
    command = f"set -o pipefail; {sys.executable} -m tm_slurm {words}"
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)


def test_a_reader_that_has_seen_enough_is_no_error(job: Job) -> None:
    job.write("status.json", status_of())
    done = tm_slurm("status 7 | true")
    assert done.returncode in (0, 141) and done.stderr == ""


@pytest.mark.parametrize("words", ["status 7", "--help"])
def test_output_that_cannot_be_written_is_one_line(job: Job, words: str) -> None:
    job.write("status.json", status_of())
    done = tm_slurm(f"{words} > /dev/full")
    assert (done.returncode, done.stderr) == (1, "Error: cannot write: No space left on device\n")
