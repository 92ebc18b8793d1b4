"""The vote: one tiny all-reduce a step, between computing gradients and applying them.

It tells every rank at the same boundary that a switch is due. One leaving rank carries the new epoch into it
(MAX), so that nobody else needs a message, and that rank alone decides whether a late cancellation still
comes in time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from tm_slurm.comm import CollectiveTimeout, GroupInterrupted, PeerLost

FAILURES = (GroupInterrupted, PeerLost, CollectiveTimeout)
"""What a collective raises when somebody else has failed."""


class Discarded(Exception):
    """The step in progress counts for nothing: it will be done again."""


class Ballot:
    """What this rank brings to the vote. The listening thread arms and withdraws, the training thread
    carries."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._armed = 0
        self._carried = 0

    def arm(self, epoch: int) -> None:
        """Carry `epoch` into the next vote."""
        with self._lock:
            if epoch > self._carried:
                self._armed = epoch

    def withdraw(self, epoch: int) -> bool:
        """Take `epoch` back; False when a vote has already carried it."""
        with self._lock:
            if self._carried >= epoch:
                return False
            self._armed = 0
            return True

    def carry(self) -> int:
        """The epoch to bring, 0 for none; from now on it cannot be taken back."""
        with self._lock:
            self._carried = max(self._carried, self._armed)
            return self._armed


class Vote:
    """Held once a step: by the first registered optimizer's step, or by `hold` at the end of a step without
    one."""

    def __init__(self, ballot: Ballot, failed: Callable[[RuntimeError], None] | None = None) -> None:
        self._failed = failed
        self._ballot = ballot
        self._tensor = torch.zeros(1, dtype=torch.int64)
        self._open = False
        self.agreed_epoch = 0

    def watch(self, values: Iterable[Any]) -> None:
        """Hold the vote when one of the optimizers among `values` is about to apply a step."""
        for value in values:
            if isinstance(value, torch.optim.Optimizer):
                value.register_step_pre_hook(self._before_step)

    def _before_step(self, *_: Any) -> None:
        self.hold()

    def open(self) -> None:
        """A step begins: its vote has not been held."""
        self._open = True

    def hold(self) -> None:
        """Vote, unless this step already has. Afterwards `agreed_epoch` is the newest epoch that any rank
        carries."""
        if not self._open:
            return
        self._open = False
        self._tensor[0] = self._ballot.carry()
        try:
            dist.all_reduce(self._tensor, op=dist.ReduceOp.MAX)
        except FAILURES as error:
            if self._failed is None:
                raise
            self._failed(error)
            return
        self.agreed_epoch = int(self._tensor[0])
