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
class Node:
    @staticmethod
    def load(name):
        {node}
class _Config:
    @staticmethod
    def load():
        return SimpleNamespace(version="26.05.5")
slurmctld = SimpleNamespace(Config=_Config)
"""
FIELDS = """state="IDLE+DRAIN", reason="two  words", reason_user="root", reason_time=5,
            address="10.0.0.1", hostname="n1", effective_cpus=4, total_cpus=4, boot_time=1,
            slurmd_start_time=2, partitions=["batch"], slurm_version="26.05.5\""""
NODE = f"""return {{"n1": SimpleNamespace(name="n1", {FIELDS})}}"""
MANY = f"""return {{f"n{{i}}": SimpleNamespace(name=f"n{{i}}", {FIELDS}) for i in range(1000)}}"""
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


def pretend(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nodes: str,
    release: str = "26.05",
    node: str = "raise RPCError",
) -> None:
    """A pyslurm that behaves like that when it is asked for all nodes, and for one, and a libslurm of this
    release."""
    (tmp_path / "pyslurm.py").write_text(MODULE.replace("{nodes}", nodes).replace("{node}", node))
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


def test_of_many_nodes_only_those_that_are_asked_for_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command_line: list[str]
) -> None:
    """All of them once, to know how many there are."""
    count = f"os.open({str(tmp_path / 'all-')!r} + str(time.monotonic_ns()), os.O_CREAT); {MANY}"
    one = f"""if name == "n7777": raise RPCError("Node 'n7777' does not exist")
        if name == "n6666": raise RPCError("Access/permission denied")
        return SimpleNamespace(name=name, {FIELDS})"""
    pretend(tmp_path, monkeypatch, count, node=one)
    slurm = PySlurm(strict=True)
    for _ in range(3):
        assert set(slurm.nodes(["n1", "n999", "n7777"])) == {"n1", "n999"}
    assert len(list(tmp_path.glob("all-*"))) == 1
    with pytest.raises(SlurmRefused, match="denied"):
        slurm.nodes(["n1", "n6666"])
    assert len(slurm.nodes([f"n{number}" for number in range(500)])) == 500
    assert len(list(tmp_path.glob("all-*"))) == 2
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
