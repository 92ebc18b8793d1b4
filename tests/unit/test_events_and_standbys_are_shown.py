"""`tm-slurm events` and `tm-slurm standbys`: what is in a job's files, for people and for programs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from job_on_disk import VERDICT, Job, node, status_of

ENTRIES = [
    {"at": 1795986585.25, "what": "event_drain", "node": "n3", "source": "poll", "reason": "disk is full"},
    {"at": 1795986586.5, "what": "prepare", "epoch": 1, "pairs": [["n3", "n6"]]},
    {"at": 1795986588.0, "what": "moved", "epoch": 1, "step": 40, "seconds": 0.123456},
]


def write(job: Job, *entries: dict[str, object]) -> None:
    with (job.dir / "timeline.jsonl").open("a") as file:
        file.writelines(json.dumps(entry) + "\n" for entry in entries)


def test_a_line_an_event(job: Job) -> None:
    write(job, *ENTRIES)
    shown = job.run("events", "7", "--long").output.splitlines()
    assert shown == [
        '2026-11-29 21:09:45  event_drain       node=n3 source=poll reason="disk is full"',
        '2026-11-29 21:09:46  prepare           epoch=1 pairs=[["n3","n6"]]',
        "2026-11-29 21:09:48  moved             epoch=1 step=40 seconds=0.1235",
    ]
    assert [json.loads(line) for line in job.run("events", "7", "--json").output.splitlines()] == ENTRIES
    assert job.run("events", "7", "--last=1", "--kind=moved", "-l").output.splitlines() == shown[2:]
    assert job.run("events", "7", "--last=2", "-l").output.splitlines() == shown[1:]


def test_in_words_as_the_guide_has_them(job: Job) -> None:
    pairs = [{"leaver": "n3", "joiner": "n6", "ranks": [2]}]
    span = {"at": 1795986588.0, "what": "span", "name": "switch"}
    write(job, ENTRIES[0], {**ENTRIES[1], "pairs": pairs}, span)
    shown = [line.partition("  ")[2] for line in job.run("events", "7").output.splitlines()]
    assert shown == ["n3: drain: disk is full (from poll)", "preparing n3 → n6, training goes on"]


def test_a_torn_or_strange_line_does_no_harm(job: Job) -> None:
    write(job, {"at": None, "what": "odd"}, {"what": "long", "why": "x" * 500})
    with (job.dir / "timeline.jsonl").open("a") as file:
        file.write('no json\n{"at": 1.0, "what": "torn"')
    assert job.run("events", "7").exit_code == 0
    shown = job.run("events", "7", "--long")
    assert shown.exit_code == 0 and len(shown.output.splitlines()) == 2
    assert max(map(len, shown.output.splitlines())) == 160


def test_what_there_is_none_of(job: Job) -> None:
    shown = job.run("events", "7")
    assert shown.exit_code == 0 and shown.stdout == ""
    write(job, *ENTRIES)
    asked = job.run("events", "7", "--kind=mved")
    assert asked.exit_code == 2 and "it has event_drain, moved, prepare" in asked.stderr


def test_following_ends_with_the_job(job: Job) -> None:
    write(job, ENTRIES[0])
    words = [sys.executable, "-m", "tm_slurm", "events", str(job.dir), "--follow", "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        try:
            assert json.loads(following.stdout.readline()) == ENTRIES[0]
            write(job, ENTRIES[1])
            assert json.loads(following.stdout.readline()) == ENTRIES[1]
            write(job, ENTRIES[2])
            job.write("verdict.json", VERDICT)
            assert [json.loads(line) for line in following.stdout] == ENTRIES[2:]
            assert following.wait(20.0) == 0
        finally:
            following.kill()
    assert job.run("events", "7", "--follow").exit_code == 0, "of a job that has ended nothing comes"


def test_standbys_by_how_soon_they_can_take_over(job: Job) -> None:
    cold = {**node("n3", "standby", []), "warm": False}
    waiting = {**node("n4", "active", [2], "disk"), "waiting": True}
    job.write(
        "status.json", status_of(nodes=[node("n1", "active", [0]), node("n2", "standby", []), cold, waiting])
    )
    shown = job.run("standbys", "7").output
    assert "n2    yes   no" in shown and "n3    no    no" in shown and "n1" not in shown
    assert "2 free, 1 of them warm\nwaiting for one: n4\n" in shown
    told = json.loads(job.run("standbys", "7", "--json").output)
    assert [one["node"] for one in told["standbys"]] == ["n2", "n3"]
    assert (told["free"], told["waiting_for_one"]) == (2, ["n4"])


@pytest.mark.parametrize("ended", [False, True])
def test_standbys_of_a_job_without_any(job: Job, ended: bool) -> None:
    job.write("status.json", status_of() if ended else status_of(nodes=[node("n1", "active", [0])]))
    if ended:
        job.write("verdict.json", VERDICT)
    assert job.run("standbys", "7").output == "0 free, 0 of them warm\n"


def test_a_job_that_has_not_started_has_none_yet(job: Job) -> None:
    asked = job.run("standbys", "7")
    assert asked.exit_code == 3 and "has not started yet" in asked.stderr
