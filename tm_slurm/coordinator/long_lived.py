"""Keeps Python's search for garbage from holding up a leader.

What a leader of thousands of nodes knows stays for long, and a full search looks at all of it: half a
second for 16,384 nodes, again and again while they come, in which nobody is heard. So what has survived a
search that took long is not looked at any more (gc.freeze); what is made later, is. A search is over before
anybody notices then, and of what is left out only cycles that end later stay: those of agents that go.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator

LONG_S = 0.02
"""Nobody notices a search that is shorter."""

OLDEST = 2
"""The generation that is looked at in a full search."""


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    """What survives a long search meanwhile is left out of the next one."""
    began_at = time.monotonic()

    def looked(phase: str, about: dict[str, int]) -> None:
        nonlocal began_at
        if phase == "start":
            began_at = time.monotonic()
        elif about["generation"] == OLDEST and time.monotonic() - began_at > LONG_S:
            gc.freeze()

    gc.callbacks.append(looked)
    try:
        yield
    finally:
        gc.callbacks.remove(looked)
        gc.unfreeze()
