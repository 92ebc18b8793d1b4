"""`tm-slurm` as a whole: no torch, quick, an example in every help, JSON where it reads, quiet in a pipe.

Times are of the processor, not of the clock, so that a busy machine changes nothing."""

from __future__ import annotations

import json
import os
import pty
import re
import resource
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from job_on_disk import Job, status_of

from tm_slurm.cli.app import LazyGroup, main

COMMANDS = sorted(LazyGroup.COMMANDS)
READING = ["doctor", "events", "install", "plan", "standbys", "status"]
README = (Path(__file__).parents[2] / "README.md").read_text()
TM_SLURM = str(Path(sys.executable).with_name("tm-slurm"))


def command(name: str) -> click.Command:
    assert isinstance(main, click.Group)
    found = main.get_command(click.Context(main), name)
    assert found is not None
    return found


def test_no_command_imports_torch_or_numpy() -> None:
    code = (
        "import click, sys; from tm_slurm.cli.app import main; context = click.Context(main); "
        "[main.get_command(context, name) for name in main.list_commands(context)]; print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert not {"torch", "numpy", "matplotlib", "submitit"} & set(done.stdout.split())


@pytest.mark.parametrize(
    ("words", "limit_s"),
    [
        (["--help"], 0.2),
        *(([name, "--help"], 0.2) for name in COMMANDS),
        (["status", "7"], 0.3),
        (["status"], 0.3),
        (["standbys", "7"], 0.3),
        (["events", "7"], 0.3),
    ],
    ids=str,
)
def test_it_answers_at_once(job: Job, words: list[str], limit_s: float) -> None:
    (job.dir / "config.yaml").write_text("job: {name: small}\ntrain: {module: this}\n")
    job.write("status.json", status_of())
    taken = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([TM_SLURM, *words], capture_output=True, text=True, timeout=60, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0, done.stderr
        taken.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
        if taken[-1] <= limit_s:
            return
    raise AssertionError(f"expected {limit_s} s of processor time at most, found {taken}")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example_and_keeps_to_80_columns(name: str) -> None:
    shown = CliRunner().invoke(main, [name, "--help"], terminal_width=80)
    assert shown.exit_code == 0 and max(map(len, shown.output.splitlines())) <= 80, shown.output
    examples = [
        line for line in shown.output.splitlines() if f"tm-slurm {name}" in line and "Usage" not in line
    ]
    assert examples, shown.output


@pytest.mark.parametrize("name", READING)
def test_what_reads_has_json(name: str) -> None:
    assert any("--json" in parameter.opts for parameter in command(name).params)


def test_what_install_shows_is_there_for_programs_as_well() -> None:
    shown = CliRunner().invoke(main, ["install", "--print"]).output
    told = json.loads(CliRunner().invoke(main, ["install", "--print", "--json"]).output)
    assert set(told) == {"prefix", "slurm.conf", "plugstack.conf", "triggers", "sudoers"}
    assert all(line in shown for lines in told.values() if isinstance(lines, list) for line in lines)


def test_exit_codes_are_documented() -> None:
    shown = " ".join(CliRunner().invoke(main, ["--help"]).output.split())
    for text in (shown, " ".join(README.split())):
        assert "xit codes: 0 ok, 1 failed, 2 your mistake" in text and "3 not found, 4 not permitted" in text
    missing = [name for name in COMMANDS if not re.search(rf"tm-slurm {name}|\b{name}`? takes", README)]
    assert not missing, f"the README does not name {missing}"


@pytest.mark.parametrize("words", ["status 7", "standbys 7", "events 7", "plan --gpus=64", "--help"])
def test_a_reader_that_closes_the_pipe_is_no_error(job: Job, words: str) -> None:
    job.write("status.json", status_of())
    (job.dir / "timeline.jsonl").write_text('{"at": 1.0, "what": "x"}\n' * 5000)
    line = f"set -o pipefail; {TM_SLURM} {words} | true"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in (0, 141) and done.stderr == ""


@pytest.mark.parametrize("words", ["status 7", "standbys 7", "plan --gpus=64"])
def test_colors_are_for_terminals_that_want_them(job: Job, words: str) -> None:
    job.write("status.json", status_of())
    assert "\x1b" in on_a_terminal(words)
    assert "\x1b" not in on_a_terminal(words, NO_COLOR="1")
    assert "\x1b" not in job.run(*words.split()).output


def on_a_terminal(words: str, **environment: str) -> str:
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen(
            [TM_SLURM, *words.split()],
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm", **environment},
        )
        os.close(theirs)
        shown = b""
        try:
            while chunk := os.read(ours, 65536):
                shown += chunk
        except OSError:  # how a terminal says that nobody writes to it any more
            pass
        assert process.wait(60) == 0, shown
        return shown.decode()
    finally:
        os.close(ours)
