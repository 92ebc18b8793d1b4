"""The vote: one tiny all-reduce a step, between computing gradients and applying them.

It tells every rank at the same boundary that a switch is due, or a snapshot, or that the step must not be
applied. One leaving rank carries the new epoch into it (MAX), so that nobody else needs a message, and that
rank alone decides whether a late cancellation still comes in time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

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
        self._parameters: set[int] = set()
        self._optimizers: set[int] = set()
        self._has_closure = False
        """an optimizer of the state is at its step, and the vote comes within: it may use others for it"""
        self.is_open = False
        self.was_held = False
        """in this step"""
        self.agreed_epoch = 0
        self.agreed_flags = 0

    def watch(self, state: Mapping[str, Any]) -> None:
        """Hold the vote when one of the optimizers of `state` is about to apply a step. ValueError for one
        that only wraps another."""
        for key, value in state.items():
            if isinstance(value, torch.nn.Module):
                self._parameters.update(map(id, value.parameters()))
            if not isinstance(value, torch.optim.Optimizer):
                continue
            if not hasattr(value, "_optimizer_step_pre_hooks"):
                raise ValueError(
                    f"{key}: a {type(value).__name__} only wraps an optimizer: let build() return the one "
                    "inside it"
                )
            value.register_step_pre_hook(self._before_step)
            self._optimizers.add(id(value))
        _Watching.begin(self)

    def check_known(self, optimizer: torch.optim.Optimizer) -> None:
        """ValueError when one that is not in the state is about to change its parameters."""
        if not self.is_open or self._has_closure or id(optimizer) in self._optimizers:
            return
        if any(
            id(parameter) in self._parameters for g in optimizer.param_groups for parameter in g["params"]
        ):
            raise ValueError(
                f"an optimizer ({type(optimizer).__name__}) that build() has not returned is about to change "
                "parameters: return it from build(), or its state stays behind when the rank moves"
            )

    def _before_step(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An optimizer that is given a closure computes its gradients in there: the vote comes after it."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self.hold(applying=True)
            return None
        self._has_closure = True

        def then_vote() -> Any:
            loss = closure()
            self.hold(applying=True)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": then_vote}
        return (args[0], then_vote, *args[2:]), kwargs

    def open(self) -> None:
        """A step begins: its vote has not been held."""
        self.is_open, self.was_held, self._has_closure = True, False, False
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


class _Watching:
    """The vote that the optimizers of this process are for: torch tells of all of them at one place."""

    vote: ClassVar[Vote | None] = None
    is_told: ClassVar[bool] = False

    @classmethod
    def begin(cls, vote: Vote) -> None:
        cls.vote = vote
        if not cls.is_told:
            register_optimizer_step_pre_hook(cls._before_any_step)
            cls.is_told = True

    @classmethod
    def _before_any_step(cls, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if cls.vote is not None:
            cls.vote.check_known(optimizer)
