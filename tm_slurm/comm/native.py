"""Loads the native part; where it does not load, the error says in one line what mends it."""

from __future__ import annotations

import torch

AGAIN = "pip install --no-build-isolation --force-reinstall --no-deps . (in a checkout: make setup)"


def explained(error: ImportError) -> str:
    """What is wrong, and what to type."""
    if isinstance(error, ModuleNotFoundError):
        return f"the native part of tm_slurm is not built: {AGAIN}"
    words = str(error).partition("\n")[0]
    return (
        f"the native part of tm_slurm was built for another torch than {torch.__version__}: {AGAIN}; {words}"
    )


try:
    import tm_slurm.comm._tm  # noqa: F401
except ImportError as error:
    raise ImportError(explained(error)) from error
