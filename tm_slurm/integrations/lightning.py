"""PyTorch Lightning on a tm_slurm job.

    from pytorch_lightning import Trainer
    from tm_slurm.integrations import StepBatches, run
    from tm_slurm.integrations.lightning import TrainMover, trainer_options

    def fit(role):
        trainer = Trainer(callbacks=[TrainMover()], **trainer_options(role))
        trainer.fit(Module(), StepBatches(dataset, role, batch_size=32))

    run(fit, steps=1000)

Automatic optimization, data parallel. Validation, checkpoints of Lightning's own and schedules by epoch are
refused: they are collectives between two steps, or states that no other process could take over.
"""

from __future__ import annotations

import signal
import threading
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.plugins.environments import ClusterEnvironment
from pytorch_lightning.strategies import DDPStrategy

from tm_slurm.integrations.batches import StepBatches
from tm_slurm.integrations.framework_loop import FrameworkLoop, current_loop, ranks_per_node
from tm_slurm.runtime import Role


class JobEnvironment(ClusterEnvironment):  # type: ignore[misc]
    """The ranks of the job, for Lightning: `role` is this process's."""

    def __init__(self, role: Role) -> None:
        super().__init__()
        self._role = role

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        return 1

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self._role.world_size

    def set_world_size(self, size: int) -> None:
        """It is the job's."""

    def global_rank(self) -> int:
        return self._role.rank

    def set_global_rank(self, rank: int) -> None:
        """It is the role's."""

    def local_rank(self) -> int:
        return self._role.local_rank

    def node_rank(self) -> int:
        return self._role.rank // ranks_per_node()


def trainer_options(role: Role, **ddp: Any) -> dict[str, Any]:
    """What `Trainer` must be given: this job's processes, and nothing of what `TrainMover` refuses. `ddp`:
    for DistributedDataParallel."""
    devices = min(ranks_per_node(), role.world_size)
    return {
        "accelerator": "gpu" if role.device.type == "cuda" else "cpu",
        "devices": devices,
        "num_nodes": role.world_size // devices,
        "strategy": DDPStrategy(cluster_environment=JobEnvironment(role), **ddp),
        "max_epochs": -1,
        "limit_val_batches": 0,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
    }


class TrainMover(Callback):  # type: ignore[misc]
    """Lets a job move while Lightning trains in it. Give it to the trainer inside `fit(role)`."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what cannot be done again by another process: ValueError, before anything is trained."""
        if trainer.enable_validation:
            what = "validation (limit_val_batches=0, and validate checkpoints in a job of its own)"
        elif trainer.checkpoint_callbacks:
            what = "Lightning's checkpoints (enable_checkpointing=False; tm_slurm has its own)"
        elif not pl_module.automatic_optimization:
            what = "manual optimization (let Lightning call the optimizer)"
        elif getattr(trainer.precision_plugin, "scaler", None) is not None:
            what = "a gradient scaler, whose scale would stay behind (precision='bf16-mixed')"
        else:
            what = ""
        if what:
            raise ValueError(f"TrainMover does without {what}")
        trainer.fit_loop.max_epochs = -1
        trainer.fit_loop.epoch_loop.max_steps = (
            current_loop().steps
        )  # for schedules that ask how many there will be

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Everything is built: say what it is, and put the guards around what can meet a failure."""
        loop, strategy = current_loop(), trainer.strategy
        _check_batches(trainer)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Lightning's handler is a collective
        schedules = {}
        for number, config in enumerate(trainer.lr_scheduler_configs):
            if config.interval != "step":
                raise ValueError(
                    f"a schedule by {config.interval}: give its interval as 'step' (configure_optimizers): "
                    f"there is one endless epoch here"
                )
            schedules[f"schedule_{number}"] = config.scheduler
            loop.contain_schedule(config.scheduler)
        optimizers = {f"optimizer_{number}": value for number, value in enumerate(trainer.optimizers)}
        loop.holds({"model": strategy.model, **optimizers, **schedules})
        for optimizer in trainer.optimizers:
            loop.contain_optimizer(optimizer)

        def no_loss() -> torch.Tensor:
            pl_module.__dict__.pop("forward", None)  # a redirection that the failure has left behind
            return torch.zeros((), device=pl_module.device, requires_grad=True)

        strategy.training_step = loop.contained(strategy.training_step, otherwise=no_loss)
        strategy.backward = loop.contained(strategy.backward, otherwise=lambda: None)
        epochs = trainer.fit_loop.epoch_loop
        epochs.max_steps = -1
        epochs._broadcast_sigterm_tensor = lambda: (
            None
        )  # a collective between steps; tm_slurm says when to stop
        loop.on_step = lambda step: _count(trainer, step)
        loop.on_end = lambda: setattr(trainer, "should_stop", True)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The loss goes to whoever watches the job."""
        loop: FrameworkLoop = current_loop()
        if isinstance(outputs, dict) and "loss" in outputs:
            loop.report({"loss": outputs["loss"]})


def _check_batches(trainer: Trainer) -> None:
    """ValueError when the batches that Lightning takes are not those of the steps."""
    batches, accumulated = trainer.train_dataloader, trainer.accumulate_grad_batches
    if not isinstance(batches, StepBatches):
        raise ValueError(
            f"training on a {type(batches).__name__}: give trainer.fit() tm_slurm.integrations.StepBatches, "
            f"which begin the steps"
        )
    if batches.per_step != accumulated:
        raise ValueError(
            f"StepBatches(per_step={batches.per_step}): expected {accumulated}, as accumulate_grad_batches is"
        )


def _count(trainer: Trainer, step: int) -> None:
    """Make Lightning's counters what they are at the beginning of `step`: a void step, a joiner's shadow
    steps and a return to a snapshot leave them elsewhere."""
    epochs = trainer.fit_loop.epoch_loop
    batches = step * trainer.accumulate_grad_batches
    for progress in (epochs.batch_progress.current, epochs.batch_progress.total):
        progress.ready = progress.started = progress.processed = progress.completed = batches
    done = epochs.automatic_optimization.optim_progress.optimizer.step.total
    done.ready = done.completed = step
    epochs._batches_that_stepped = step
