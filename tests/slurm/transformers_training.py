"""The Hugging Face example with gates (see tiny_training)."""

from __future__ import annotations

from typing import Any

import torch
from tiny_training import wait_at_gate
from transformers import TrainerCallback

import tm_slurm
from tm_slurm.examples.transformers_gpt import main


class Gated(TrainerCallback):
    """The Trainer's own count of the steps must be the job's."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        wait_at_gate(state.global_step, tm_slurm.options()["gates"])


if __name__ == "__main__":
    torch.set_num_threads(1)
    main([Gated()])
