"""A vault keeps the newest complete snapshot of each rank whatever comes after it, within its memory."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest
from snapshot_examples import HOST, Client, vault_of

from tm_slurm.agent import vault as vault_module
from tm_slurm.agent.vault import Vault
from tm_slurm.control import HandshakeRefused

OLD, NEW, NEWER = (bytes([value]) * 3_000_001 for value in (1, 2, 3))


def put(vault: Vault, blob: bytes, step: int, **more: Any) -> dict[str, Any]:
    return Client(vault).put_whole(blob, step=step, **more)


def get(vault: Vault, step: int, rank: int = 0) -> bytes | str:
    return Client(vault).get(step=step, rank=rank)


def test_the_agent_stays_light() -> None:
    program = "import sys, tm_slurm.agent.vault; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_two_snapshots_of_each_rank_are_kept_and_no_third() -> None:
    with vault_of() as vault:
        for rank in (0, 1):
            for step, blob in ((10, OLD), (20, NEW), (30, NEWER)):
                answer = put(vault, blob, step, rank=rank)
                assert answer["stored"] == step and answer["cpu_s"] > 0
        assert vault.holds() == {0: [20, 30], 1: [20, 30]}
        assert get(vault, 20, 1) == NEW and get(vault, 30) == NEWER
        assert "only of steps [20, 30]" in str(get(vault, 10))
        assert "none" in str(get(vault, 10, rank=7))


def test_the_memory_is_used_again() -> None:
    with vault_of() as vault:
        for step in (10, 20):
            put(vault, OLD, step)
        before = [id(slot.blob) for slot in vault._ranks[0]]
        for step in (30, 40, 50):
            put(vault, NEW, step)
        assert [id(slot.blob) for slot in vault._ranks[0]] == before
        assert sum(len(slot.blob) for slot in vault._ranks[0]) == 2 * len(OLD)


@pytest.mark.parametrize("told_by", ["the agent", "the next put"])
def test_the_complete_one_is_never_overwritten(told_by: str) -> None:
    with vault_of() as vault:
        assert put(vault, OLD, 10)["stored"] == 10
        if told_by == "the agent":
            vault.keep(10)
        for step in (20, 30, 40):
            client = Client(vault)
            client.put(NEW, step=step, complete=10 if told_by == "the next put" else -1)
            client.sock.sendall(client.body(NEW))
            assert client.frames.receive()["stored"] == step
            assert vault.holds() == {0: [10, step]}
        assert get(vault, 10) == OLD
        vault.keep(40)
        put(vault, NEWER, 50)
        assert vault.holds() == {0: [40, 50]}


@pytest.mark.parametrize("where", [0, 3, 1_500_000, 3_000_000, 3_000_020])
def test_a_put_that_breaks_leaves_the_kept_one(where: int) -> None:
    with vault_of() as vault:
        put(vault, OLD, 10)
        vault.keep(10)
        put(vault, NEW, 20)
        client = Client(vault)
        assert client.put(NEWER, step=30) == {"ok": True}
        client.sock.sendall(client.body(NEWER)[:where])
        client.sock.close()
        assert put(vault, NEWER, 40)["stored"] == 40  # waits for the broken one to let go
        assert vault.holds() == {0: [10, 40]}
        assert get(vault, 10) == OLD and get(vault, 40) == NEWER


def test_changed_bytes_are_refused() -> None:
    with vault_of() as vault:
        put(vault, OLD, 10)
        for position in (2, 4, 2_000_000, 3_000_004, 3_000_010):
            client = Client(vault)
            client.put(NEW, step=20)
            body = bytearray(client.body(NEW))
            body[position] ^= 4
            client.sock.sendall(body)
            assert "checksum" in client.frames.receive()["refused"]
        assert vault.holds() == {0: [10]}


def test_a_frozen_put_gives_way_to_the_next_of_its_rank() -> None:
    with vault_of() as vault:
        put(vault, OLD, 10)
        vault.keep(10)
        frozen = Client(vault)
        frozen.put(NEW, step=20)
        frozen.sock.sendall(frozen.body(NEW)[:1_000_000])
        assert put(vault, NEWER, 30, epoch=2)["stored"] == 30
        assert vault.holds() == {0: [10, 30]} and get(vault, 30) == NEWER
        with pytest.raises(OSError):
            frozen.sock.sendall(frozen.body(NEW)[1_000_000:])
            frozen.frames.receive()


def test_ranks_that_were_replaced_are_refused() -> None:
    with vault_of() as vault:
        assert put(vault, OLD, 10, epoch=3)["stored"] == 10
        assert "epoch 2, this vault has seen 3" in put(vault, NEW, 20, epoch=2)["refused"]
        assert "epoch 2" in put(vault, NEW, 20, rank=5, epoch=2)["refused"]
        vault.saw_epoch(7)
        assert "has seen 7" in put(vault, NEW, 20, epoch=6)["refused"]
        assert put(vault, NEW, 20, epoch=7)["stored"] == 20
        assert get(vault, 10) == OLD


def test_after_going_back_further_the_new_complete_one_is_kept() -> None:
    with vault_of() as vault:
        put(vault, NEW, 100)
        vault.keep(100)
        put(vault, OLD, 60, epoch=2)  # everybody went back to a checkpoint of step 50
        put(vault, NEWER, 70, epoch=2)
        assert vault.holds() == {0: [60, 70]}
        vault.keep(70)
        put(vault, OLD, 80, epoch=2)
        assert vault.holds() == {0: [70, 80]}


def test_no_more_than_the_limit_is_held() -> None:
    with vault_of(max_bytes=7_000_000) as vault:
        assert put(vault, OLD, 10)["stored"] == 10
        assert put(vault, NEW, 20)["stored"] == 20
        refused = put(vault, OLD, 10, rank=1)["refused"]
        assert (
            "rank 1 step 10" in refused
            and "may hold 7000000" in refused
            and f"{HOST}:{vault.port}" in refused
        )
        assert put(vault, NEWER, 30)["stored"] == 30  # in the place of another: no more than before
        vault.forget_all_but([1], step=30, epoch=1)
        assert put(vault, OLD, 10, rank=1)["stored"] == 10
        assert vault.holds() == {1: [10]}


def test_a_former_keeper_lets_go_and_the_next_one_does_not() -> None:
    with vault_of() as vault:
        for rank, step, epoch in [(0, 10, 1), (1, 10, 1), (2, 15, 1), (3, 5, 2)]:
            assert put(vault, OLD, step, rank=rank, epoch=epoch)["stored"] == step
        vault.forget_all_but([1], step=10, epoch=1)
        assert vault.holds() == {1: [10], 2: [15], 3: [5]}
        vault.forget_all_but([], step=15, epoch=2)
        assert vault.holds() == {}


@pytest.mark.parametrize(
    "wrong",
    [
        {"blob": 1 << 61},
        {"blob": -1},
        {"blob": True},
        {"blob": "9"},
        {"blob": 1.5},
        {"head": 1 << 40},
        {"block": 0},
        {"block": 1 << 40},
        {"step": -1},
        {"rank": None},
        {"epoch": 1 << 80},
        {"op": "open"},
        {"op": ["put"]},
    ],
)
def test_a_request_that_makes_no_sense_is_refused_and_nothing_is_allocated(wrong: dict[str, Any]) -> None:
    with vault_of() as vault:
        request = {
            "op": "put",
            "rank": 0,
            "step": 1,
            "epoch": 1,
            "complete": -1,
            "head": 4,
            "blob": 8,
            "block": 8,
        }
        assert "refused" in Client(vault).ask(**(request | wrong))
        assert vault.holds() in ({}, {0: []})
        assert sum(slot.nbytes for slots in vault._ranks.values() for slot in slots) == 0


def test_strangers_are_refused() -> None:
    with vault_of() as vault:
        with pytest.raises(HandshakeRefused):
            Client(vault, b"x" * 32)
        assert put(vault, OLD, 10)["stored"] == 10


def test_what_is_being_read_is_not_overwritten() -> None:
    with vault_of() as vault:
        big = bytes(64 << 20)
        put(vault, big, 10)
        put(vault, NEW, 20)
        vault.keep(20)
        reader = Client(vault)
        assert reader.ask(op="get", rank=0, step=10)["blob"] == len(big)
        assert "being read" in put(vault, NEWER, 30)["refused"]
        reader.sock.close()
        with vault._changed:
            assert vault._changed.wait_for(lambda: not any(s.readers for s in vault._ranks[0]), 10)
        assert put(vault, NEWER, 30)["stored"] == 30


def test_an_empty_snapshot_is_one_too() -> None:
    with vault_of() as vault:
        assert put(vault, b"", 10)["stored"] == 10
        assert get(vault, 10) == b""


def test_closing_ends_all_connections_and_threads() -> None:
    before = threading.active_count()
    with vault_of() as vault:
        clients = [Client(vault) for _ in range(3)]
        clients[0].put(NEW, step=10)
        clients[0].sock.sendall(b"h")
    assert threading.active_count() == before
    for client in clients:
        assert client.sock.recv(1) == b""
        client.sock.close()


def test_a_connection_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vault_module, "STALL_TIMEOUT_S", 0.1)
    with vault_of() as vault:
        client = Client(vault)
        client.put(NEW, step=10)
        assert client.sock.recv(1) == b""
        client.sock.close()
        assert put(vault, OLD, 20)["stored"] == 20
