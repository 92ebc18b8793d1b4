"""A checkpoint is exact, readable by stock torch, and whole: else it is not there, and the one before is."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from state_examples import train, training
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tm_slurm.runtime.checkpoint import (
    Checkpoints,
    complete,
    newest,
    prune,
    publish,
    read,
    step_of,
    write,
)
from tm_slurm.state import StateError, digest, pack, unpack

torch.set_num_threads(1)

State = dict[str, Any]


def two_replicas(steps: int = 2) -> list[State]:
    """Parameters and optimizer state are the same, generators and running statistics are not."""
    states = [training(1, steps), training(1, steps)]
    with torch.no_grad():
        states[1]["model"][1].running_mean.add_(1)
    states[1]["noise"].manual_seed(99)
    return states


def checkpoint(directory: Path, states: list[State], step: int, *, epoch: int = 1, owner: int = 0) -> Path:
    for rank, state in enumerate(states):
        write(pack(state, step), directory, rank=rank, owner=min(rank, owner), epoch=epoch)
    return publish(directory, step, len(states), epoch=epoch)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_the_agent_finds_and_publishes_them_without_torch() -> None:
    program = "import sys, tm_slurm.state.checkpoint_directory; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False"


def test_every_rank_goes_on_bit_for_bit(tmp_path: Path) -> None:
    states = two_replicas()
    generators = torch.get_rng_state()
    path = checkpoint(tmp_path, states, 2)
    assert path == newest(tmp_path) == tmp_path / "step-00000002" and step_of(path) == 2
    for rank, state in enumerate(states):
        torch.set_rng_state(generators)
        losses = [train(state) for _ in range(3)]
        end = digest(state, generators=True)
        other = training(5, rank)
        assert unpack(other, read(path, rank)) == 2
        assert [train(other) for _ in range(3)] == losses
        assert digest(other, generators=True) == end


def test_only_the_lowest_rank_of_replicas_writes_what_they_share(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, two_replicas(), 2)
    assert names(path) == ["checkpoint.json", "rank-00000.json", "rank-00001.json", "shard-00000"]
    path = checkpoint(tmp_path, [training(1, 3), training(2, 3)], 3, owner=1)
    assert "shard-00000" in names(path) and "shard-00001" in names(path)


def test_stock_torch_reads_it(tmp_path: Path) -> None:
    state = training(1, 3)
    path = checkpoint(tmp_path, [state], 3) / "shard-00000"
    model = state["model"]
    tensors = {f"model/{name}": torch.zeros_like(value) for name, value in model.state_dict().items()}
    moment = "optimizer/state.0.exp_avg"
    dcp.load(tensors | {moment: (found := torch.zeros(48, 24))}, checkpoint_id=path)
    for name, value in model.state_dict().items():
        assert torch.equal(tensors[f"model/{name}"], value)
    assert torch.equal(found, state["optimizer"].state[model[0].weight]["exp_avg"])

    dcp_to_torch_save(path, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert torch.equal(whole["model/0.weight"], model[0].weight)
    stock = training(9, 0)["model"]
    stock.load_state_dict({name.removeprefix("model/"): whole[name] for name in tensors})
    assert torch.equal(stock[4].bias, model[4].bias)


def test_tied_and_odd_tensors_are_in_it(tmp_path: Path) -> None:
    def build(value: float) -> State:
        module = torch.nn.Module()
        module.a = torch.nn.Parameter(torch.full((5, 3), value))
        module.tied = module.a
        module.register_buffer("turned", torch.arange(28.0).mul(value).reshape(4, 7).t())
        module.register_buffer("nothing", torch.empty(0, 3))
        module.register_buffer("one", torch.tensor(value, dtype=torch.bfloat16))
        module.register_buffer("flags", torch.tensor([value > 1, True]))
        module.register_buffer("complex", torch.full((3,), complex(value, 2)))
        return {"module": module}

    source, target = build(1.5), build(0.25)
    path = checkpoint(tmp_path, [source, build(1.5)], 1)
    for rank in (0, 1):
        unpack(target, read(path, rank))
        assert digest(target) == digest(source)
    tied = {"module/tied": torch.zeros(5, 3)}
    dcp.load(tied, checkpoint_id=path / "shard-00000")
    assert torch.equal(tied["module/tied"], source["module"].a)


class Order:
    """A data object with more in it than is written as JSON."""

    def __init__(self, seed: int) -> None:
        self.order = torch.randperm(200_000, generator=torch.Generator().manual_seed(seed))

    def state_dict(self) -> State:
        return {"order": self.order}

    def load_state_dict(self, content: State) -> None:
        self.order = content["order"]


def test_large_private_tensors_of_every_rank_are_in_it(tmp_path: Path) -> None:
    states = [training(1, 1) | {"data": Order(rank)} for rank in range(3)]
    path = checkpoint(tmp_path, states, 1)
    assert [name for name in names(path) if "private" in name] == ["private-00001", "private-00002"]
    for rank, state in enumerate(states):
        other = training(5, 0) | {"data": Order(7)}
        unpack(other, read(path, rank))
        assert torch.equal(other["data"].order, state["data"].order) and digest(other) == digest(state)


def test_nothing_is_visible_before_every_rank_has_written(tmp_path: Path) -> None:
    states = two_replicas()
    write(pack(states[0], 2), tmp_path, rank=0, owner=0, epoch=1)
    with pytest.raises(StateError, match=r"rank 1 has not written .*rank-00001\.json"):
        publish(tmp_path, 2, 2, epoch=1)
    assert newest(tmp_path) is None and newest(tmp_path / "nowhere") is None
    write(pack(states[1], 2), tmp_path, rank=1, owner=0, epoch=1)
    with pytest.raises(StateError, match="rank 0 has not written"):
        publish(tmp_path, 2, 2, epoch=2)  # what ranks of another epoch wrote does not count
    assert publish(tmp_path, 2, 2, epoch=1) == newest(tmp_path)


def test_ranks_that_are_no_replicas_are_not_published_as_such(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"rank-00001\.json: rank 0 shall have its parameters"):
        checkpoint(tmp_path, [training(1, 1), training(2, 1)], 1)
    assert newest(tmp_path) is None


@pytest.mark.parametrize("part", ["__0_0.distcp", ".metadata", "rank-00001.json"])
def test_a_part_that_is_gone_is_missed(tmp_path: Path, part: str) -> None:
    states = two_replicas()
    old = checkpoint(tmp_path, states, 2)
    for rank, state in enumerate(states):
        write(pack(state, 4), tmp_path, rank=rank, owner=0, epoch=1)
    next((tmp_path / ".partial-00000004-1").rglob(part)).unlink()
    with pytest.raises(StateError, match=part.replace(".", r"\.")):
        publish(tmp_path, 4, 2, epoch=1)
    new = checkpoint(tmp_path, states, 6)
    assert newest(tmp_path) == new
    next(new.rglob(part)).unlink()
    assert newest(tmp_path) == old and complete(tmp_path) == [old]
    with pytest.raises(StateError, match=part.replace(".", r"\.")):
        read(new, 1)


def test_a_flipped_byte_anywhere_is_refused(tmp_path: Path) -> None:
    states = [state | {"data": Order(1)} for state in two_replicas()]
    path = checkpoint(tmp_path, states, 2)
    for file in sorted(path.rglob("*")):
        if not file.is_file():
            continue
        good = file.read_bytes()
        for position in (0, len(good) // 2, len(good) - 1):
            bad = bytearray(good)
            bad[position] ^= 1
            file.write_bytes(bad)
            with pytest.raises(StateError, match=file.name.replace(".", r"\.")):
                for rank in (0, 1):
                    read(path, rank)
        file.write_bytes(good)
    assert read(path, 0).step == read(path, 1).step == 2


def test_a_shorter_file_is_not_newest(tmp_path: Path) -> None:
    states = two_replicas()
    old, new = checkpoint(tmp_path, states, 2), checkpoint(tmp_path, states, 4)
    for file in [file for file in new.rglob("*") if file.is_file()]:
        good = file.read_bytes()
        file.write_bytes(good[:-1])
        assert newest(tmp_path) == old, file
        file.write_bytes(good)
    assert newest(tmp_path) == new
    again = checkpoint(tmp_path, states, 4, epoch=2)  # the same bits: what is there stays
    assert again == new and names(tmp_path) == [old.name, new.name]
    next(new.rglob("*.distcp")).unlink()
    assert checkpoint(tmp_path, states, 4, epoch=3) == newest(tmp_path) == new
    assert read(new, 1).step == 4


class Failing:
    """Lets `after` calls through and fails every one after them."""

    def __init__(self, real: Callable[..., Any], after: int) -> None:
        self.real, self.left, self.failed = real, after, False

    def __call__(self, *arguments: Any, **more: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            self.failed = True
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.real(*arguments, **more)


@pytest.mark.parametrize("call", ["fsync", "open", "rename", "mkdir", "replace"])
def test_a_failure_at_any_call_leaves_the_older_one_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    states = [state | {"data": Order(1)} for state in two_replicas()]
    old = checkpoint(tmp_path, states, 2)
    for after in range(100):
        with monkeypatch.context() as patch:
            failing = Failing(getattr(os, call), after)
            patch.setattr(os, call, failing)
            try:
                checkpoint(tmp_path, states, 4, epoch=after)
            except StateError as error:
                assert "No space left" in str(error) and str(tmp_path) in str(error)
                assert failing.failed
            else:
                assert newest(tmp_path) != old
        found = newest(tmp_path)
        assert found is not None and read(found, 0).step == step_of(found) and read(old, 1).step == 2
        if not failing.failed:
            break
        if found != old:  # it failed where that does no harm: tidying up, or after the renaming
            shutil.rmtree(found)
    assert newest(tmp_path) == tmp_path / "step-00000004"
    assert read(tmp_path / "step-00000004", 1).step == 4
    prune(tmp_path)
    assert names(tmp_path) == ["step-00000002", "step-00000004"]


def test_a_full_disk_at_any_write_position_leaves_the_older_one_newest(tmp_path: Path) -> None:
    states = [training(1, 1, width=40) | {"data": Order(1)} for _ in range(2)]
    old = checkpoint(tmp_path, states, 2)
    sizes = [file.stat().st_size for file in old.rglob("*") if file.is_file()]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    limits = sorted({0, 100, *[size + more for size in sizes for more in (-1, -size // 2)]})
    failures = 0
    for number, limit in enumerate(limits):
        resource.setrlimit(resource.RLIMIT_FSIZE, (max(limit, 0), before[1]))
        try:
            checkpoint(tmp_path, states, 4, epoch=number)
        except StateError as error:
            failures += 1
            assert "File too large" in str(error) or "rror" in str(error)
            assert str(tmp_path) in str(error) and "\n" not in str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert newest(tmp_path) == old
        assert read(old, 1).step == 2
    assert failures == len(limits)
    assert checkpoint(tmp_path, states, 4, epoch=99) == newest(tmp_path)


def test_what_failed_takes_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", Failing(os.fsync, 4))  # after the tensors
    with pytest.raises(StateError, match="No space left"):
        write(pack(training(1, 1), 2), tmp_path, rank=0, owner=0, epoch=1)
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []


def test_what_cannot_be_written_says_where(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(StateError, match=f"rank 0 step 2 in {tmp_path}/file"):
        write(pack(training(1, 1), 2), tmp_path / "file", rank=0, owner=0, epoch=1)


def test_prune_keeps_the_newest_and_takes_what_is_stale(tmp_path: Path) -> None:
    states = [training(1, 1)]
    for step in (10, 20, 30, 40):
        checkpoint(tmp_path, states, step, epoch=3)
    for step, epoch in ((35, 3), (50, 2), (50, 3), (45, 4)):
        write(pack(states[0], step), tmp_path, rank=0, owner=0, epoch=epoch)
    next((tmp_path / "step-00000040").rglob("*.distcp")).unlink()
    (tmp_path / "notes").mkdir()
    prune(tmp_path, keep=2)
    # Damaged 40 is not counted, and not touched; 45 of the newest epoch is being written.
    left = [".partial-00000045-4", "notes", "step-00000020", "step-00000030", "step-00000040"]
    assert names(tmp_path) == left
    prune(tmp_path, keep=0)
    assert newest(tmp_path) == tmp_path / "step-00000030"
    prune(tmp_path / "nowhere")


def test_what_is_being_written_is_not_pruned(tmp_path: Path) -> None:
    states = [training(1, 1)]
    checkpoint(tmp_path, states, 10, epoch=3)
    write(pack(states[0], 20), tmp_path, rank=0, owner=0, epoch=3)
    write(pack(states[0], 5), tmp_path, rank=0, owner=0, epoch=4)  # went back, newest damaged inside
    prune(tmp_path)
    assert names(tmp_path) == [".partial-00000005-4", "step-00000010"]
    assert publish(tmp_path, 5, 1, epoch=4).exists()


def test_a_rank_that_is_not_in_it_is_told_so(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, two_replicas(), 2)
    with pytest.raises(StateError, match="of 2 ranks, there is no rank 2"):
        read(path, 2)
    with pytest.raises(StateError, match="rank 0 in"):
        read(tmp_path / "step-00000077", 0)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"xxh3": 1, "content": {}}', b"\xff", b"null"])
def test_a_summary_of_nonsense_is_no_checkpoint(tmp_path: Path, content: bytes) -> None:
    old, new = checkpoint(tmp_path, two_replicas(), 2), checkpoint(tmp_path, two_replicas(), 4)
    (new / "checkpoint.json").write_bytes(content)
    assert newest(tmp_path) == old
    with pytest.raises(StateError, match=r"checkpoint\.json"):
        read(new, 0)


def test_json_says_what_a_person_wants_to_know(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, two_replicas(), 2)
    content = json.loads((path / "checkpoint.json").read_text())["content"]
    assert (content["step"], content["world_size"], content["epoch"]) == (2, 2, 1)
    rank = json.loads((path / "rank-00001.json").read_text())
    assert (rank["rank"], rank["owner"], rank["step"]) == (1, 0, 2)
    assert list(rank["tensors"]) == [
        "model/1.running_mean",
        "model/1.running_var",
        "model/1.num_batches_tracked",
    ]


class Told:
    """What the background thread said."""

    def __init__(self, directory: Path) -> None:
        self.ends: dict[int, str | None] = {}
        self.changed = threading.Condition()
        self.checkpoints = Checkpoints(directory, written=self.end, failed=self.end)

    def end(self, step: int, why: str | None = None) -> None:
        with self.changed:
            self.ends[step] = why
            self.changed.notify_all()

    def of(self, step: int) -> str | None:
        with self.changed:
            assert self.changed.wait_for(lambda: step in self.ends, 20)
            return self.ends[step]


def test_training_goes_on_while_one_is_written(tmp_path: Path) -> None:
    told = Told(tmp_path)
    try:
        state = training(1, 2, width=300)
        before = digest(state)
        assert told.checkpoints.begin(state, 2, rank=0, owner=0, epoch=1)
        train(state)
        assert told.of(2) is None
        assert publish(tmp_path, 2, 1, epoch=1)
        other = training(3, 0, width=300)
        assert unpack(other, read(tmp_path / "step-00000002", 0)) == 2 and digest(other) == before
    finally:
        told.checkpoints.close()


def test_one_at_a_time_and_a_failure_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told, go_on, real = Told(tmp_path), threading.Event(), os.fsync

    def held_up(descriptor: int) -> None:
        assert go_on.wait(20)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", held_up)
    try:
        state = training(1, 1)
        assert told.checkpoints.begin(state, 2, rank=0, owner=0, epoch=1)
        assert not told.checkpoints.begin(state, 3, rank=0, owner=0, epoch=1)
        go_on.set()
        assert told.of(2) is None
        monkeypatch.setattr(os, "fsync", Failing(real, 0))
        assert told.checkpoints.begin(state, 4, rank=0, owner=0, epoch=1)
        assert "No space left" in str(told.of(4))
        monkeypatch.setattr(os, "fsync", real)
        assert told.checkpoints.begin(state, 6, rank=0, owner=0, epoch=1)
        assert told.of(6) is None
    finally:
        go_on.set()
        told.checkpoints.close()
    assert not told.checkpoints.begin(state, 8, rank=0, owner=0, epoch=1)
