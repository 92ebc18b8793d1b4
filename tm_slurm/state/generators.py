"""The random generators: state of every rank, without the user asking."""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tm_slurm.state.errors import StateError

GENERATOR_TYPES = (torch.Generator, np.random.Generator, random.Random)
_WORDS = struct.Struct("<625I")


def read_generators() -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's global generators, and of the current CUDA device's if one
    is in use.

    The values go through `tree.encode`. NumPy's is the one behind `np.random.seed`.
    """
    states: dict[str, Any] = {
        "python": _read_python(random.getstate()),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    if _cuda_in_use():
        states["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    return states


def write_generators(states: Mapping[str, Any]) -> None:
    """Sets the global generators to what `read_generators` gave; a CUDA state only where one is in use."""
    try:
        random.setstate(_write_python(states["python"]))
        np.random.set_state(states["numpy"])
        torch.set_rng_state(_byte_tensor(states["torch"]))
        if "cuda" in states and _cuda_in_use():
            torch.cuda.set_rng_state(_byte_tensor(states["cuda"]))
    except (KeyError, TypeError, ValueError, RuntimeError, struct.error) as error:
        raise StateError(
            f"generators: not a state that these generators take: {type(error).__name__}: {error}"
        ) from None


def read_generator(generator: Any, path: str) -> dict[str, Any]:
    """The state of a generator of the user's: torch.Generator, numpy.random.Generator or random.Random."""
    if isinstance(generator, torch.Generator):
        return {"torch": generator.get_state().numpy().tobytes()}
    if isinstance(generator, np.random.Generator):
        return {"numpy": generator.bit_generator.state}
    if isinstance(generator, random.Random):
        return {"python": _read_python(generator.getstate())}
    raise StateError(f"{path}: {type(generator).__qualname__} is not a generator")


def write_generator(generator: Any, state: Mapping[str, Any], path: str) -> None:
    """Sets `generator`, in place, to what `read_generator` gave."""
    try:
        if isinstance(generator, torch.Generator):
            generator.set_state(_byte_tensor(state["torch"]))
        elif isinstance(generator, np.random.Generator):
            generator.bit_generator.state = state["numpy"]
        else:
            generator.setstate(_write_python(state["python"]))
    except (KeyError, TypeError, ValueError, RuntimeError, struct.error) as error:
        raise StateError(
            f"{path}: not a state that this generator takes: {type(error).__name__}: {error}"
        ) from None


def _cuda_in_use() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _byte_tensor(raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def _read_python(state: tuple[Any, ...]) -> Any:
    version, words, gauss = state
    if version == 3 and len(words) == 625:
        return (version, _WORDS.pack(*words), gauss)
    return state


def _write_python(state: Any) -> tuple[Any, ...]:
    version, words, gauss = state
    return (version, _WORDS.unpack(words) if isinstance(words, bytes) else words, gauss)
