"""The directory of checkpoints on the shared file system: which are whole, which are newest, which may go.

Every rank writes into a hidden directory of its step and epoch; `publish` checks that nothing is missing and
renames it. So what has a name `step-…` is whole, unless it was damaged later. No torch here: the agent, which
leads the job, uses this too.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import xxhash

from tm_slurm.state.errors import StateError
from tm_slurm.state.json_object import read_json

VERSION = 1
_SUMMARY = "checkpoint.json"
_NAME = re.compile(r"step-(\d{8,})")
_PARTIAL = re.compile(r"\.partial-(\d{8,})-(\d+)")
_HIDDEN = re.compile(r"\.(removing|damaged)-.+")
_READ_BYTES = 4 << 20


def checkpoints_of(job_dir: Path) -> Path:
    """Where a job's checkpoints are."""
    return job_dir / "checkpoints"


def publish(directory: Path, step: int, world_size: int, *, epoch: int) -> Path:
    """Makes the checkpoint of `step` that all ranks have written in `epoch` visible; answers its path.

    Raises StateError naming what is missing or does not fit, or the path that cannot be written; then there
    is no such checkpoint, and those before are as they were. One of this step that is there already stays.
    """
    partial, path = partial_path(directory, step, epoch), directory / f"step-{step:08d}"
    if _is_complete(path) and not _is_damaged(path):  # all went back behind it; the bits are the same
        shutil.rmtree(partial, ignore_errors=True)
        return path
    try:
        files = _all_files(partial, step, world_size, epoch)
        content = {"version": VERSION, "step": step, "epoch": epoch, "world_size": world_size, "files": files}
        text = json.dumps(content, separators=(",", ":")).encode("ascii")
        summary = b'{"xxh3":"%s","content":%s}' % (xxhash.xxh3_128_hexdigest(text).encode(), text)
        write_file(partial / _SUMMARY, summary)
        if path.exists():
            path.rename(directory / f".damaged-{step:08d}-{os.getpid()}-{epoch}")
        partial.rename(path)
        sync_directory(directory)
    except OSError as error:
        raise StateError(f"the checkpoint of step {step} in {path}: {error}") from error
    return path


def _all_files(partial: Path, step: int, world_size: int, epoch: int) -> dict[str, list[Any]]:
    """Every rank's files with sizes and checksums; StateError if there is anything that does not fit."""
    files: dict[str, list[Any]] = {}
    keys: dict[int, str] = {}
    for rank in range(world_size):
        path = partial / rank_file(rank)
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
        if owner == rank and not any(name.startswith(f"{shard_name(rank)}/") for name in own_files):
            raise StateError(f"{path}: {shard_name(rank)} is missing")
        for name, (size, _) in own_files.items():
            if size_of(partial / name) != size:
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
    removing = [path for path, _ in _numbered(directory, _HIDDEN)]
    partials = [(path, int(match[1]), int(match[2])) for path, match in _numbered(directory, _PARTIAL)]
    done_step, done_epoch = -1, -1
    if newest_one is not None:
        summary = summary_of(newest_one)
        done_step, done_epoch = summary["step"], summary["epoch"]
    last_epoch = max([done_epoch, *[epoch for _, _, epoch in partials]])
    stale = [
        path
        for path, step, epoch in partials
        if epoch < last_epoch or (epoch == done_epoch and step <= done_step)
    ]
    return removing + stale


def summary_of(path: Path) -> dict[str, Any]:
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
        files = summary_of(path)["files"]
        return all(size_of(path / name) == size for name, (size, _) in files.items())
    except (OSError, StateError):
        return False


def _is_damaged(path: Path) -> bool:
    """Whether some file of a complete checkpoint is not what was written. Reads all of it."""
    try:
        files = summary_of(path)["files"]
        return any(file_checksum(path / name) != checksum for name, (_, checksum) in files.items())
    except (OSError, StateError):
        return True


# ---- files ----


def partial_path(directory: Path, step: int, epoch: int) -> Path:
    return directory / f".partial-{step:08d}-{epoch}"


def shard_name(rank: int) -> str:
    return f"shard-{rank:05d}"


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def _numbered(directory: Path, name: re.Pattern[str]) -> list[tuple[Path, re.Match[str]]]:
    try:
        paths = sorted(directory.iterdir())
    except FileNotFoundError:
        return []
    return [(path, match) for path in paths if (match := name.fullmatch(path.name))]


def size_of(path: Path) -> int:
    """In bytes; -1 if it is not there."""
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return -1


def write_file(path: Path, data: bytes) -> None:
    """All of it on the disk under its name, or nothing under that name."""
    hidden = path.with_name(f".{path.name}")
    with open(hidden, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    hidden.rename(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_checksum(path: Path) -> str:
    hasher = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while data := file.read(_READ_BYTES):
            hasher.update(data)
    return hasher.hexdigest()
