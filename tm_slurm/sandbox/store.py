"""Recordings in the job directory, one folder a role class: `manifest.json` and `tensors.bin`.

A tensor that was an output many times is there once (by a hash of its content), so what a broadcast, an
all-gather and the next step share costs nothing. A folder appears whole or not at all.

    recordings/first-1f3a…/manifest.json      {"version":1,"ranks":[0,4],"calls":[…],"tensors":[…]}
                          /tensors.bin        each tensor at a multiple of 64 bytes
"""

from __future__ import annotations

import json
import mmap
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from tm_slurm.sandbox.recording import Call, Recording

VERSION = 1
ALIGNMENT = 64
SPARE_BYTES = 64 << 20
"""So much of the disk a recording leaves to the others."""

DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}


class RecordingError(RuntimeError):
    """A recording cannot be kept, or what is there is not one; the message says why."""


@dataclass(frozen=True)
class Stored:
    """`bytes`: on the disk; `recorded_bytes`: of all outputs before equal ones were kept once."""

    bytes: int
    recorded_bytes: int
    calls: int
    steps: int


def write(directory: Path, recording: Recording) -> Stored:
    """Keep a recording in `directory`/CLASS, over what may be there.

    Raises RecordingError when the disk is full or cannot be written; nothing is left of it then."""
    index: dict[str, int] = {}
    tensors: list[torch.Tensor] = []

    def place(tensor: torch.Tensor) -> int:
        content = _bytes(tensor)
        key = f"{tensor.dtype}{list(tensor.shape)}{xxhash.xxh3_128_hexdigest(content)}"
        if key not in index:
            index[key] = len(tensors)
            tensors.append(tensor)
        return index[key]

    calls = [
        [c.step, c.name, c.group, c.peer, c.source, [None if t is None else place(t) for t in c.outputs]]
        for c in recording.calls
    ]
    needed = sum(_padded(t.nbytes) for t in tensors)

    def fill(folder: Path) -> int:
        free = shutil.disk_usage(folder).free
        if needed + SPARE_BYTES > free:
            raise RecordingError(
                f"the recording of {recording.role_class} needs {needed >> 20} MB, and {folder.parent} has "
                f"{free >> 20} MB left"
            )
        entries = []
        with (folder / "tensors.bin").open("wb") as file:
            for tensor in tensors:
                content = _bytes(tensor)
                kind = str(tensor.dtype).removeprefix("torch.")
                entries.append([kind, list(tensor.shape), file.tell(), xxhash.xxh3_64_intdigest(content)])
                file.write(content)
                file.write(bytes(_padded(len(content)) - len(content)))
        text = json.dumps({**_head(recording), "calls": calls, "tensors": entries})
        (folder / "manifest.json").write_text(text)
        return needed + len(text)

    size = _publish(directory, recording.role_class, fill)
    return Stored(size, recording.nbytes, len(calls), recording.steps)


def write_refusal(directory: Path, recording: Recording, why: str) -> None:
    """Say that there will be no recording of this class, so that nobody waits for one."""

    def fill(folder: Path) -> int:
        return (folder / "manifest.json").write_text(json.dumps({**_head(recording), "why": why}))

    _publish(directory, recording.role_class, fill)


def find(directory: Path, rank: int) -> Recording | None:
    """The recording of a rank's class; None while there is none. RecordingError when there will be none, or
    when it is damaged."""
    _check(directory)
    for manifest in sorted(directory.glob("[!.]*/manifest.json")):
        try:
            told = json.loads(manifest.read_bytes())
            if rank in told["ranks"]:
                return _read(manifest.parent, told)
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            raise RecordingError(f"{manifest}: not a recording: {error}") from None
    return None


def _check(directory: Path) -> None:
    if directory.exists() and not directory.is_dir():
        raise RecordingError(f"{directory} is in the way: recordings are kept in a folder of that name")


def roles_of(directory: Path) -> dict[str, list[int]]:
    """Role class → its ranks, of all classes of which there is a recording, or word that there will be none.
    RecordingError when a file is damaged, or there cannot be any."""
    _check(directory)
    found = {}
    for manifest in sorted(directory.glob("[!.]*/manifest.json")):
        try:
            told = json.loads(manifest.read_bytes())
            found[str(told["role_class"])] = [int(rank) for rank in told["ranks"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RecordingError(f"{manifest}: not a recording: {error}") from None
    return found


def _read(folder: Path, told: dict[str, Any]) -> Recording:
    if "why" in told:
        raise RecordingError(str(told["why"]))
    if told["version"] != VERSION:
        raise RecordingError(f"{folder}: version {VERSION} was expected, found {told['version']}")
    tensors = _tensors(folder / "tensors.bin", told["tensors"])
    calls = [
        Call(step, name, group, peer, source, [None if i is None else tensors[i] for i in outputs])
        for step, name, group, peer, source, outputs in told["calls"]
    ]
    return Recording(told["role_class"], told["ranks"], told["layout"], calls)


def _tensors(path: Path, entries: Sequence[Any]) -> list[torch.Tensor]:
    """Views of the file; its pages are read when they are played."""
    size = path.stat().st_size
    if size == 0:
        return [torch.empty(shape, dtype=DTYPES[kind]) for kind, shape, _, _ in entries]
    with path.open("rb") as file:
        content = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    found = []
    for kind, shape, offset, digest in entries:
        dtype = DTYPES[kind]
        count = 1
        for extent in shape:
            count *= int(extent)
        length = count * dtype.itemsize
        if count < 0 or offset < 0 or offset + length > size:
            raise ValueError(f"{path.name} has {size} bytes, a tensor would end at {offset + length}")
        if xxhash.xxh3_64_intdigest(memoryview(content)[offset : offset + length]) != digest:
            raise ValueError(f"the {length} bytes at {offset} of {path.name} are not those that were written")
        flat = (
            torch.frombuffer(content, dtype=dtype, count=count, offset=offset)
            if count
            else torch.empty(0, dtype=dtype)
        )
        found.append(flat.reshape(shape))
    return found


def _head(recording: Recording) -> dict[str, Any]:
    about = {"role_class": recording.role_class, "ranks": list(recording.ranks), "layout": recording.layout}
    return {"version": VERSION, **about, "steps": recording.steps}


def _publish(directory: Path, name: str, fill: Callable[[Path], int]) -> int:
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=directory))
        try:
            size = fill(fresh)
            final = directory / name
            if final.exists():
                shutil.rmtree(final)
            fresh.rename(final)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise RecordingError(f"the recording of {name} cannot be written to {directory}: {reason}") from None
    return size


def _bytes(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _padded(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT


def recordings_of(job_dir: Path) -> Path:
    """Where a job keeps them."""
    return job_dir / "recordings"
