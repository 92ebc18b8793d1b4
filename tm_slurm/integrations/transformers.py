"""Hugging Face's Trainer on a tm_slurm job.

    from transformers import Trainer, TrainingArguments
    from tm_slurm.integrations import run
    from tm_slurm.integrations.transformers import TrainMover

    def fit(role):
        arguments = TrainingArguments("out", save_strategy="no", per_device_train_batch_size=8)
        trainer = Trainer(model, arguments, train_dataset=dataset)
        trainer.add_callback(TrainMover(trainer, role))
        trainer.train()

    run(fit, steps=1000)

Data parallel. Evaluation and checkpoints of the Trainer's own are refused: they are collectives between two
steps. What it logs is of its own rank.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from tm_slurm.integrations.batches import StepBatches
from tm_slurm.integrations.framework_loop import current_loop
from tm_slurm.runtime import Role

REFUSED = {
    "save_strategy": "policy.checkpoint_every_steps writes checkpoints; save the model after train()",
    "eval_strategy": "evaluate after train(), or checkpoints in a job of its own",
}


class TrainMover(TrainerCallback):  # type: ignore[misc]
    """Lets a job move while `trainer` trains in it. Make it inside `fit(role)`, for the trainer made there.

    It gives the trainer its batches (`StepBatches` of its train_dataset, by its arguments' batch size, seed
    and accumulation) and its number of steps. ValueError when the trainer is set to something that another
    process could not take over.
    """

    def __init__(self, trainer: Trainer, role: Role) -> None:
        arguments = trainer.args
        for name, instead in REFUSED.items():
            if getattr(arguments, name) != "no":
                found = getattr(arguments, name)
                raise ValueError(
                    f"{name}: expected 'no', found {getattr(found, 'value', found)!r}: {instead}"
                )
        if trainer.accelerator.scaler is not None:
            raise ValueError("fp16: the scale of its gradient scaler would stay behind: set bf16 instead")
        self._trainer = trainer
        self._role = role
        loop = current_loop()
        arguments.max_steps = loop.steps
        trainer.get_train_dataloader = self._batches
        trainer._get_num_items_in_batch = loop.contained(
            trainer._get_num_items_in_batch, otherwise=lambda: None
        )
        trainer.training_step = loop.contained(self._reported(trainer.training_step), otherwise=self._no_loss)

    def _batches(self) -> StepBatches:
        trainer, arguments = self._trainer, self._trainer.args
        seed = arguments.data_seed if arguments.data_seed is not None else arguments.seed
        return StepBatches(
            trainer.train_dataset,
            self._role,
            batch_size=arguments.per_device_train_batch_size,
            seed=seed,
            per_step=arguments.gradient_accumulation_steps,
            collate_fn=trainer._get_collator_with_removed_columns(trainer.data_collator, "Training"),
            num_workers=arguments.dataloader_num_workers,
            pin_memory=arguments.dataloader_pin_memory and self._role.device.type == "cuda",
        )

    def _reported(self, training_step: Any) -> Any:
        def step(*args: Any, **kwargs: Any) -> torch.Tensor:
            loss: torch.Tensor = training_step(*args, **kwargs)
            current_loop().report({"loss": loss})
            return loss

        return step

    def _no_loss(self) -> torch.Tensor:
        return torch.zeros((), device=self._trainer.args.device)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Everything is built: say what it is, and put the guards around what can meet a failure."""
        loop, trainer = current_loop(), self._trainer
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # as accelerate wraps it
        schedule = trainer.lr_scheduler
        loop.holds({"model": trainer.model_wrapped, "optimizer": optimizer, "schedule": schedule})
        loop.contain_optimizer(optimizer)
        loop.contain_schedule(schedule)
        loop.on_step = self._count
        loop.on_end = self._stop

    def _count(self, step: int) -> None:
        """Make the trainer's counters what they are at the beginning of `step`."""
        self._trainer.state.global_step = step

    def _stop(self) -> None:
        self._trainer.control.should_training_stop = True

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """The trainer does not end by itself, and logs what this rank knows: its own way is a collective
        after the step, which could not be done again."""
        control.should_training_stop = control.should_epoch_stop = False
        control.should_evaluate = control.should_save = False
        if control.should_log and not current_loop().is_void:
            rate = self._trainer.lr_scheduler.get_last_lr()[0]
            self._trainer.log({"loss": float(current_loop().metrics["loss"]), "learning_rate": rate})
        control.should_log = False

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """There is one endless epoch."""
        control.should_evaluate = control.should_save = control.should_log = False
