"""Snapshots go to another node's memory while training goes on, and everybody can go back to one."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Any

import pytest
import torch
from snapshot_examples import HOST, LIMIT, SECRET, Client, Rank, rank_of, vault_of
from state_examples import train, training

from tm_slurm.agent.vault import Vault
from tm_slurm.control import FrameSocket, accept_socket
from tm_slurm.runtime.peer_memory import choose_interval, fetch
from tm_slurm.state import StateError, digest, unpack

torch.set_num_threads(1)


def fetched(vault: Vault, step: int, **more: Any) -> Any:
    return fetch((HOST, vault.port), SECRET, 0, step, **({"timeout_s": 10, "max_bytes": LIMIT} | more))


class DeafVault:
    """Takes connections, proves itself, and then reads nothing."""

    def __init__(self) -> None:
        self._server = socket.create_server((HOST, 0))
        self.address = (HOST, int(self._server.getsockname()[1]))
        self.accepted = threading.Event()
        self._sockets: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._server.accept()
            except OSError:
                return
            self._sockets.append(sock)
            with contextlib.suppress(ConnectionError):  # the other side gave up meanwhile
                accept_socket(sock, SECRET, timeout_s=5)
                frames = FrameSocket(sock)
                frames.receive()
                frames.send({"ok": True})
            self.accepted.set()

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join(5)
        for sock in self._sockets:
            sock.close()


def big_state() -> dict[str, Any]:
    return {"model": torch.nn.ParameterList([torch.nn.Parameter(torch.randn(1024, 1024)) for _ in range(16)])}


def test_survivor_and_successor_go_on_from_the_same_boundary_bit_for_bit() -> None:
    with vault_of() as vault, rank_of() as rank:
        state = training(1, 3)
        rank.store(state, 3, vault)
        losses = [train(state) for _ in range(3)]
        end = digest(state, generators=True)

        stored = rank.memory.local(3, 0)
        assert stored is not None and unpack(state, stored) == 3
        assert [train(state) for _ in range(3)] == losses and digest(state, generators=True) == end

        successor = training(7, 1)
        assert unpack(successor, fetched(vault, 3)) == 3
        assert [train(successor) for _ in range(3)] == losses
        assert digest(successor, generators=True) == end


def test_training_changes_nothing_of_a_snapshot_that_is_being_sent() -> None:
    with vault_of() as vault, rank_of() as rank:
        state = training(1, 1, width=400)
        before = digest(state)
        assert rank.begin(state, 1, vault)
        for _ in range(3):
            train(state)
        assert rank.told.get(timeout=20) == (1, None)
        other = training(2, 0, width=400)
        unpack(other, fetched(vault, 1))
        assert digest(other) == before != digest(state)


def test_the_newest_complete_one_and_the_one_on_its_way_are_never_overwritten() -> None:
    deaf = DeafVault()
    try:
        with vault_of() as vault, rank_of() as rank:
            state = big_state()
            rank.store(state, 1, vault)
            before = digest(state)
            assert rank.begin(state, 2, deaf.address)  # never ends
            assert deaf.accepted.wait(10)
            with torch.no_grad():
                state["model"][0].add_(1)
            assert not rank.begin(state, 3, vault)
            other = big_state()
            unpack(other, rank.memory.local(1, 0))
            assert digest(other) == before
            assert rank.memory.local(2, 0) is None and rank.memory.local(3, 0) is None
    finally:
        deaf.close()


def test_a_stored_one_is_kept_until_it_is_complete_or_abandoned() -> None:
    with vault_of() as vault, rank_of() as rank:
        state = training(1, 1)
        rank.store(state, 1, vault)
        rank.store(state, 2, vault, complete=False)
        assert not rank.begin(state, 3, vault)
        assert rank.memory.local(1, 0) is not None and rank.memory.local(2, 0) is not None
        rank.memory.abandon(2)
        assert rank.memory.local(2, 0) is None and rank.memory.local(1, 0) is not None
        rank.store(state, 3, vault, complete=False)
        rank.memory.completed(3)
        assert rank.memory.local(1, 0) is None and rank.memory.local(3, 0) is not None
        rank.memory.completed(3)
        rank.memory.completed(99)  # of others only
        assert rank.memory.local(3, 0) is not None
        rank.store(state, 4, vault)


def test_an_abandoned_one_that_hangs_frees_its_slot_at_once() -> None:
    deaf = DeafVault()
    try:
        with vault_of() as vault, rank_of() as rank:
            state = big_state()
            rank.store(state, 1, vault)
            assert rank.begin(state, 2, deaf.address)
            assert deaf.accepted.wait(10)
            began = time.monotonic()
            rank.memory.abandon()
            with rank.memory._changed:
                assert rank.memory._changed.wait_for(
                    lambda: any(s.use == "free" for s in rank.memory._slots), 5
                )
            rank.store(state, 3, vault)
            assert time.monotonic() - began < 5
            assert rank.told.empty()  # nobody asked for the end of what was abandoned
    finally:
        deaf.close()


def test_beginning_never_waits_for_the_network() -> None:
    deaf = DeafVault()
    try:
        with rank_of() as rank:
            state = big_state()
            rank.memory.reserve(state)
            reserved_slots(rank)
            began = time.perf_counter()
            assert rank.begin(state, 1, deaf.address) and rank.begin(state, 2, deaf.address)
            assert not rank.begin(state, 3, deaf.address)
            assert time.perf_counter() - began < 1.0  # two copies of 64 MiB; measured: 0.03
            assert rank.memory.cost.pack_s > 0
    finally:
        deaf.close()


def test_reserved_memory_is_what_a_snapshot_is_packed_into() -> None:
    with vault_of() as vault, rank_of() as rank:
        state = training(1, 1)
        rank.memory.reserve(state)
        addresses = {slot.memory.flat.data_ptr() for slot in reserved_slots(rank)}
        for step in range(1, 5):
            rank.store(state, step, vault)
        assert {slot.memory.flat.data_ptr() for slot in rank.memory._slots if slot.memory} == addresses


def reserved_slots(rank: Rank) -> list[Any]:
    """Both slots, once there is memory in them."""
    slots = rank.memory._slots
    with rank.memory._changed:
        assert rank.memory._changed.wait_for(
            lambda: all(slot.memory is not None and slot.use == "free" for slot in slots), 10
        )
    return slots


def refusal_of(rank: Rank) -> str:
    _, why = rank.told.get(timeout=20)
    assert why is not None
    return why


def test_a_failure_is_told_and_the_next_one_succeeds() -> None:
    with socket.create_server((HOST, 0)) as gone:
        nobody = (HOST, int(gone.getsockname()[1]))
    with vault_of(max_bytes=5 << 20) as vault, rank_of(rank=3) as rank:
        state = training(1, 1)
        assert rank.begin(state, 1, nobody)
        why = refusal_of(rank)
        assert "rank 3 step 1" in why and f"{HOST}:{nobody[1]}" in why
        vault.saw_epoch(5)
        assert rank.begin(state, 2, vault)
        assert "epoch 1, this vault has seen 5" in refusal_of(rank)
        rank.epoch = 5
        assert rank.begin(big_state(), 3, vault)
        assert "may hold 5242880" in refusal_of(rank)
        rank.store(state, 4, vault)
        assert vault.holds() == {3: [4]}


def test_a_callback_that_fails_does_not_end_the_snapshots() -> None:
    with vault_of() as vault, rank_of() as rank:
        state, told = training(1, 1), rank.told

        def refuse(step: int) -> None:
            rank.memory._stored = lambda step: told.put((step, None))
            told.put((step, "failed to tell"))
            raise OSError("the agent is gone")

        rank.memory._stored = refuse
        assert rank.begin(state, 1, vault)
        assert told.get(timeout=20) == (1, "failed to tell")
        rank.memory.completed(1)
        rank.store(state, 2, vault)


def test_what_cannot_be_packed_leaves_the_slot_free() -> None:
    with vault_of() as vault, rank_of() as rank:
        state = training(1, 1)
        rank.store(state, 1, vault)
        for _ in range(3):
            with pytest.raises(StateError, match="strange"):
                rank.begin(state | {"strange": Strange()}, 2, vault)
        rank.store(state, 3, vault)


class Strange:
    def state_dict(self) -> dict[str, Any]:
        return {"strange": object()}

    def load_state_dict(self, content: dict[str, Any]) -> None:
        raise NotImplementedError


def test_what_was_fetched_is_a_snapshot_to_go_back_to() -> None:
    with vault_of() as vault, rank_of() as rank, rank_of() as successor:
        state = training(1, 2)
        rank.store(state, 2, vault)
        stored = fetched(vault, 2)
        successor.memory.adopt(stored, 0)
        assert successor.memory.local(2, 0) is stored
        successor.store(state, 3, vault)
        successor.store(state, 4, vault)
        assert successor.memory.local(2, 0) is None


def test_a_standby_fetches_into_the_memory_that_it_has_reserved() -> None:
    with vault_of() as vault, rank_of() as rank, rank_of() as successor:
        state = training(1, 2)
        rank.store(state, 2, vault)
        standby = training(7, 1)
        successor.memory.reserve(standby)
        reserved = [slot.memory for slot in reserved_slots(successor)]
        address = (HOST, vault.port)
        stored = successor.memory.fetch(address, 0, 2, timeout_s=10, max_bytes=LIMIT)
        assert any(stored is memory for memory in reserved)
        assert successor.memory.local(2, 0) is stored
        assert unpack(standby, stored) == 2 and digest(standby) == digest(state)
        with pytest.raises(StateError, match="rank 0 step 9"):
            successor.memory.fetch(address, 0, 9, timeout_s=10, max_bytes=LIMIT)
        assert successor.memory.local(2, 0) is stored
        successor.store(state, 3, vault)
        successor.store(state, 4, vault)
        assert all(slot.memory in reserved for slot in successor.memory._slots)


def test_a_fetch_says_what_was_wrong() -> None:
    with vault_of() as vault, rank_of() as rank:
        state = training(1, 2)
        rank.store(state, 2, vault)
        with pytest.raises(StateError, match=rf"rank 0 step 9 .*{vault.port}: .*only of steps \[2\]"):
            fetched(vault, 9)
        with pytest.raises(StateError, match="at most 100 are allowed"):
            fetched(vault, 2, max_bytes=100)
        with pytest.raises(StateError, match="rank 0 step 2"):
            fetch((HOST, vault.port), b"x" * 32, 0, 2, timeout_s=5, max_bytes=LIMIT)
        blob = memoryview(vault._ranks[0][0].blob)
        blob[1000] ^= 1
        with pytest.raises(StateError, match="checksum"):
            fetched(vault, 2)
        port = vault.port
    with pytest.raises(StateError, match=f"{HOST}:{port}"):
        fetch((HOST, port), SECRET, 0, 2, timeout_s=5, max_bytes=LIMIT)


def test_a_fetch_of_what_is_no_snapshot_is_refused() -> None:
    with vault_of() as vault:
        Client(vault).put_whole(b"bytes", step=2)
        with pytest.raises(StateError, match="not JSON"):
            fetched(vault, 2)


def test_a_fetch_ends_at_its_limit() -> None:
    deaf = DeafVault()
    try:
        began = time.monotonic()
        with pytest.raises(StateError, match="rank 0 step 1"):
            fetch(deaf.address, SECRET, 0, 1, timeout_s=0.3, max_bytes=LIMIT)
        assert time.monotonic() - began < 5
    finally:
        deaf.close()


def test_closing_ends_the_thread_in_mid_transfer() -> None:
    deaf = DeafVault()
    try:
        with rank_of() as rank:
            assert rank.begin(big_state(), 1, deaf.address)
            assert deaf.accepted.wait(10)
            began = time.monotonic()
            rank.memory.close()
            assert not rank.memory._background._thread.is_alive() and time.monotonic() - began < 2
            assert not rank.begin(big_state(), 2, deaf.address)
        assert rank.told.empty()
    finally:
        deaf.close()


def test_the_interval_is_the_smallest_that_costs_a_hundredth() -> None:
    assert choose_interval(0.0, 0.1) == 1
    assert choose_interval(0.001, 0.1) == 1
    assert choose_interval(0.0011, 0.1) == 2
    assert choose_interval(0.3, 0.1) == 300
    assert choose_interval(0.3, 0.1, limit=0.05) == 60
    assert choose_interval(0.1, 0.1, cpu_s=0.4, cpus=2) == 300
    assert choose_interval(0.1, 0.1, cpu_s=0.4, cpus=8) == 150
    for pack_s, step_s, cpu_s in ((0.37, 0.05, 0.9), (0.002, 0.01, 0.0), (3.0, 7.0, 1.0)):
        interval = choose_interval(pack_s, step_s, cpu_s=cpu_s)
        assert (pack_s + cpu_s) / (interval * step_s) <= 0.01 + 1e-12
        assert (pack_s + cpu_s) / ((interval - 1) * step_s) > 0.01


@pytest.mark.parametrize(
    "wrong", [(0.1, 0.0), (0.1, -1.0), (-0.1, 1.0), (float("nan"), 1.0), (0.1, float("nan"))]
)
def test_an_interval_of_nonsense_is_refused(wrong: tuple[float, float]) -> None:
    with pytest.raises(ValueError):
        choose_interval(*wrong)
