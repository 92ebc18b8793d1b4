"""Every command in every guide is run by a test, or is on a list of those that cannot be, with the reason. A
command that is new in a guide fails here until it is."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from guide_commands import BY_TEST, GUIDES, HERE, NOT_RUN, ON_A_CLUSTER, PROGRAMS, ROOT, of_guide

TABLES = {"ON_A_CLUSTER": ON_A_CLUSTER, "HERE": HERE, "BY_TEST": BY_TEST, "NOT_RUN": NOT_RUN}
KNOWN = [command for table in TABLES.values() for command in table]
FOUND = {guide: of_guide((ROOT / guide).read_text()) for guide in GUIDES}


@pytest.mark.parametrize("guide", GUIDES)
def test_each_command_of_a_guide_is_known(guide: str) -> None:
    assert not [command for command in FOUND[guide] if command.split()[0] not in PROGRAMS]
    unknown = [command for command in FOUND[guide] if command not in KNOWN]
    assert not unknown, f"in no test, nor in NOT_RUN of guide_commands.py: {unknown}"


def test_no_guide_is_left_out() -> None:
    there = subprocess.run(
        ["git", "ls-files", "*README.md", "CONTRIBUTING.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(there.stdout.split()) == set(GUIDES)


def test_no_table_has_a_command_that_no_guide_has() -> None:
    found = {command for commands in FOUND.values() for command in commands}
    assert not [command for command in KNOWN if command not in found]
    assert len(KNOWN) == len(set(KNOWN))


@pytest.mark.parametrize("where", sorted(set(BY_TEST.values())))
def test_the_test_that_runs_a_command_is_there(where: str) -> None:
    file, _, name = where.partition("::")
    tree = ast.parse((ROOT / "tests" / file).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("command", HERE)
def test_what_needs_no_cluster_runs_as_it_stands(command: str, tmp_path: Path) -> None:
    """In a copy, so that what a command writes overwrites nothing; that it writes the same is for
    test_guides_are_up_to_date."""
    for part in ("configs", "tests", "tm_slurm"):
        hidden = shutil.ignore_patterns("__pycache__", ".*")
        shutil.copytree(ROOT / part, tmp_path / part, ignore=hidden)
    before = {path: path.read_text() for path in tmp_path.rglob("*README.md")}
    if command == "tm-slurm submit --dry-run":
        command += " configs/char_gpt.yaml"
    done = subprocess.run(
        ["bash", "-c", f"set -eu; {command}"],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout or command.startswith("eval") or ">" in command
    assert before == {path: path.read_text() for path in before}


def test_a_new_command_is_found() -> None:
    guide = "Type `tm-slurm status --json`:\n\n    tm-slurm flee --now   # at once\n    03:12:07  a log\n"
    assert of_guide(guide) == ["tm-slurm flee --now", "tm-slurm status --json"]
