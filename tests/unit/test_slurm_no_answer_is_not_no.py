"""A question that got no answer is told apart from the answer "no", and nothing waits for ever.

The programs asked here are small scripts that say what Slurm was recorded to say.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from tm_slurm.slurm import CommandLine, ResizeBlocked, SlurmRefused, SlurmUnavailable

GOLDEN = Path(__file__).with_name("golden")


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs, first in PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def program(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    "words",
    [
        "slurm_load_node error: Unable to contact slurm controller (connect failure)",
        "slurm_load_node error: Socket timed out on send/recv operation",
        "slurm_load_node error: Zero Bytes were transmitted or received",
        "scontrol: error: authentication: Protocol authentication error",
        "Unexpected message received for job 1",
        "Slurm backup controller in standby mode",
    ],
)
def test_an_unreachable_controller_is_no_answer(commands: Path, words: str) -> None:
    program(commands, "scontrol", f"echo '{words}' >&2; exit 1")
    with pytest.raises(SlurmUnavailable, match=re.escape(words.partition("(")[0].partition(":")[0])):
        CommandLine().nodes(["n1"])
    with pytest.raises(SlurmUnavailable):
        CommandLine().shrink(1, ["n1"])


def test_a_refusal_has_slurms_own_words(commands: Path) -> None:
    program(commands, "scontrol", "echo 'Access/permission denied for job 7' >&2; exit 1")
    with pytest.raises(SlurmRefused, match=r"^Access/permission denied for job 7$"):
        CommandLine().shrink(7, ["n1"])


def test_a_job_that_cannot_be_resized_again_is_told_apart(commands: Path) -> None:
    words = "Job update not available right now, the DB index is being set, try again in a bit for job 7"
    program(commands, "scontrol", f"echo '{words}' >&2; exit 1")
    with pytest.raises(ResizeBlocked, match="DB index"):
        CommandLine().shrink(7, ["n1"])


def test_a_command_that_hangs_is_given_up(commands: Path) -> None:
    program(commands, "scontrol", "exec sleep 60")
    began = time.monotonic()
    with pytest.raises(SlurmUnavailable, match=r"no answer within 0\.2 s"):
        CommandLine(timeout_s=0.2).nodes(["n1"])
    assert time.monotonic() - began < 5


def test_a_command_that_is_not_there_is_no_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmUnavailable, match="scontrol: cannot be run: No such file"):
        CommandLine().job(1)


def test_a_command_that_is_killed_is_no_answer(commands: Path) -> None:
    program(commands, "scontrol", "kill -9 $$")
    with pytest.raises(SlurmUnavailable):
        CommandLine().requeue(1)


def test_an_answer_of_no_known_form_is_no_answer(commands: Path) -> None:
    program(commands, "scontrol", "echo 'NodeName=n1 Arch=x86_64'")
    with pytest.raises(SlurmUnavailable, match="no State="):
        CommandLine().nodes(["n1"])
    program(commands, "scontrol", "echo all is well")
    with pytest.raises(SlurmUnavailable, match="expected a record"):
        CommandLine().job(1)


def test_nodes_that_slurm_does_not_know_are_left_out(commands: Path) -> None:
    recording = GOLDEN / "scontrol_nodes_leaving.txt"
    program(commands, "scontrol", f"cat '{recording}'; echo 'Node nope not found'; exit 1")
    assert set(CommandLine().nodes(["n1", "n2", "nope"])) == {"n1", "n2"}
    program(commands, "scontrol", "echo 'Node nope not found'; exit 1")
    with pytest.raises(SlurmRefused, match="nope not found"):
        CommandLine().nodes(["nope"])


def test_no_names_are_no_question(commands: Path) -> None:
    program(commands, "scontrol", "exit 1")
    assert CommandLine().nodes([]) == {}


def test_commands_run_in_plain_words_outside_of_any_job(
    commands: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Inside a job, `scontrol update NodeList=` writes slurm_job_*_resize.sh into the current directory."""
    seen = tmp_path / "seen"
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_CONF", "/etc/there.conf")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    monkeypatch.chdir(tmp_path)
    program(commands, "scontrol", f'{{ env; echo "ARGS=$*"; }} > "{seen}"; touch dropped')
    CommandLine().shrink(7, ["n1", "n3"])
    lines = seen.read_text().splitlines()
    assert "ARGS=update JobId=7 NodeList=n1,n3" in lines
    assert "LC_ALL=C" in lines and "SLURM_TIME_FORMAT=%s" in lines and "SLURM_CONF=/etc/there.conf" in lines
    assert not any(line.startswith("SLURM_JOB") for line in lines)
    assert not (tmp_path / "dropped").exists()


def test_keeping_no_node_is_refused_unasked(commands: Path, tmp_path: Path) -> None:
    program(commands, "scontrol", f"touch '{tmp_path}/asked'")
    with pytest.raises(SlurmRefused, match="cancel the job"):
        CommandLine().shrink(7, [])
    assert not (tmp_path / "asked").exists()


def test_a_comment_is_one_line(commands: Path, tmp_path: Path) -> None:
    program(commands, "scontrol", f"printf '%s|' \"$@\" > '{tmp_path}/seen'")
    CommandLine().set_comment(7, "n3 stays:\n the batch host")
    assert (tmp_path / "seen").read_text() == "update|JobId=7|Comment=n3 stays: the batch host|"


def test_the_release_is_read(commands: Path) -> None:
    program(commands, "scontrol", "echo 'slurm-wlm 22.05.8'")
    assert CommandLine().version() == "22.05.8"


def test_no_reservations_is_an_answer_and_nothing_is_none(commands: Path) -> None:
    program(commands, "scontrol", "echo No reservations in the system")
    assert CommandLine().reservations() == {}
    program(commands, "scontrol", f"cat '{GOLDEN / 'scontrol_reservations.txt'}'")
    assert "whole" in CommandLine().reservations()
    for body in ("true", "echo all is well", "echo 'ReservationName=x Nodes=n1'", "exit 1"):
        program(commands, "scontrol", body)
        with pytest.raises((SlurmUnavailable, SlurmRefused)):
            CommandLine().reservations()


@pytest.mark.parametrize(("ahead_s", "words"), [(90.0, "now+90seconds"), (-90.0, "now+3seconds")])
def test_a_begin_time_is_counted_from_now(
    commands: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: float, words: str
) -> None:
    """A time of day would be read in scontrol's time zone. And never at once: see REQUEUE_PAUSE_S."""
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    program(commands, "scontrol", f"printf '%s|' \"$@\" > '{tmp_path}/seen'")
    CommandLine().begin_not_before(7, 1000.0 + ahead_s)
    assert (tmp_path / "seen").read_text() == f"update|JobId=7|StartTime={words}|"
