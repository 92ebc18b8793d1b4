"""Recordings in the job directory: what is read is what was recorded, equal tensors are there once, and
neither a full disk nor a damaged file is more than one line."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tm_slurm.sandbox import Call, Recording, RecordingError, find, layout_of
from tm_slurm.sandbox import store as recordings

KINDS = [
    torch.arange(6.0).reshape(2, 3),
    torch.tensor([True, False]),
    torch.tensor(3, dtype=torch.int64),
    torch.empty(0, 4),
    torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    torch.tensor([1 + 2j], dtype=torch.complex64),
    torch.arange(12.0).reshape(3, 4).t(),
]


def recording(ranks: list[int], name: str = "only-1", copies: int = 1) -> Recording:
    calls = [Call(-1, "tm:broadcast", 0, -1, -1, [tensor]) for tensor in KINDS]
    calls += [Call(step, "tm:all_gather", 1, -1, -1, [t.clone() for t in KINDS]) for step in range(copies)]
    calls += [Call(1, "tm:recv", 0, 3, 3, [None])]
    return Recording(name, ranks, layout_of(4, name), calls)


def test_what_is_read_is_what_was_recorded(tmp_path: Path) -> None:
    kept = recording([1, 3])
    recordings.write(tmp_path / "r", kept)
    for rank in (1, 3):
        found = find(tmp_path / "r", rank)
        assert found is not None
        assert (found.role_class, list(found.ranks), found.layout) == ("only-1", [1, 3], kept.layout)
        assert found.steps == 2
        for ours, theirs in zip(kept.calls, found.calls, strict=True):
            assert (ours.step, ours.name, ours.group, ours.peer) == (
                theirs.step,
                theirs.name,
                theirs.group,
                theirs.peer,
            )
            for mine, other in zip(ours.outputs, theirs.outputs, strict=True):
                assert (mine is None) == (other is None)
                if mine is not None and other is not None:
                    assert mine.dtype == other.dtype and torch.equal(mine, other)
    assert find(tmp_path / "r", 0) is None


def test_equal_tensors_are_there_once(tmp_path: Path) -> None:
    sizes = [recordings.write(tmp_path / "r", recording([0], f"only-{copies}", copies)) for copies in (1, 9)]
    assert sizes[1].recorded_bytes > 4 * sizes[0].recorded_bytes / 2
    content = [(tmp_path / "r" / f"only-{copies}" / "tensors.bin").stat().st_size for copies in (1, 9)]
    assert content[0] == content[1]


def test_each_class_has_its_own_and_the_newer_one_counts(tmp_path: Path) -> None:
    recordings.write(tmp_path, recording([0], "first-1"))
    recordings.write(tmp_path, recording([1, 2], "middle-1"))
    recordings.write(tmp_path, recording([0, 5], "first-1"))
    told = [find(tmp_path, rank) for rank in (0, 1, 2, 5)]
    assert [one.role_class if one else None for one in told] == ["first-1", "middle-1", "middle-1", "first-1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first-1", "middle-1"]


def test_a_full_disk_leaves_nothing_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(RecordingError, match="has 1 MB left"):
        recordings.write(tmp_path, recording([0]))
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_meanwhile_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(RecordingError, match=r"cannot be written to .*No space left on device"):
        recordings.write(tmp_path, recording([0]))
    assert list(tmp_path.iterdir()) == []


def test_that_there_will_be_none_is_told(tmp_path: Path) -> None:
    recordings.write_refusal(tmp_path, recording([0, 1]), "the disk is full")
    with pytest.raises(RecordingError, match="the disk is full"):
        find(tmp_path, 1)
    assert find(tmp_path, 2) is None
    assert find(tmp_path / "nothing", 0) is None


def test_a_damaged_one_is_refused(tmp_path: Path) -> None:
    recordings.write(tmp_path, recording([0]))
    tensors, manifest = tmp_path / "only-1" / "tensors.bin", tmp_path / "only-1" / "manifest.json"
    whole, told = tensors.read_bytes(), json.loads(manifest.read_text())
    tensors.write_bytes(b"\xff" + whole[1:])
    with pytest.raises(RecordingError, match="not those that were written"):
        find(tmp_path, 0)
    tensors.write_bytes(whole[:64])
    with pytest.raises(RecordingError, match="would end at"):
        find(tmp_path, 0)
    for wrong in (
        {**told, "version": 2},
        {**told, "calls": [[0]]},
        {**told, "tensors": [["float32", [-1], 0, 0]]},
    ):
        manifest.write_text(json.dumps(wrong))
        with pytest.raises(RecordingError):
            find(tmp_path, 0)
    manifest.write_text("{")
    with pytest.raises(RecordingError, match="not a recording"):
        find(tmp_path, 0)
