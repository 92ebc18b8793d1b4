"""Names of torch dtypes as they travel, and the only dtypes that do."""

from __future__ import annotations

import torch

from tm_slurm.state.errors import StateError


def _movable_dtypes() -> dict[str, torch.dtype]:
    found = {}
    for attribute in vars(torch).values():
        if isinstance(attribute, torch.dtype):
            name = str(attribute).removeprefix("torch.")
            if not name.startswith(("q", "bits")):  # a quantized tensor is more than its bytes
                found[name] = attribute
    return found


MOVABLE = _movable_dtypes()
NAMES = {dtype: name for name, dtype in MOVABLE.items()}


def dtype_name(dtype: torch.dtype, where: str) -> str:
    """The travelling name of `dtype` ("float32"); StateError naming `where` if it does not travel."""
    name = NAMES.get(dtype)
    if name is None:
        raise StateError(
            f"{where}: tensors of {dtype} cannot be moved bit for bit; keep a plain dtype in the state"
        )
    return name


def dtype_from_name(name: object, where: str) -> torch.dtype:
    """The dtype of a travelling name; StateError naming `where` for anything else."""
    dtype = MOVABLE.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise StateError(
            f"{where}: {name!r} is not a dtype that travels; is the sender another torch version?"
        )
    return dtype
