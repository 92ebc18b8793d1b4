"""Real text as bytes, and a sampler that is a function of seed, step and rank alone."""

from __future__ import annotations

import functools
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from tm_slurm.examples.char_gpt_options import DataOptions, OptionsError

_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_VALIDATION_STREAM = (1 << 64) - 1  # a rank that does not exist


@dataclass(frozen=True)
class Text:
    """Bytes to train on and, from other files or another region, to validate on."""

    train: NDArray[np.uint8]
    validation: NDArray[np.uint8]
    fingerprint: str

    def unigram_entropy(self) -> float:
        """Bits per byte of the validation text for a model that only knows how often each byte occurs."""
        counts = np.bincount(self.validation, minlength=256)
        shares = counts[counts > 0] / counts.sum()
        return float(-(shares * np.log2(shares)).sum())


class Batches:
    """A rank's batches. Its state is whose they are, and which text every node must have read."""

    def __init__(self, text: Text, *, batch_size: int, context: int, seed: int, rank: int) -> None:
        shortest = min(len(text.train), len(text.validation))
        if shortest <= context + 1:
            raise OptionsError(f"train.options.data: {shortest} bytes are too few for a context of {context}")
        self.text = text
        self.batch_size = batch_size
        self.context = context
        self._seed = seed
        self._rank = rank

    def training(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of a step, [batch, context] each: random places in the training text."""
        return self._draw(self.text.train, self._rank, step)

    def validation(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The same for the validation text: batch `number` is the same on every rank and at every step."""
        return self._draw(self.text.validation, _VALIDATION_STREAM, number)

    def _draw(self, text: NDArray[np.uint8], stream: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        key = np.array([self._seed, stream], dtype=np.uint64)
        source = np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, number]))
        starts = source.integers(0, len(text) - self.context - 1, self.batch_size, endpoint=True)
        windows = torch.from_numpy(text[starts[:, None] + np.arange(self.context + 1)].astype(np.int64))
        return windows[:, :-1], windows[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"text": self.text.fingerprint, "seed": self._seed, "rank": self._rank}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["text"] != self.text.fingerprint:
            raise ValueError(
                f"this node reads another text: its fingerprint is {self.text.fingerprint}, "
                f"expected {state['text']}; every node needs the same files"
            )
        self._seed, self._rank = state["seed"], state["rank"]


def read_text(options: DataOptions) -> Text:
    """The text that the options name; read once a process. Raises OptionsError if there is none."""
    return _read_text(tuple(options.paths), options.max_bytes, options.validation_fraction)


@functools.lru_cache(maxsize=1)
def _read_text(paths: tuple[str, ...], max_bytes: int, validation_fraction: float) -> Text:
    """Every n-th file is for validation; the end of the text, where there are too few files for that."""
    contents: list[bytes] = []
    total = 0
    for path in _files(paths):
        content = _content(path)[: max_bytes - total]
        if content:
            contents.append(content)
            total += len(content)
        if total >= max_bytes:
            break
    if not total:
        where = ", ".join(paths) or "the standard library"
        raise OptionsError(f"train.options.data.paths: no text found in {where}")
    every = max(2, round(1 / validation_fraction))
    if len(contents) >= 2 * every:
        validation = b"".join(contents[every - 1 :: every])
        train = b"".join(content for number, content in enumerate(contents, 1) if number % every)
    else:
        whole = b"".join(contents)
        cut = len(whole) - max(1, int(len(whole) * validation_fraction))
        train, validation = whole[:cut], whole[cut:]
    fingerprint = xxhash.xxh3_128_hexdigest(train) + xxhash.xxh3_128_hexdigest(validation)
    return Text(np.frombuffer(train, np.uint8), np.frombuffer(validation, np.uint8), fingerprint)


def _files(paths: tuple[str, ...]) -> list[Path]:
    if not paths:
        library = Path(sysconfig.get_path("stdlib"))
        found = (path for path in library.rglob("*.py") if path.is_file())
        kept = (path for path in found if not _SKIPPED_FOLDERS & set(path.relative_to(library).parts))
        return sorted(kept, key=lambda path: path.relative_to(library).as_posix())
    files: list[Path] = []
    for name in paths:
        place = Path(name).expanduser()
        if place.is_dir():
            inside = (path for path in place.rglob("*") if path.is_file())
            files.extend(sorted(inside, key=lambda path: path.relative_to(place).as_posix()))
        elif place.is_file():
            files.append(place)
        else:
            raise OptionsError(f"train.options.data.paths: {name} is neither a file nor a folder")
    return files


def _content(path: Path) -> bytes:
    """The file's bytes if it is text, else none."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise OptionsError(f"train.options.data.paths: {path} cannot be read: {error.strerror}") from error
    return b"" if b"\0" in content[:4096] else content
