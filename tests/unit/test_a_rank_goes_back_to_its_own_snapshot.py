"""A process goes back to what was kept of the rank that it is, whatever rank it was to be before."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from snapshot_examples import HOST, SECRET, rank_of, vault_of
from state_examples import train, training

from tm_slurm.config.model import PolicyConfig
from tm_slurm.runtime import checkpoint
from tm_slurm.runtime.agent_link import AgentLink
from tm_slurm.runtime.sharing import Shares
from tm_slurm.runtime.storing import CannotGoBack, Storing
from tm_slurm.runtime.vote import SNAPSHOT
from tm_slurm.state import digest, pack, unpack
from tm_slurm.state.checkpoint_directory import checkpoints_of
from tm_slurm.state.stored import Stored

torch.set_num_threads(1)


@contextlib.contextmanager
def storing(job_dir: Path, **policy: Any) -> Iterator[Storing]:
    """Of a process whose agent only listens."""
    agent, own = socket.socketpair()
    with agent, own:
        one = Storing(SECRET, job_dir, PolicyConfig(**policy), AgentLink(own))
        try:
            yield one
        finally:
            if one._memory is not None:
                one._memory.close()


def back_to(step: int, vault: Any) -> dict[str, Any]:
    return {"source": "snapshot", "step": step, "vault": [HOST, vault.port]}


def test_a_standby_that_fetched_one_ranks_snapshot_and_becomes_another_fetches_again(tmp_path: Path) -> None:
    with vault_of() as vault, rank_of(0) as rank_0, rank_of(1) as rank_1, storing(tmp_path) as standby:
        states = [training(1, 2), training(2, 2)]
        rank_0.store(states[0], 2, vault)
        rank_1.store(states[1], 2, vault)
        state = training(7, 1)
        assert standby.go_back(back_to(2, vault), state, 1) == 2 and digest(state) == digest(states[1])
        assert standby.local_snapshots(1) == [2] and standby.local_snapshots(0) == []
        assert standby.go_back(back_to(2, vault), state, 0) == 2 and digest(state) == digest(states[0])
        assert standby.local_snapshots(0) == [2] and standby.local_snapshots(1) == []
        train(state)
        duties = {"vault": [HOST, vault.port], "keeper": "n1", "owner": 0, "snapshots": True}
        standby.handlers()["duties"](duties)
        standby.at_boundary(SNAPSHOT | (2 + 1) << 8, state, 3, shares=Shares(), epoch=1)
        assert any(slot.step == 3 for slot in standby._peer_memory()._slots), "no memory is left for it"


def test_after_going_back_further_the_next_snapshot_is_the_newest(tmp_path: Path) -> None:
    with vault_of() as vault, rank_of(0) as rank, storing(tmp_path, snapshot_every_steps=2) as survivor:
        rank.store(training(1, 2), 8, vault)
        state = training(7, 1)
        duties = {"vault": [HOST, vault.port], "keeper": "n1", "owner": 0, "snapshots": True}
        survivor.handlers()["duties"](duties)
        survivor.go_back(back_to(8, vault), state, 0)
        survivor.handlers()["snapshot_complete"]({"step": 9})  # told, and then all went back behind it
        survivor.go_back(back_to(8, vault), state, 0)
        assert survivor.local_snapshots(0) == [8]
        survivor.at_boundary(0, state, 8, shares=Shares(), epoch=1)
        survivor.gone_back(4)
        assert survivor.local_snapshots(0) == [] and survivor.flags(6) == SNAPSHOT


def test_a_process_that_did_not_become_a_rank_keeps_nothing_of_it(tmp_path: Path) -> None:
    with vault_of() as vault, rank_of(0) as rank, storing(tmp_path) as standby:
        rank.store(training(1, 2), 2, vault)
        standby.go_back(back_to(2, vault), training(7, 1), 0)
        standby.forget()
        assert standby.local_snapshots(0) == []


def test_the_first_snapshot_finds_memory_that_was_reserved(tmp_path: Path) -> None:
    state = training(1, 1)
    with storing(tmp_path) as rank:
        rank.at_boundary(0, state, 1, shares=Shares(), epoch=0)
        assert rank._memory is None, "nobody has said that snapshots are wanted"
        duties = {"vault": [HOST, 1], "keeper": "n1", "owner": 0, "snapshots": True}
        rank.handlers()["duties"](duties)
        assert rank.flags(2) == 0
        rank.at_boundary(0, state, 2, shares=Shares(), epoch=0)
        assert rank.flags(3) == SNAPSHOT
        assert reserved(rank) == [Stored, Stored]


@pytest.mark.parametrize(
    ("snapshots", "told", "expected"), [("always", False, 2), ("auto", True, 2), ("never", True, 0)]
)
def test_a_standby_reserves_if_there_will_be_snapshots(
    tmp_path: Path, snapshots: str, told: bool, expected: int
) -> None:
    with storing(tmp_path, snapshots=snapshots) as standby:
        standby.reserve(training(1, 1), told=told)
        assert len(reserved(standby)) == expected


def reserved(one: Storing) -> list[type]:
    """Of the slots of its memory, once all that was asked for is done."""
    if one._memory is None:
        return []
    done = threading.Event()
    one._memory._background.submit(done.set)
    assert done.wait(20)
    return [type(slot.memory) for slot in one._memory._slots]


def test_what_cannot_be_gone_back_to_is_named(tmp_path: Path) -> None:
    state = training(1, 2)
    directory = checkpoints_of(tmp_path)
    checkpoint.write(pack(state, 2), directory, rank=0, owner=0, epoch=1)
    path = checkpoint.publish(directory, 2, 1, epoch=1)
    flip(next((path / "shard-00000").glob("*.distcp")))
    with storing(tmp_path) as survivor, pytest.raises(CannotGoBack, match="checksum") as refused:
        survivor.go_back({"source": "checkpoint", "step": 2, "path": str(path)}, state, 0)
    assert (refused.value.source, refused.value.step) == ("checkpoint", 2)


def test_a_damaged_checkpoint_that_is_written_again_is_whole(tmp_path: Path) -> None:
    state = training(1, 2)
    for epoch in (1, 2):
        checkpoint.write(pack(state, 2), tmp_path, rank=0, owner=0, epoch=epoch)
        path = checkpoint.publish(tmp_path, 2, 1, epoch=epoch)
        if epoch == 1:
            flip(next((path / "shard-00000").glob("*.distcp")))
    assert unpack(state, checkpoint.read(path, 0)) == 2


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
