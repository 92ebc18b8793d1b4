"""Job 7 of this user, as its files and a program in the place of scontrol tell of it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tm_slurm.cli.app import main
from tm_slurm.submit.registry import register

RECORD = "JobId=7 JobName=x UserId=u(1) GroupId=g(1) JobState={} Reason={} TimeLimit=UNLIMITED"
VERDICT = {"state": "completed", "exit_code": 0, "reason": "trained to step 50"}

NOTICE = "a disk " + "x" * 30 + " is to be replaced soon"


def node(name: str, standing: str, ranks: list[int], notice: str | None = None) -> dict[str, Any]:
    return {
        "node": name,
        "standing": standing,
        "batch_host": name == "n1",
        "ranks": ranks,
        "warm": standing == "standby",
        "notice": None if notice is None else {"kind": "drain", "reason": notice},
        "kept_because": None,
        "waiting": False,
    }


def status_of(age_s: float = 0.0, **changes: Any) -> dict[str, Any]:
    """What a coordinator wrote `age_s` ago; `at` is counted from the moment of writing."""
    return {
        "job_id": 7,
        "phase": "training",
        "at": -age_s,
        "leader": "n1",
        "term": 1,
        "epoch": 0,
        "step": 12,
        "loss": 0.000012345,
        "steady_step_s": 0.1,
        "nodes": [node("n1", "active", [0, 1], NOTICE), node("n2", "standby", [])],
        "ranks": [{"rank": 0, "step": 12}, {"rank": 1, "step": 10}],
        "move": None,
        "moves_done": 0,
        "last_interruption": None,
    } | changes


class Job:
    """Job 7, as far as it has come."""

    def __init__(self, root: Path) -> None:
        self.bin = root / "bin"
        self.bin.mkdir()
        self.dir = root / "jobs" / "7"
        self.dir.mkdir(parents=True)
        (self.dir / "config.yaml").touch()
        (self.dir / "secret").write_bytes(b"x" * 32)
        (self.dir / "secret").chmod(0o600)
        register(7, self.dir)
        self.slurm("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")

    def slurm(self, body: str) -> None:
        (self.bin / "scontrol").write_text(f"#!/bin/sh\ntouch '{self.bin}/asked'\n{body}\n")
        (self.bin / "scontrol").chmod(0o755)

    def write(self, name: str, content: dict[str, Any]) -> None:
        if "at" in content:
            content = {**content, "at": time.time() + content["at"]}
        (self.dir / name).write_text(json.dumps(content))

    def run(self, *words: str) -> Result:
        return CliRunner().invoke(main, list(words))


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "slurm.conf").write_text("ClusterName=here\n")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    return Job(tmp_path)
