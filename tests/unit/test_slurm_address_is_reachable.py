"""A node gives the others an address that they can reach, whatever its own name stands for."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

import pytest

from tm_slurm.slurm import AddressUnknown, NodeInfo, NodeState, SlurmUnavailable, reachable_address


class Known:
    """What Slurm would say of the nodes' addresses; None: it does not answer."""

    def __init__(self, addresses: Mapping[str, str] | None) -> None:
        self.addresses = addresses

    def nodes(self, names: Sequence[str]) -> dict[str, NodeInfo]:
        if self.addresses is None:
            raise SlurmUnavailable("no answer")
        known = {name: self.addresses[name] for name in names if name in self.addresses}
        return {
            name: NodeInfo(name=name, state=NodeState("IDLE"), address=address)
            for name, address in known.items()
        }


def address(node: str, known: Mapping[str, str] | None, nodes: Sequence[str]) -> str:
    return reachable_address(node, slurm=Known(known), job_nodes=nodes)  # type: ignore[arg-type]


@pytest.fixture
def outward() -> str:
    """This host's address towards other hosts; documentation addresses are routed like any other."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this host has no network but loopback")
        return str(probe.getsockname()[0])


def test_slurms_address_of_the_node_is_taken(outward: str) -> None:
    assert address("n1", {"n1": outward, "n2": "192.0.2.2"}, ["n1", "n2"]) == outward


def test_a_name_that_means_loopback_here_is_not_given_to_others(outward: str) -> None:
    """The head node's name resolved to 127.0.0.1 on itself: the others could not connect."""
    assert address("n1", {"n1": "localhost", "n2": "192.0.2.2"}, ["n1", "n2"]) == outward
    assert address("n1", {"n1": "127.0.1.1", "n2": "192.0.2.2"}, ["n1", "n2"]) == outward


def test_an_address_of_another_host_is_not_taken(outward: str) -> None:
    assert address("n1", {"n1": "192.0.2.1", "n2": "192.0.2.2"}, ["n1", "n2"]) == outward


def test_loopback_is_right_when_every_node_is_on_it() -> None:
    everybody = {name: "localhost" for name in ("n1", "n2", "n3")}
    assert address("n2", everybody, ["n1", "n2", "n3"]) == "127.0.0.1"


def test_a_job_of_one_node_may_use_loopback() -> None:
    assert address("n1", {"n1": "127.0.0.1"}, ["n1"]) == "127.0.0.1"


def test_without_an_answer_from_slurm_names_stand_for_themselves(outward: str) -> None:
    assert address("localhost", None, ["localhost", "192.0.2.2"]) == outward


def test_an_address_that_nobody_reaches_is_an_error_with_advice() -> None:
    with pytest.raises(AddressUnknown) as error:
        address("n1", {"n1": "no-such-host.invalid", "n2": "neither.invalid"}, ["n1", "n2"])
    assert "n1" in str(error.value) and "NodeAddr" in str(error.value) and "\n" not in str(error.value)


def test_the_node_and_its_job_are_known_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n2")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    known = Known({"n1": "localhost", "n2": "localhost"})
    assert reachable_address(slurm=known) == "127.0.0.1"  # type: ignore[arg-type]
