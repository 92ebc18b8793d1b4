"""A training for bench_downtime's parts on growth: steps of a fixed length with hardly any computing in them,
a state of any size, any number of process groups.

Options: `pause_s`: seconds that a step waits, as for a device, without using the CPU; `state_bytes`: of
frozen parameters that a rank has beside a small network in DistributedDataParallel; `groups`: process groups
of all ranks, the default one included, each of which does an all-reduce in every step.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tm_slurm

WIDTH = 32
PIECE_BYTES = 4 << 20
"""Of each frozen parameter, at most: a state has many tensors."""


def frozen(total_bytes: int) -> nn.ParameterList:
    """Parameters of `total_bytes` together, of which nothing is computed."""
    pieces = [PIECE_BYTES] * (total_bytes // PIECE_BYTES) + [total_bytes % PIECE_BYTES]
    return nn.ParameterList(
        nn.Parameter(torch.full((size // 4,), 0.5), requires_grad=False) for size in pieces if size
    )


def build(role: tm_slurm.Role) -> dict[str, Any]:
    return state_of(role.rank, tm_slurm.options())


def state_of(rank: int, options: Mapping[str, Any], group: Any = None) -> dict[str, Any]:
    """`group`: of DistributedDataParallel; without it all ranks."""
    torch.set_num_threads(1)
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 8))
    model = DistributedDataParallel(model, process_group=group)
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2),
        "frozen": frozen(int(options["state_bytes"])),
        "groups": [dist.new_group() for _ in range(int(options["groups"]) - 1)],
        "rank": rank,
        "pause_s": float(options["pause_s"]),
    }


def train_step(state: dict[str, Any], step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1000 * step + state["rank"])
    inputs = torch.randn(16, WIDTH, generator=generator)
    time.sleep(state["pause_s"])
    state["optimizer"].zero_grad()
    loss = state["model"](inputs).square().mean()
    loss.backward()
    for group in state["groups"]:
        dist.all_reduce(torch.ones(WIDTH), group=group)
    state["optimizer"].step()
    return {"loss": loss.detach()}


if __name__ == "__main__":
    tm_slurm.run(build, train_step)
