"""tm_slurm: PyTorch training on Slurm that moves off a drained or dying node in about one step.

What a training script uses: `run`, `Runtime`, `Role`, `shares`, `options`. Nothing here imports torch until
one of them is asked for, so that the command line stays quick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tm_slurm.runtime import Role, Runtime, Share, options, run, shares

__version__ = "0.1.0"
__all__ = ["Role", "Runtime", "Share", "__version__", "options", "run", "shares"]
_OF_THE_RUNTIME = {*__all__} - {"__version__"}


def __getattr__(name: str) -> Any:
    if name in _OF_THE_RUNTIME:
        import tm_slurm.runtime

        return getattr(tm_slurm.runtime, name)
    raise AttributeError(f"module 'tm_slurm' has no attribute {name!r}")
