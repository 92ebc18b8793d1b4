"""`run` for a loop that a framework owns."""

from __future__ import annotations

from typing import Any

from tm_slurm.integrations.framework_loop import Fit, FrameworkLoop
from tm_slurm.runtime import Result, Runtime
from tm_slurm.runtime.worker import Worker


class FrameworkRuntime(Runtime):
    """The runtime whose steps a framework does."""

    def __init__(self, fit: Fit, *, steps: int | None = None) -> None:
        self.loop = FrameworkLoop(fit)
        super().__init__(self.loop.build, steps=steps)
        self.loop.steps = self.steps
        self.loop.in_sandbox = lambda: self._worker is not None and self._worker.endpoint.sandbox
        self.loop.rewind = self._rewind_again

    def _rewind_again(self) -> None:
        if self._mark is not None:
            self._rewind()

    def _enter(
        self, worker: Worker, *, rank: int, world_size: int, epoch: int, peers: dict[str, list[Any]]
    ) -> None:
        self.loop.end()  # what the framework holds of the role before goes with that role's groups
        super()._enter(worker, rank=rank, world_size=world_size, epoch=epoch, peers=peers)


def run(fit: Fit, *, steps: int | None = None) -> Result:
    """Train for `steps` optimizer steps in the loop of a framework, surviving drains of the nodes it runs on.

    `fit(role)` makes the framework's trainer, with tm_slurm's callback among its callbacks and its batches
    from `StepBatches`, and has it train. It may be called again in the same process for another role. How
    long it trains is decided here (`train.steps` of the job's config holds over `steps`), not by the trainer.
    Outside a tm_slurm job everything runs in this one process. ValueError when no number of steps is known,
    or the trainer is set to something that cannot be done again (the message says what to set instead).
    """
    runtime = FrameworkRuntime(fit, steps=steps)
    metrics: dict[str, Any] = {}
    for _, step in runtime:
        with runtime.attempt():
            metrics = runtime.loop.do(step)
            runtime.report(metrics)
    runtime.loop.finish()
    return Result(runtime.state, runtime.step, runtime.role, metrics)
