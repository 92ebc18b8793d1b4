"""What a rank process says to people."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """One line, in this process's log."""
    print(f"tm_slurm: {text}", file=sys.stderr, flush=True)
