"""What a trainer of PyTorch Lightning or transformers must not be set to is refused before it trains, with
what to set instead (`make frameworks` installs them)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tm_slurm.integrations.batches import StepBatches
from tm_slurm.integrations.framework_loop import FrameworkLoop
from tm_slurm.runtime import Role

ROLE = Role(rank=0, world_size=1)
DATA = TensorDataset(torch.arange(8.0).reshape(8, 1))


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process, with what torchrun would have set put back afterwards."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**alone, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.parametrize(
    ("batches", "options", "said"),
    [
        (lambda: DataLoader(DATA), {}, "training on a DataLoader: give trainer.fit()"),
        (
            lambda: StepBatches(DATA, ROLE, batch_size=1),
            {"accumulate_grad_batches": 2},
            r"StepBatches\(per_step=1\): expected 2, as accumulate_grad_batches is",
        ),
        (
            lambda: StepBatches(DATA, ROLE, batch_size=1, per_step=2),
            {},
            r"StepBatches\(per_step=2\): expected 1, as accumulate_grad_batches is",
        ),
    ],
)
def test_lightning_trains_on_the_batches_of_the_steps(
    batches: Any, options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    import pytorch_lightning as lightning

    from tm_slurm.integrations.lightning import TrainMover

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(1, 1)

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            loss: torch.Tensor = self.inner(batch[0]).sum()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def fit(role: Role) -> None:
        quiet = {"logger": False, "enable_model_summary": False, "enable_progress_bar": False}
        trainer = lightning.Trainer(
            accelerator="cpu",
            callbacks=[TrainMover()],
            limit_val_batches=0,
            enable_checkpointing=False,
            default_root_dir=tmp_path,
            **quiet,
            **options,
        )
        trainer.fit(Module(), batches())

    loop = FrameworkLoop(fit)
    loop.steps = 2
    with pytest.raises(ValueError, match=said):
        loop.build(ROLE)
    loop.end()


def test_a_gradient_scaler_of_transformers_is_refused() -> None:
    from tm_slurm.integrations.transformers import TrainMover

    arguments = SimpleNamespace(save_strategy="no", eval_strategy="no")
    trainer = SimpleNamespace(args=arguments, accelerator=SimpleNamespace(scaler=torch.amp.GradScaler("cpu")))
    with pytest.raises(ValueError, match=r"fp16: .* set bf16 instead"):
        TrainMover(trainer, ROLE)
