"""Durable checkpoints on the shared file system, which stock torch can read.

    DIRECTORY/step-00000100/
        checkpoint.json            what belongs to it: every file, with its size and checksum
        shard-00000/               a torch.distributed.checkpoint directory, by the lowest rank of each set of
                                   replicas: all its tensors, named as in model/0.weight
        rank-00000.json            what every rank has for itself: generators, objects, small buffers
        private-00001/             the same where it is too large for JSON

Every rank writes into a hidden directory of its step and epoch, without any collective; `publish` checks that
nothing is missing and renames it. So what has a name `step-…` is whole, unless it was damaged later, and a
rank that was replaced cannot add to a checkpoint of those who are left. Read the tensors without tm_slurm by
`torch.distributed.checkpoint.load`, or convert them with
`torch.distributed.checkpoint.format_utils.dcp_to_torch_save`.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from tm_slurm.state import StateError, Stored, pack
from tm_slurm.state.background import Background
from tm_slurm.state.checkpoint_directory import (
    VERSION,
    complete,
    file_checksum,
    newest,
    partial_path,
    prune,
    publish,
    rank_file,
    shard_name,
    size_of,
    step_of,
    summary_of,
    sync_directory,
    write_file,
)
from tm_slurm.state.entries import MODULE
from tm_slurm.state.json_object import read_json
from tm_slurm.state.layout import Piece
from tm_slurm.state.stored import stored_from
from tm_slurm.state.tensors import byte_view

__all__ = ["Checkpoints", "complete", "newest", "prune", "publish", "read", "step_of", "write"]

PRIVATE_LIMIT_BYTES = 1 << 20
"""A rank's own tensors (buffers, those of objects) are written into its JSON up to so many bytes."""

MAX_BYTES = 1 << 46

# A rank saves for itself, and means to; torch would say so at each save.
warnings.filterwarnings("ignore", message=".*assuming the intent is to save in a single process")
warnings.filterwarnings("ignore", message=".*assuming the intent is to load in a single process")


class Checkpoints:
    """Writes one rank's part of checkpoints in the background; training waits for one copy to host memory.

    `written(step)` and `failed(step, why)` are called from the background thread.
    """

    def __init__(
        self, directory: Path, *, written: Callable[[int], None], failed: Callable[[int, str], None]
    ) -> None:
        self._directory = directory
        self._written = written
        self._failed = failed
        self._memory: Stored | None = None
        self._busy = False
        self._background = Background("tm-checkpoints")

    def begin(self, state: Mapping[str, Any], step: int, *, rank: int, owner: int, epoch: int) -> bool:
        """Takes a copy of `state` and has it written; False, and nothing done, while an earlier one still is.

        `step`: the number of steps done. `owner`: see `write`. Raises StateError as `pack` does.
        """
        if self._busy or self._background.closed:
            return False
        self._memory = pack(state, step, into=self._memory)
        self._busy = True
        stored = self._memory
        self._background.submit(lambda: self._write(stored, rank, owner, epoch))
        return True

    def close(self, timeout_s: float = 2.0) -> None:
        """Begins nothing more; waits at most `timeout_s` seconds for what is being written."""
        self._background.close(timeout_s)

    def _write(self, stored: Stored, rank: int, owner: int, epoch: int) -> None:
        step = stored.step
        try:
            write(stored, self._directory, rank=rank, owner=owner, epoch=epoch)
        except Exception as error:  # whatever it was: training goes on, and the next one is tried
            why = str(error) or type(error).__name__
        else:
            why = ""
        self._busy = False
        if why:
            self._failed(step, why)
        else:
            self._written(step)


# ---- writing ----


def write(stored: Stored, directory: Path, *, rank: int, owner: int, epoch: int) -> None:
    """Writes this rank's part of the checkpoint of `stored.step`, to the disk, where `publish` finds it.

    `owner` is the lowest rank of those with the same parameters and optimizer state (`replica_key`): only
    that one writes them. Raises StateError naming the path if it cannot be written; what was written of this
    rank is removed then, and older checkpoints are as they were.
    """
    partial = partial_path(directory, stored.step, epoch)
    what = f"the checkpoint of rank {rank} step {stored.step} in {partial}"
    try:
        partial.mkdir(parents=True, exist_ok=True)
        with _removed_on_failure(partial, rank):
            _write(stored, partial, rank, owner, epoch)
    except CheckpointException as error:
        raise StateError(f"{what}: {_cause(error)}") from error
    except OSError as error:
        raise StateError(f"{what}: {error}") from error


def _write(stored: Stored, partial: Path, rank: int, owner: int, epoch: int) -> None:
    pieces = list(zip(stored.layout.pieces, stored.places, strict=True))
    inline: dict[str, str] = {}
    folder = None
    if rank == owner:
        folder, tensors = shard_name(rank), _all_names(stored)
    else:
        tensors = {piece.name: _alone(place) for piece, place in pieces if piece.is_private}
        if sum(place.nbytes for place in tensors.values()) > PRIVATE_LIMIT_BYTES:
            folder = f"private-{rank:05d}"
        else:
            inline = {name: _text(place) for name, place in tensors.items()}
    files: dict[str, list[Any]] = {}
    if folder is not None:
        shutil.rmtree(partial / folder, ignore_errors=True)  # of an earlier try
        writer = FileSystemWriter(
            partial / folder, single_file_per_rank=True, sync_files=True, per_thread_copy_ahead=0
        )
        save(tensors, storage_writer=writer, no_dist=True)
        sync_directory(partial / folder)
        for path in sorted((partial / folder).iterdir()):
            files[f"{folder}/{path.name}"] = [path.stat().st_size, file_checksum(path)]
    rest = {
        "version": VERSION,
        "rank": rank,
        "owner": owner,
        "epoch": epoch,
        "step": stored.step,
        "key": stored.replica_key(),
        "files": files,
        "tensors": inline,
    }
    text = json.dumps(rest, separators=(",", ":")).encode("ascii")
    write_file(partial / rank_file(rank), b'{"head":' + stored.head() + b"," + text[1:])


def _all_names(stored: Stored) -> dict[str, torch.Tensor]:
    """Every tensor, those of modules under each of their names, as a state_dict() has them."""
    tensors = [_alone(place) for place in stored.places]
    named = {piece.name: tensor for piece, tensor in zip(stored.layout.pieces, tensors, strict=True)}
    for name, kind, position in stored.layout.aliases:
        if kind == MODULE:
            named[name] = tensors[position]
    return named


def _alone(place: torch.Tensor) -> torch.Tensor:
    """`place` as a tensor that has its memory for itself: torch would make a copy to save of any other."""
    if place.numel() == 0:
        return place
    flat = torch.frombuffer(byte_view(place), dtype=place.dtype)
    return flat.as_strided(place.shape, place.stride())


@contextlib.contextmanager
def _removed_on_failure(partial: Path, rank: int) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for name in (shard_name(rank), f"private-{rank:05d}"):
            shutil.rmtree(partial / name, ignore_errors=True)
        for name in (rank_file(rank), f".{rank_file(rank)}"):
            with contextlib.suppress(OSError):
                (partial / name).unlink()
        raise


def _cause(error: CheckpointException) -> str:
    """The reason inside what torch.distributed.checkpoint raises, in one line."""
    reason: BaseException = error
    for failure, _ in error.failures.values():
        reason = failure
    inner: BaseException | None = reason
    while inner is not None and not isinstance(inner, OSError):  # torch.save raises another on the way out
        inner = inner.__cause__ or inner.__context__
    return " ".join(str(inner or reason).split()) or type(reason).__name__


# ---- reading ----


def read(path: Path, rank: int, *, into: Stored | None = None) -> Stored:
    """What `rank` had written in the checkpoint at `path`, every byte checked.

    `into` lends its memory if its layout is the same.

    Raises StateError naming the file that is missing, cannot be read, or is not what was written.
    """
    try:
        return _read(path, rank, into)
    except CheckpointException as error:
        raise StateError(f"the checkpoint of rank {rank} in {path}: {_cause(error)}") from error
    except OSError as error:
        raise StateError(f"the checkpoint of rank {rank} in {path}: {error}") from error
    except (KeyError, TypeError, ValueError, RuntimeError, AssertionError) as error:
        if isinstance(error, StateError):
            raise
        raise StateError(
            f"the checkpoint of rank {rank} in {path}: not what tm_slurm writes: {error!r}"
        ) from error


@torch.no_grad()
def _read(path: Path, rank: int, into: Stored | None) -> Stored:
    summary = summary_of(path)
    world_size = int(summary["world_size"])
    if not 0 <= rank < world_size:
        raise StateError(f"{path}: it is of {world_size} ranks, there is no rank {rank} in it")
    expected = summary["files"]
    text = (path / rank_file(rank)).read_bytes()
    if expected[rank_file(rank)] != [len(text), xxhash.xxh3_128_hexdigest(text)]:
        raise StateError(f"{path / rank_file(rank)}: it has changed since it was written (checksum)")
    content = read_json(text, str(path / rank_file(rank)))
    stored = stored_from(content["head"], max_bytes=MAX_BYTES, into=into)
    step, stored.step = stored.step, -1
    places = dict(zip(stored.layout.pieces, stored.places, strict=True))
    inline = content["tensors"]
    own = {p.name: place for p, place in places.items() if p.is_private and p.name not in inline}
    shared = {p.name: place for p, place in places.items() if not p.is_private}
    owner = int(content["owner"])
    for piece, place in places.items():
        if piece.name in inline:
            _fill(piece, place, inline[piece.name])
    if owner == rank:
        _load(path, shard_name(rank), shared | own, expected)
    else:
        _load(path, shard_name(owner), shared, expected)
        _load(path, f"private-{rank:05d}", own, expected)
    if stored.replica_key() != content["key"]:
        raise StateError(
            f"{path / shard_name(owner)}: these are not the parameters and the optimizer state of rank {rank}"
        )
    stored.step = step
    return stored


def _load(path: Path, folder: str, tensors: dict[str, torch.Tensor], expected: Mapping[str, Any]) -> None:
    if not tensors:
        return
    names = [name for name in expected if name.startswith(f"{folder}/")]
    if not names:
        raise StateError(f"{path / folder}: missing")
    for name in names:  # all of them before the first is given to pickle
        size, checksum = expected[name]
        if size_of(path / name) != size or file_checksum(path / name) != checksum:
            raise StateError(f"{path / name}: it has changed since it was written (checksum)")
    load(tensors, checkpoint_id=path / folder, no_dist=True)


def _fill(piece: Piece, place: torch.Tensor, text: str) -> None:
    try:
        data = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise StateError(f"{piece.name}: {error}") from None
    if len(data) != piece.nbytes:
        raise StateError(f"{piece.name}: {len(data)} bytes, expected {piece.nbytes}")
    byte_view(place)[:] = data


def _text(tensor: torch.Tensor) -> str:
    return base64.b64encode(byte_view(tensor)).decode("ascii")
