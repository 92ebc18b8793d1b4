"""A training script for the tests, with what tiny_training.py lacks of what many people's have: batches come
from a DataLoader whose worker process reads ahead, losses are scaled, and layers compute in bfloat16.

Where a rank is in the data is its state `batches`: how many it has taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from tiny_training import wait_at_gate
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler

import tm_slurm

SAMPLES = 16


class Numbers(Dataset[torch.Tensor]):
    """A sample, of 9 numbers, depends on its index only."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(9, generator=torch.Generator().manual_seed(index))


class Batches(Sampler[list[int]]):
    """An endless stream of batches for one rank, from where it was left."""

    def __init__(self, role: tm_slurm.Role) -> None:
        self.taken = 0
        self._rank, self._size = role.rank, role.world_size
        self._loader = DataLoader(Numbers(), batch_sampler=self, num_workers=1, persistent_workers=True)
        self._ahead: Iterator[torch.Tensor] | None = None

    def __iter__(self) -> Iterator[list[int]]:
        at = self.taken
        while True:
            first = (at * self._size + self._rank) * SAMPLES
            yield list(range(first, first + SAMPLES))
            at += 1

    def next(self) -> torch.Tensor:
        """SAMPLES rows of 9 numbers."""
        if self._ahead is None:
            self._ahead = iter(self._loader)
        batch = next(self._ahead)
        self.taken += 1
        return batch

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if state["taken"] != self.taken:
            self.taken, self._ahead = state["taken"], None


def build(role: tm_slurm.Role) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(7)
    layers = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    model = DistributedDataParallel(layers)
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2),
        "scaler": torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=5),
        "batches": Batches(role),
    }


def train_step(state: dict[str, Any], step: int) -> dict[str, Any]:
    wait_at_gate(step, tm_slurm.options()["gates"])
    batch = state["batches"].next()
    state["optimizer"].zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.mse_loss(state["model"](batch[:, :8]), batch[:, 8:])
    state["scaler"].scale(loss).backward()
    state["scaler"].unscale_(state["optimizer"])
    nn.utils.clip_grad_norm_(state["model"].parameters(), 1.0)
    state["scaler"].step(state["optimizer"])
    state["scaler"].update()
    return {"loss": loss.detach()}


if __name__ == "__main__":
    tm_slurm.run(build, train_step)
