"""A training loop that a framework owns, taken one step at a time.

The framework's loop runs in a greenlet of its own and comes back here before each step's first batch. So the
runtime decides what happens between two steps, as in a loop of its own: a vote, a switch, a hand-over, a
standby's wait. A failure of another rank in the middle of a step must not unwind the framework. Therefore
what can meet one is `contained`: the failure is handed to the runtime, and the rest of the framework's step
is void: nothing in it computes, applies or counts. The step that comes next is whichever the runtime says.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet

from tm_slurm.config import load
from tm_slurm.runtime import Role
from tm_slurm.runtime.vote import Discarded, failure_in

Fit = Callable[[Role], Any]


class Void(Exception):
    """Inside a void step, to leave an optimizer's step before it changes anything."""


class FrameworkLoop:
    """`do`, `finish` and `end` are the runtime's side; all else is for what runs inside the framework.

    `steps`: how many there are in all; `metrics`: what the step in progress has measured; `in_sandbox`:
    whether the steps now are those of a standby that warms up; `on_step`: told the number of each step that
    begins; `on_end`: called when there is none any more; `rewind`: takes back what the rest of a void step
    has drawn and changed.
    """

    def __init__(self, fit: Fit) -> None:
        self._fit = fit
        self._framework: greenlet | None = None
        self._runtime = getcurrent()
        self._state: dict[str, Any] = {}
        self.metrics: dict[str, Any] = {}
        self._step: int | None = None
        self.steps = 0
        self.is_void = False
        self.in_sandbox: Callable[[], bool] = lambda: False
        self.rewind: Callable[[], None] = lambda: None
        self.on_step: Callable[[int], None] = lambda step: None
        self.on_end: Callable[[], None] = lambda: None

    # ---- the runtime's side ----

    def build(self, role: Role) -> dict[str, Any]:
        """Have the framework build `role`; what it has then, as `build` of a script returns it. ValueError
        when it ends before its first step."""
        self.end()
        _tell_environment(role)
        self._runtime = getcurrent()
        self._framework = greenlet(self._fit)
        Current.loop = self
        self._framework.switch(role)
        if self._framework.dead:
            raise ValueError(
                "fit() has returned without a step: pass tm_slurm's callback to the trainer, and batches "
                "from tm_slurm.integrations.StepBatches"
            )
        return self._state

    def do(self, step: int) -> dict[str, Any]:
        """Have the framework do `step`; what it has measured. Raises what a failure of another rank has
        raised in there: from then on the rest of that step is void."""
        assert self._framework is not None
        if self._framework.dead:
            raise RuntimeError("the trainer was ended by what was raised in it before: see above")
        self.metrics = {}
        try:
            failure = self._framework.switch(step)
        except Exception as error:
            if self.in_sandbox():  # before this standby says that it is warm
                raise SystemExit(f"the trainer has ended in a shadow step: {error!r}") from error
            raise
        if self._framework.dead:
            raise ValueError(
                f"the trainer has ended by itself in step {step} of {self.steps}: leave it to run(steps=…) "
                f"to say how long it trains"
            )
        if failure is not None:
            raise failure
        return self.metrics

    def finish(self) -> None:
        """All steps are done: let the framework end its loop, and fit() return."""
        if self._framework is not None:
            self._framework.switch(None)
            if not self._framework.dead:
                raise RuntimeError(
                    "the trainer asks for another batch although it was told that all are done"
                )

    def end(self) -> None:
        """Unwind the framework's loop, whose role is no more."""
        framework, self._framework, self._state = self._framework, None, {}
        self.is_void = False
        self.on_step, self.on_end = lambda step: None, lambda: None
        if framework is not None and not framework.dead:
            framework.throw(GreenletExit)

    # ---- inside the framework ----

    def holds(self, state: Mapping[str, Any]) -> None:
        """The framework has built its model, optimizers and schedules: this is the state of the rank."""
        self._state = dict(state)

    def begin_step(self) -> int | None:
        """The next step to do; None when all are done."""
        if self.is_void:
            self.is_void = False  # the runtime has said already what comes after the failure
            self.rewind()
        else:
            self._step = self._runtime.switch(None)
        if self._step is None:
            self.on_end()
            return None
        self.on_step(self._step)
        return self._step

    def report(self, metrics: Mapping[str, Any]) -> None:
        """What the step in progress has measured; "loss" is shown to people."""
        if not self.is_void:
            self.metrics = dict(metrics)

    def contained(self, function: Callable[..., Any], otherwise: Callable[[], Any]) -> Callable[..., Any]:
        """`function`, which may meet a failure of another rank. What `otherwise` returns stands in for its
        result then, and as long as the step is void."""

        @functools.wraps(function)
        def contained(*args: Any, **kwargs: Any) -> Any:
            if self.is_void:
                return otherwise()
            try:
                return function(*args, **kwargs)
            except Exception as error:  # what a framework makes of a failed collective may be of any class
                if not self._is_disturbance(error):
                    raise
                failure = error
            self._hand_over(failure)
            return otherwise()

        return contained

    def contain_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """In a void step it changes nothing; a closure that it is given is called all the same, since the
        framework waits for what that returns."""
        apply = optimizer.step

        def step(closure: Callable[[], Any] | None = None) -> Any:
            def computed() -> Any:
                assert closure is not None
                loss = closure()
                if self.is_void:
                    raise Void
                return loss

            try:
                return apply() if closure is None else apply(closure=computed)
            except Void:
                return None

        contained = self.contained(step, otherwise=lambda: None)

        @functools.wraps(apply)  # with the mark by which schedules know it
        def guarded(closure: Callable[[], Any] | None = None) -> Any:
            if self.is_void:
                return closure() if closure is not None else None
            return contained(closure)

        optimizer.step = guarded  # type: ignore[method-assign]

    def contain_schedule(self, schedule: Any) -> None:
        """In a void step it counts nothing. By a class of its own: its attributes are its state."""
        loop, kind = self, type(schedule)

        class Contained(kind):  # type: ignore[misc,valid-type]
            def step(self, *args: Any, **kwargs: Any) -> Any:
                return None if loop.is_void else super().step(*args, **kwargs)

        Contained.__name__, Contained.__qualname__ = kind.__name__, kind.__qualname__
        schedule.__class__ = Contained

    def _is_disturbance(self, error: Exception) -> bool:
        """In the sandbox any error may come of made-up answers (see `Runtime.attempt`)."""
        return isinstance(error, Discarded) or failure_in(error) is not None or self.in_sandbox()

    def _hand_over(self, failure: Exception) -> None:
        """Returns when the runtime has got over it, and this rank is at the beginning of a step again."""
        self.is_void = True
        self._step = self._runtime.switch(failure)


class Current:
    """The loop of this process."""

    loop: FrameworkLoop | None = None


def current_loop() -> FrameworkLoop:
    """The loop that `tm_slurm.integrations.run` runs; RuntimeError outside it."""
    if Current.loop is None:
        raise RuntimeError(
            "no training here: have tm_slurm.integrations.run(fit, steps=…) call your fit(role)"
        )
    return Current.loop


def ranks_per_node() -> int:
    """Rank processes on each node of the running job; 1 outside one."""
    job_dir = os.environ.get("TM_SLURM_JOB_DIR")
    return load(os.path.join(job_dir, "config.yaml")).job.ranks_per_node if job_dir is not None else 1


def _tell_environment(role: Role) -> None:
    """What torchrun would have set, for frameworks that look there. The process groups are there already:
    nobody connects to the address."""
    os.environ |= {
        "RANK": str(role.rank),
        "WORLD_SIZE": str(role.world_size),
        "LOCAL_RANK": str(role.local_rank),
        "LOCAL_WORLD_SIZE": str(min(ranks_per_node(), role.world_size)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
