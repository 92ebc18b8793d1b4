"""Hugging Face's Trainer trains a small GPT-2 on the bytes of real text, in a job that moves.

    python -m tm_slurm.examples.transformers_gpt       one process, here
    tm-slurm submit configs/transformers_gpt.yaml      a Slurm job that survives drains

Needs the extra `transformers`. Nothing is fetched: the model is made anew.
"""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import tm_slurm
from tm_slurm.examples.text_windows import TextWindows
from tm_slurm.integrations import run
from tm_slurm.integrations.transformers import TrainMover

DEFAULT_STEPS = 200


def fit(role: tm_slurm.Role, callbacks: Any = ()) -> None:
    """Have the Trainer train `role`."""
    torch.manual_seed(1)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
        )
    )
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            directory,
            use_cpu=role.device.type == "cpu",
            per_device_train_batch_size=8,
            learning_rate=3e-3,
            warmup_steps=20,
            seed=1 + role.rank,  # for dropout; the order of the data is by data_seed
            data_seed=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=TextWindows(), callbacks=list(callbacks))
        trainer.add_callback(TrainMover(trainer, role))
        trainer.train()


def main(callbacks: Any = ()) -> None:
    """Train, and say on every rank how it went."""
    result = run(functools.partial(fit, callbacks=callbacks), steps=DEFAULT_STEPS)
    print(
        f"rank {result.role.rank}: step {result.step}, loss {float(result.metrics['loss']):.3f}", flush=True
    )


if __name__ == "__main__":
    main()
