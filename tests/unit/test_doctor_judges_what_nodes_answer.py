"""Checks on nodes: two real probes in one directory, and answers with one thing wrong in each."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from tm_slurm import __version__
from tm_slurm.doctor import nodes, probe
from tm_slurm.doctor.probe import Probe, interfaces

Answers = dict[str, dict[str, Any]]


@pytest.fixture
def who() -> Answers:
    """Two nodes that are well."""

    def node(name: str, number: int) -> dict[str, Any]:
        return {
            "host": name,
            "address": f"10.0.0.{number}",
            "problem": "",
            "port": 40000 + number,
            "version": __version__,
            "open_files": [65536, 65536],
            "interfaces": {"lo": "127.0.0.1", "eth0": f"10.0.0.{number}"},
            "named_interfaces": {},
            "files": {"/p/tm_slurm.so": "aa"},
        }

    return {"n1": node("n1", 1), "n2": node("n2", 2)}


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Probe, Probe]:
    monkeypatch.setattr(probe, "SEE_S", 0.0)
    return Probe(tmp_path, "n1"), Probe(tmp_path, "n2")


def test_a_directory_that_is_shared_and_one_that_is_not(pair: tuple[Probe, Probe], tmp_path: Path) -> None:
    wrote = {each.node: each.ask_write({}) for each in pair}
    saw = {each.node: each.ask_see({"nodes": ["n1", "n2"]}) for each in pair}
    assert nodes.shared_directory("/jobs", wrote, saw).verdict == "pass"
    alone = tmp_path / "alone"
    alone.mkdir()
    other = Probe(alone, "n2")
    wrote["n2"], saw["n2"] = other.ask_write({}), other.ask_see({"nodes": ["n1", "n2"]})
    finding = nodes.shared_directory("/jobs", wrote, saw)
    assert finding.verdict == "fail" and finding.found == "/jobs is not shared: n2: nothing of n1"
    wrote["n2"] = Probe(tmp_path / "nowhere", "n2").ask_write({})
    finding = nodes.shared_directory("/jobs", wrote, saw)
    assert finding.verdict == "fail" and "No such file" in finding.found


def asked_for_locks(holder: Probe, other: Probe) -> tuple[Answers, Answers, Answers]:
    kept = {"n1": holder.ask_lock({"node": "n1", "wait_s": 1.0, "keep": True})}
    tried = {"n2": other.ask_lock({"node": "n2", "wait_s": 0.0, "keep": False})}
    holder.ask_unlock({})
    return kept, tried, {"n2": other.ask_lock({"node": "n2", "wait_s": 1.0, "keep": False})}


def test_locks_that_hold_and_locks_that_do_not(pair: tuple[Probe, Probe], tmp_path: Path) -> None:
    answers = asked_for_locks(*pair)
    assert nodes.locks(*answers, holder="n1", other="n2").verdict == "pass"
    alone = tmp_path / "alone"
    alone.mkdir()
    finding = nodes.locks(*asked_for_locks(pair[0], Probe(alone, "n2")), holder="n1", other="n2")
    assert finding.verdict == "fail" and "n2 got the lock that n1 held" in finding.found
    stuck = (answers[0], answers[1], {"n2": {"taken": False}})
    assert "had let go" in nodes.locks(*stuck, holder="n1", other="n2").found
    refused = ({"n1": {"error": "No locks available"}}, *answers[1:])
    finding = nodes.locks(*refused, holder="n1", other="n2")
    assert finding.verdict == "fail" and finding.found == "n1: No locks available"


def test_ports_and_names_over_real_sockets(
    pair: tuple[Probe, Probe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "CONNECT_S", 0.5)
    first, second = pair
    listeners = {each.node: ("127.0.0.1", each._listen("127.0.0.1")) for each in pair}
    question = {"hosts": {"n1": "localhost", "n2": "localhost"}, "listeners": listeners}
    reach = {each.node: each.ask_reach(question) for each in pair}
    assert nodes.ports(reach).verdict == "pass" and reach["n1"]["refused"] == {}
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(1.0)
        question["listeners"] = {"n2": silent.getsockname()[:2]}
        assert "timed out" in first.ask_reach(question)["refused"]["n2"]
    answer = second.ask_reach(question | {"hosts": {"n1": "no-such-host.invalid"}})
    assert "refused" in answer["refused"]["n2"].lower()
    finding = nodes.ports({"n2": answer})
    assert finding.verdict == "fail" and "n2 → n2 127.0.0.1:" in finding.found
    question["listeners"] = {"n1": listeners["n2"]}
    assert "answers as n2" in second.ask_reach(question)["refused"]["n1"]


def test_names(who: Answers) -> None:
    well = {"n1": {"names": {"n1": ["127.0.1.1"], "n2": ["10.0.0.2"]}}, "n2": {"names": {"n1": ["10.0.0.1"]}}}
    assert nodes.names(well, who).verdict == "pass", "Debian lets a host's own name be 127.0.1.1"
    wrong = {"n1": {"names": {"n2": ["127.0.0.1"]}}, "n2": {"names": {"n1": []}}}
    finding = nodes.names(wrong, who)
    assert finding.verdict == "warn"
    assert finding.found == "n1 takes n2 for 127.0.0.1; n2 cannot resolve n1"
    for answer in who.values():
        answer["host"] = "localhost"
    assert nodes.names({"n1": {"names": {"n2": ["127.0.0.1"]}}}, who).verdict == "pass", "all on one host"


@pytest.mark.parametrize(
    ("check", "change", "verdict", "words"),
    [
        ("addresses", {"address": None, "problem": "node n2: no address"}, "fail", "node n2: no address"),
        ("open_files", {"open_files": [1024, 4096]}, "warn", "n2: 1024"),
        ("open_files", {"open_files": [256, 4096]}, "fail", "LimitNOFILE"),
        ("open_files", {"open_files": [-1, -1]}, "pass", "n2: unlimited"),
        ("same_files", {"files": {"/p/tm_slurm.so": "bb"}}, "fail", "differs between n1,n2"),
        ("same_files", {"files": {"/p/tm_slurm.so": None}}, "fail", "is not on n2"),
        (
            "interface_choice",
            {"interfaces": {"lo": "127.0.0.1", "eth0": "10.0.0.2", "ib0": "10.1.0.2"}},
            "warn",
            "NCCL_SOCKET_IFNAME=eth0",
        ),
        (
            "interface_choice",
            {"named_interfaces": {"NCCL_SOCKET_IFNAME": "ib"}},
            "fail",
            "has no interface ib",
        ),
        ("interface_choice", {"named_interfaces": {"NCCL_SOCKET_IFNAME": "^lo,docker"}}, "pass", ""),
        ("interface_choice", {"named_interfaces": {"GLOO_SOCKET_IFNAME": "eth"}}, "pass", ""),
    ],
)
def test_one_thing_wrong(who: Answers, check: str, change: dict[str, Any], verdict: str, words: str) -> None:
    assert getattr(nodes, check)(who).verdict == "pass"
    who["n2"].update(change)
    finding = getattr(nodes, check)(who)
    assert finding.verdict == verdict and words in " ".join((finding.found, finding.meaning, finding.mend))


def test_another_version_of_the_package(who: Answers) -> None:
    assert nodes.same_package(who, __version__).verdict == "pass"
    assert nodes.same_package(who, "0.0.1").verdict == "fail"


@pytest.mark.parametrize(
    ("ahead", "about", "verdict"),
    [(0.2, 0.01, "pass"), (5.0, 6.0, "pass"), (-2.0, 0.01, "warn"), (400.0, 0.5, "fail")],
)
def test_clocks(ahead: float, about: float, verdict: str) -> None:
    assert nodes.clocks({"n1": (0.0, 0.01), "n2": (ahead, about)}).verdict == verdict


def test_interfaces_are_those_of_this_machine() -> None:
    assert interfaces()["lo"] == "127.0.0.1"
