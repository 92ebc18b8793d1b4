"""A loop of one's own over `tm_slurm.Runtime`: for whoever wants to see each step, stop early, or evaluate.

python -m tm_slurm.examples.own_loop               one process, here
tm-slurm submit configs/own_loop.yaml              a Slurm job that survives drains
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tm_slurm

DEFAULT_STEPS = 200


def build(role: tm_slurm.Role) -> dict[str, Any]:
    """All that a rank has; called again where another process takes the rank over."""
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 8)))
    torch.manual_seed(100 + role.rank)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "rank": role.rank}


def main() -> None:
    """Train; the body of the loop may be done again, the rest of it not."""
    runtime = tm_slurm.Runtime(build, steps=DEFAULT_STEPS)
    for state, step in runtime:
        with runtime.attempt():
            data = torch.Generator().manual_seed(1000 * step + state["rank"])
            inputs = torch.randn(16, 64, generator=data)
            loss = (state["model"](inputs) - inputs[:, :8].sign()).square().mean()
            state["optimizer"].zero_grad()
            loss.backward()
            state["optimizer"].step()
            runtime.report({"loss": loss.detach()})
    print(f"rank {runtime.role.rank}: step {runtime.step}", flush=True)


if __name__ == "__main__":
    main()
