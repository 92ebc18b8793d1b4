"""The Lightning example with gates (see tiny_training)."""

from __future__ import annotations

import torch
from tiny_training import wait_at_gate

import tm_slurm
from tm_slurm.examples.lightning_gpt import Module, main


class Gated(Module):
    """Lightning's own count of the steps must be the job's."""

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        wait_at_gate(self.global_step, tm_slurm.options()["gates"])
        return super().training_step(batch, batch_idx)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Gated)
