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
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint.api import CheckpointException

from tm_slurm.state import StateError, Stored, pack
from tm_slurm.state.background import Background
from tm_slurm.state.entries import MODULE
from tm_slurm.state.layout import Piece, read_json
from tm_slurm.state.stored import stored_from
from tm_slurm.state.tensors import byte_view

VERSION = 1
PRIVATE_LIMIT_BYTES = 1 << 20
"""A rank's own tensors (buffers, those of objects) are written into its JSON up to so many bytes."""

MAX_BYTES = 1 << 46
_SUMMARY = "checkpoint.json"
_NAME = re.compile(r"step-(\d{8,})")
_PARTIAL = re.compile(r"\.partial-(\d{8,})-(\d+)")
_READ_BYTES = 4 << 20

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
    partial = _partial(directory, stored.step, epoch)
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
        folder, tensors = _shard(rank), _all_names(stored)
    else:
        tensors = {piece.name: place for piece, place in pieces if piece.is_private}
        if sum(place.nbytes for place in tensors.values()) > PRIVATE_LIMIT_BYTES:
            folder = f"private-{rank:05d}"
        else:
            inline = {name: _text(place) for name, place in tensors.items()}
    files: dict[str, list[Any]] = {}
    if folder is not None:
        shutil.rmtree(partial / folder, ignore_errors=True)  # of an earlier try
        writer = dcp.FileSystemWriter(
            partial / folder, single_file_per_rank=True, sync_files=True, per_thread_copy_ahead=0
        )
        dcp.save(tensors, storage_writer=writer, no_dist=True)
        _sync_directory(partial / folder)
        for path in sorted((partial / folder).iterdir()):
            files[f"{folder}/{path.name}"] = [path.stat().st_size, _file_checksum(path)]
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
    _write_file(partial / _rank_file(rank), b'{"head":' + stored.head() + b"," + text[1:])


def _all_names(stored: Stored) -> dict[str, torch.Tensor]:
    """Every tensor, those of modules under each of their names, as a state_dict() has them."""
    named = {piece.name: place for piece, place in zip(stored.layout.pieces, stored.places, strict=True)}
    for name, kind, position in stored.layout.aliases:
        if kind == MODULE:
            named[name] = stored.places[position]
    return named


@contextlib.contextmanager
def _removed_on_failure(partial: Path, rank: int) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for name in (_shard(rank), f"private-{rank:05d}"):
            shutil.rmtree(partial / name, ignore_errors=True)
        for name in (_rank_file(rank), f".{_rank_file(rank)}"):
            with contextlib.suppress(OSError):
                (partial / name).unlink()
        raise


def _cause(error: CheckpointException) -> str:
    """The reason inside what torch.distributed.checkpoint raises, in one line."""
    reasons = [str(failure[0]) or type(failure[0]).__name__ for failure in error.failures.values()]
    return (reasons or [str(error)])[0].splitlines()[0]


# ---- publishing, finding, removing ----


def publish(directory: Path, step: int, world_size: int, *, epoch: int) -> Path:
    """Makes the checkpoint of `step` that all ranks have written in `epoch` visible; answers its path.

    Raises StateError naming what is missing or does not fit, or the path that cannot be written; then there
    is no such checkpoint, and those before are as they were. One of this step that is there already stays.
    """
    partial, path = _partial(directory, step, epoch), directory / f"step-{step:08d}"
    if _is_complete(path):  # before a failure all went back behind it; the bits are the same
        shutil.rmtree(partial, ignore_errors=True)
        return path
    try:
        files = _all_files(partial, step, world_size, epoch)
        content = {"version": VERSION, "step": step, "epoch": epoch, "world_size": world_size, "files": files}
        text = json.dumps(content, separators=(",", ":")).encode("ascii")
        summary = b'{"xxh3":"%s","content":%s}' % (xxhash.xxh3_128_hexdigest(text).encode(), text)
        _write_file(partial / _SUMMARY, summary)
        if path.exists():
            path.rename(directory / f".damaged-{step:08d}-{os.getpid()}-{epoch}")
        partial.rename(path)
        _sync_directory(directory)
    except OSError as error:
        raise StateError(f"the checkpoint of step {step} in {path}: {error}") from error
    return path


def _all_files(partial: Path, step: int, world_size: int, epoch: int) -> dict[str, list[Any]]:
    """Every rank's files with sizes and checksums; StateError if there is anything that does not fit."""
    files: dict[str, list[Any]] = {}
    keys: dict[int, str] = {}
    for rank in range(world_size):
        path = partial / _rank_file(rank)
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            raise StateError(f"the checkpoint of step {step}: rank {rank} has not written {path}") from None
        content = read_json(text, str(path))
        try:
            found = (content["rank"], content["step"], content["epoch"])
            owner, keys[rank] = int(content["owner"]), str(content["key"])
            own_files = dict(content["files"])
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"{path}: not what a rank writes: {error}") from None
        if found != (rank, step, epoch):
            raise StateError(f"{path}: rank, step and epoch are {found}, expected {(rank, step, epoch)}")
        if not 0 <= owner <= rank or keys[owner] != keys[rank]:
            raise StateError(
                f"{path}: rank {owner} shall have its parameters and optimizer state, but has others"
            )
        if owner == rank and not any(name.startswith(f"{_shard(rank)}/") for name in own_files):
            raise StateError(f"{path}: {_shard(rank)} is missing")
        for name, (size, _) in own_files.items():
            if _size_of(partial / name) != size:
                raise StateError(f"{partial / name}: missing, or not {size} bytes long")
        files |= own_files
        files[path.name] = [len(text), xxhash.xxh3_128_hexdigest(text)]
    return files


def complete(directory: Path) -> list[Path]:
    """The checkpoints of which everything is there, newest first. Damage inside a file is found by `read`."""
    found = [path for path, _ in _numbered(directory, _NAME) if _is_complete(path)]
    return sorted(found, key=step_of, reverse=True)


def newest(directory: Path) -> Path | None:
    """The newest checkpoint of which everything is there, or None."""
    return next(iter(complete(directory)), None)


def step_of(path: Path) -> int:
    """The number of steps done at a checkpoint; ValueError if `path` is not named like one."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path}: a checkpoint is named step-00000100")
    return int(match.group(1))


def prune(directory: Path, keep: int = 2) -> None:
    """Removes all complete checkpoints but the newest `keep` (at least one), and what was left unfinished by
    an earlier epoch or before the newest. Raises StateError naming the path that cannot be removed."""
    whole = complete(directory)
    try:
        for path in whole[max(keep, 1) :]:
            hidden = directory / f".removing-{path.name}"
            path.rename(hidden)
            shutil.rmtree(hidden)
        for path in _leftovers(directory, whole[0] if whole else None):
            shutil.rmtree(path)
    except OSError as error:
        raise StateError(f"checkpoints in {directory}: {error}") from error


def _leftovers(directory: Path, newest_one: Path | None) -> list[Path]:
    removing = [path for path, _ in _numbered(directory, re.compile(r"\.(removing|damaged)-.+"))]
    partials = [(path, int(match[1]), int(match[2])) for path, match in _numbered(directory, _PARTIAL)]
    done_step, done_epoch = -1, -1
    if newest_one is not None:
        summary = _summary(newest_one)
        done_step, done_epoch = summary["step"], summary["epoch"]
    last_epoch = max([done_epoch, *[epoch for _, _, epoch in partials]])
    stale = [
        path
        for path, step, epoch in partials
        if epoch < last_epoch or (epoch == done_epoch and step <= done_step)
    ]
    return removing + stale


# ---- reading ----


def read(path: Path, rank: int) -> Stored:
    """What `rank` had written in the checkpoint at `path`, every byte checked.

    Raises StateError naming the file that is missing, cannot be read, or is not what was written.
    """
    try:
        return _read(path, rank)
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
def _read(path: Path, rank: int) -> Stored:
    summary = _summary(path)
    world_size = int(summary["world_size"])
    if not 0 <= rank < world_size:
        raise StateError(f"{path}: it is of {world_size} ranks, there is no rank {rank} in it")
    expected = summary["files"]
    text = (path / _rank_file(rank)).read_bytes()
    if expected[_rank_file(rank)] != [len(text), xxhash.xxh3_128_hexdigest(text)]:
        raise StateError(f"{path / _rank_file(rank)}: it has changed since it was written (checksum)")
    content = read_json(text, str(path / _rank_file(rank)))
    stored = stored_from(content["head"], max_bytes=MAX_BYTES)
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
        _load(path, _shard(rank), shared | own, expected)
    else:
        _load(path, _shard(owner), shared, expected)
        _load(path, f"private-{rank:05d}", own, expected)
    if stored.replica_key() != content["key"]:
        raise StateError(
            f"{path / _shard(owner)}: these are not the parameters and the optimizer state of rank {rank}"
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
        if _size_of(path / name) != size or _file_checksum(path / name) != checksum:
            raise StateError(f"{path / name}: it has changed since it was written (checksum)")
    dcp.load(tensors, checkpoint_id=path / folder, no_dist=True)


def _fill(piece: Piece, place: torch.Tensor, text: str) -> None:
    try:
        data = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise StateError(f"{piece.name}: {error}") from None
    if len(data) != piece.nbytes:
        raise StateError(f"{piece.name}: {len(data)} bytes, expected {piece.nbytes}")
    byte_view(place)[:] = data


def _summary(path: Path) -> dict[str, Any]:
    """What is in checkpoint.json; StateError if that is not what was written."""
    text = (path / _SUMMARY).read_bytes()
    content = read_json(text, str(path / _SUMMARY))
    inner = content.get("content")
    written = json.dumps(inner, separators=(",", ":")).encode("ascii")
    if not isinstance(inner, dict) or content.get("xxh3") != xxhash.xxh3_128_hexdigest(written):
        raise StateError(f"{path / _SUMMARY}: it has changed since it was written (checksum)")
    if inner.get("version") != VERSION:
        raise StateError(f"{path / _SUMMARY}: version {inner.get('version')!r}, {VERSION} is read here")
    return inner


def _is_complete(path: Path) -> bool:
    try:
        files = _summary(path)["files"]
        return all(_size_of(path / name) == size for name, (size, _) in files.items())
    except (OSError, StateError):
        return False


# ---- files ----


def _partial(directory: Path, step: int, epoch: int) -> Path:
    return directory / f".partial-{step:08d}-{epoch}"


def _shard(rank: int) -> str:
    return f"shard-{rank:05d}"


def _rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def _text(tensor: torch.Tensor) -> str:
    return base64.b64encode(byte_view(tensor)).decode("ascii")


def _numbered(directory: Path, name: re.Pattern[str]) -> list[tuple[Path, re.Match[str]]]:
    try:
        paths = sorted(directory.iterdir())
    except FileNotFoundError:
        return []
    return [(path, match) for path in paths if (match := name.fullmatch(path.name))]


def _size_of(path: Path) -> int:
    """In bytes; -1 if it is not there."""
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return -1


def _write_file(path: Path, data: bytes) -> None:
    """All of it on the disk under its name, or nothing under that name."""
    hidden = path.with_name(f".{path.name}")
    with open(hidden, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    hidden.rename(path)
    _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _file_checksum(path: Path) -> str:
    hasher = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while data := file.read(_READ_BYTES):
            hasher.update(data)
    return hasher.hexdigest()
