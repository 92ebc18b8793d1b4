"""The vote: one tiny all-reduce a step, between computing gradients and applying them.

It tells every rank at the same boundary that a switch is due, or a snapshot, or that the step must not be
applied. One leaving rank carries the new epoch into it (MAX), so that nobody else needs a message, and that
rank alone decides whether a late cancellation still comes in time.
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


def failure_in(error: BaseException) -> RuntimeError | None:
    """The failure of somebody else that `error` is or comes from: a pipeline's stage, for one, raises an
    error of its own from what a collective in its forward or backward pass has raised."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        if isinstance(link, FAILURES):
            return link
        seen.add(id(link))
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return None


SNAPSHOT = 1
CHECKPOINT = 2
PRIVATE = 4
"""What the pacer, rank 0, may ask of all ranks at the boundary after the vote; PRIVATE: that they tell their
buddies their private state at the beginning of the next step."""

COMPLETE_SHIFT = 8
"""Above the flags, with SNAPSHOT: one more than the step of the newest complete snapshot (0: none)."""


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

    def disarm(self) -> None:
        """Whatever was to be carried is over: a failure came first."""
        with self._lock:
            self._armed = 0


class Vote:
    """Held once a step: by the first registered optimizer's step, or by `hold` at the end of a step without
    one.

    `before`: called first; what it raises is a failure before the vote. `may_switch`: whether an armed epoch
    may be carried into it; else the next one carries it. `flags`: what the pacer asks for (0
    at every other rank). `nonfinite`: whether this rank's gradients are not all finite. `failed`: called when
    the all-reduce fails; it raises Discarded, or returns when the vote has succeeded all the same. `refused`:
    called at every rank when any rank's gradients were not finite.
    """

    def __init__(
        self,
        ballot: Ballot,
        *,
        before: Callable[[], None] | None = None,
        may_switch: Callable[[], bool] = lambda: True,
        failed: Callable[[RuntimeError], None] | None = None,
        flags: Callable[[], int] | None = None,
        nonfinite: Callable[[], bool] | None = None,
        refused: Callable[[], None] | None = None,
    ) -> None:
        self._ballot = ballot
        self._before = before
        self._may_switch = may_switch
        self._failed = failed
        self._flags = flags
        self._nonfinite = nonfinite
        self._refused = refused
        self._tensor = torch.zeros(3, dtype=torch.int64)
        self.is_open = False
        self.was_held = False
        """in this step"""
        self.agreed_epoch = 0
        self.agreed_flags = 0

    def watch(self, values: Iterable[Any]) -> None:
        """Hold the vote when one of the optimizers among `values` is about to apply a step."""
        for value in values:
            if isinstance(value, torch.optim.Optimizer):
                value.register_step_pre_hook(self._before_step)

    def _before_step(self, *_: Any) -> None:
        self.hold(applying=True)

    def open(self) -> None:
        """A step begins: its vote has not been held."""
        self.is_open, self.was_held = True, False
        self.agreed_epoch = self.agreed_flags = 0

    def hold(self, *, applying: bool = False) -> None:
        """Vote, unless this step already has; `applying`: gradients are about to be applied. Afterwards
        `agreed_epoch` is the newest epoch that any rank carries, `agreed_flags` what the pacer asks for."""
        if not self.is_open:
            return
        if self._before is not None:
            self._before()
        tensor = self._tensor
        tensor[0] = self._ballot.carry() if self._may_switch() else 0
        tensor[1] = self._flags() if self._flags is not None else 0
        tensor[2] = int(self._nonfinite()) if applying and self._nonfinite is not None else 0
        try:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        except FAILURES as error:
            if self._failed is None:
                raise
            self._failed(error)
            self.is_open, self.was_held = False, True
            return
        self.is_open, self.was_held = False, True
        agreed_epoch, agreed_flags, refused = (int(value) for value in tensor)
        if refused and self._refused is not None:
            self._refused()
        self.agreed_epoch, self.agreed_flags = agreed_epoch, agreed_flags
