"""PyTorch Lightning trains a byte-level GPT on real text, in a job that moves.

    python -m tm_slurm.examples.lightning_gpt          one process, here
    tm-slurm submit configs/lightning_gpt.yaml         a Slurm job that survives drains

Needs the extra `lightning`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer
from torch.nn.functional import cross_entropy

import tm_slurm
from tm_slurm.examples.char_gpt_model import BYTES, CharGpt
from tm_slurm.examples.char_gpt_options import ModelOptions
from tm_slurm.examples.text_windows import TextWindows
from tm_slurm.integrations import StepBatches, run
from tm_slurm.integrations.lightning import TrainMover, trainer_options

DEFAULT_STEPS = 200
WARMUP_STEPS = 20


class Module(LightningModule):  # type: ignore[misc]
    """Nothing in it knows about tm_slurm."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = CharGpt(ModelOptions(layers=2, heads=2, width=64, context=32))

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        logits = self.gpt(batch["input_ids"][:, :-1])
        return cross_entropy(logits.reshape(-1, BYTES), batch["labels"][:, 1:].reshape(-1))

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(role: tm_slurm.Role, module: type[Module] = Module) -> None:
    """Have Lightning train `role`."""
    torch.manual_seed(1)
    model = module()
    torch.manual_seed(100 + role.rank)  # for dropout
    trainer = Trainer(callbacks=[TrainMover()], logger=False, **trainer_options(role))
    trainer.fit(model, StepBatches(TextWindows(), role, batch_size=8, seed=1))


def main(module: type[Module] = Module) -> None:
    """Train, and say on every rank how it went."""
    result = run(functools.partial(fit, module=module), steps=DEFAULT_STEPS)
    print(
        f"rank {result.role.rank}: step {result.step}, loss {float(result.metrics['loss']):.3f}", flush=True
    )


if __name__ == "__main__":
    main()
