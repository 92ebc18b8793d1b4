"""Shadow iterations: whole training steps, with every collective answered at once by its identity.

They make a joiner's first real step cost what any step costs: imports done, optimizer state there, DDP's
buckets rebuilt (that happens before the second forward, so there must be at least two), kernels compiled,
memory allocated.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

from tm_slurm.comm import Endpoint

LEAST_SHADOW_STEPS = 2


class Sandbox:
    """Of one process. While it is entered, its endpoint opens no link and waits for nobody."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def enter(self) -> None:
        self._endpoint.sandbox = True

    def leave(self) -> None:
        """From now on collectives are real. What the shadow iterations did to the state must be overwritten
        by now."""
        self._endpoint.sandbox = False

    def shadow_steps(self, count: int) -> Iterator[int]:
        """The numbers of the shadow iterations to run."""
        yield from range(max(count, LEAST_SHADOW_STEPS))
        gc.collect()
