"""Whatever becomes of pyslurm, the coordinator gets an answer: the command line's, if need be."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tm_slurm.slurm import CommandLine, NodeInfo, NodeState, PySlurm, SlurmRefused, SlurmUnavailable
from tm_slurm.slurm import pyslurm_client as client

MODULE = """
import os, time
from types import SimpleNamespace
class RPCError(Exception): pass
class Nodes:
    @staticmethod
    def load():
        {nodes}
class _Config:
    @staticmethod
    def load():
        return SimpleNamespace(version="26.05.5")
slurmctld = SimpleNamespace(Config=_Config)
"""
NODE = """return {"n1": SimpleNamespace(name="n1", state="IDLE+DRAIN", reason="two  words",
            reason_user="root", reason_time=5, address="10.0.0.1", hostname="n1",
            effective_cpus=4, total_cpus=4, boot_time=1, slurmd_start_time=2, partitions=["batch"],
            slurm_version="26.05.5")}"""
WELL = NodeInfo(name="n1", state=NodeState.parse("IDLE"))


@pytest.fixture(autouse=True)
def command_line(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the command line was asked; it says that n1 is idle."""
    asked: list[str] = []

    def nodes(_: CommandLine, names: list[str]) -> dict[str, NodeInfo]:
        asked.extend(names)
        return {"n1": WELL}

    monkeypatch.setattr(CommandLine, "nodes", nodes)
    return asked


def pretend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: str, release: str = "26.05") -> None:
    """A pyslurm that behaves like that when it is asked for nodes, and a libslurm of this release."""
    (tmp_path / "pyslurm.py").write_text(MODULE.replace("{nodes}", nodes))
    worker = tmp_path / "worker.py"
    worker.write_text(
        "from tm_slurm.slurm import pyslurm_worker as worker\n"
        f"worker.library_release = lambda: {release!r}\nworker.main()\n"
    )
    monkeypatch.setattr(client, "WORKER", "worker")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{':'.join(p for p in sys.path if p)}")


def test_it_is_asked_where_it_is_of_the_controllers_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command_line: list[str]
) -> None:
    pretend(tmp_path, monkeypatch, NODE)
    slurm = PySlurm()
    for _ in range(2):
        info = slurm.nodes(["n1", "n7"])["n1"]
        assert (str(info.state), info.reason, info.partitions) == ("IDLE+DRAIN", "two words", ("batch",))
    with pytest.raises(SlurmRefused, match="n7"):
        slurm.nodes(["n7"])
    assert not command_line
    slurm.close()


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        ("os.abort()", "ended with -6"),
        ("raise SystemExit('fatal: no configuration')", "fatal: no configuration"),
        ("time.sleep(60)", "no answer within 1 s"),
        ("raise AttributeError('other structures')", "other structures"),
    ],
)
def test_a_crash_is_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command_line: list[str], nodes: str, why: str
) -> None:
    pretend(tmp_path, monkeypatch, nodes)
    strict = PySlurm(timeout_s=1.0, strict=True)
    with pytest.raises(SlurmUnavailable, match=why):
        strict.nodes(["n1"])
    assert not command_line
    slurm = PySlurm(timeout_s=1.0)
    assert slurm.nodes(["n1"]) == {"n1": WELL}
    assert command_line == ["n1"]


def test_after_some_failures_it_is_left_alone_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command_line: list[str]
) -> None:
    pretend(
        tmp_path, monkeypatch, f"os.open({str(tmp_path)!r} + '/' + str(os.getpid()), os.O_CREAT); os.abort()"
    )
    slurm = PySlurm()
    for _ in range(client.FAILURES + 2):
        assert slurm.nodes(["n1"]) == {"n1": WELL}
    assert len([path for path in tmp_path.iterdir() if path.name.isdigit()]) == client.FAILURES
    assert len(command_line) == client.FAILURES + 2


def test_another_release_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command_line: list[str]
) -> None:
    pretend(tmp_path, monkeypatch, NODE, release="25.11")
    with pytest.raises(SlurmUnavailable, match=r"libslurm 25\.11, slurmctld is 26\.05"):
        PySlurm(strict=True).nodes(["n1"])
    assert PySlurm().nodes(["n1"]) == {"n1": WELL}
    assert command_line == ["n1"]
