"""A small DDP training that the tests run undisturbed and with members replaced, and compare bit by bit."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Training:
    def __init__(self, rank: int, *, joiner: bool = False, **ddp_options: Any) -> None:
        torch.manual_seed(0)
        self.rank = rank
        self.model = nn.Sequential(
            nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8)
        )
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=0.2, init_sync=not joiner, **ddp_options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, step: int) -> float:
        generator = torch.Generator().manual_seed(1000 * step + self.rank)
        inputs = torch.randn(16, 64, generator=generator)
        targets = torch.randn(16, 8, generator=generator)
        self.optimizer.zero_grad(set_to_none=True)
        loss = (self.ddp(inputs) - targets).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.step(step)

    def warm_up(self, endpoint: Any) -> None:
        """A shadow step alone, so that the buckets are laid out as everybody else's are."""
        endpoint.sandbox = True
        self.step(0)
        self.ddp.reducer._rebuild_buckets()
        endpoint.sandbox = False

    def state(self) -> Any:
        return self.model.state_dict(), self.optimizer.state_dict()

    def load(self, state: Any) -> None:
        model, optimizer = state
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)

    def digest(self) -> str:
        found = hashlib.sha256()
        for parameter in self.model.parameters():
            found.update(parameter.detach().numpy().tobytes())
            for value in self.optimizer.state[parameter].values():
                found.update(value.numpy().tobytes())
        return found.hexdigest()


def default_group() -> dist.ProcessGroup:
    group = dist.distributed_c10d._get_default_group()
    assert isinstance(group, dist.ProcessGroup)
    return group
