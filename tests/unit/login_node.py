"""A login node for the tests of what submits: programs in the place of Slurm's, which say what real ones have
said."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tm_slurm.cli.submit import submit

GOLDEN = Path(__file__).with_name("golden")


class Login:
    """A login node: a directory with a script and a configuration, and programs in the place of Slurm's."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "bin").mkdir()
        (root / "train.py").touch()
        self.write("job: {nodes: 4, standbys: 2, time_limit: 30}\ntrain: {script: train.py}\n")
        self.program("scontrol", f"cat '{GOLDEN / 'scontrol_partitions.txt'}'")
        self.program(
            "sbatch", f"env > '{root}/environment'; cp \"$1\" '{root}/script'; echo Submitted batch job 7"
        )

    def write(self, text: str) -> None:
        (self.root / "job.yaml").write_text(text)

    def program(self, name: str, body: str) -> None:
        path = self.root / "bin" / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    def submit(self, *arguments: str) -> Result:
        return CliRunner().invoke(submit, ["job.yaml", *arguments])

    @property
    def submitted(self) -> bool:
        return (self.root / "script").exists()


@pytest.fixture
def login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Login:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("SLURM_CONF", raising=False)
    return Login(tmp_path)
