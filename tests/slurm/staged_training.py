"""A pipeline for the tests: `stages` stages, each replicated, over the ranks of the job (rank = replica times
stages plus stage). Each stage averages its gradients over its replicas. The option `gates` as in
tiny_training."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from tiny_training import wait_at_gate
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import tm_slurm

WIDTH, BATCH, MICROBATCHES = 32, 16, 4


def build(role: tm_slurm.Role, stages: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    shape = (role.world_size // stages, stages)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "pp"))
    number = mesh.get_local_rank("pp")
    torch.manual_seed(7 + number)
    middle = 0 < number < stages - 1
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh()] + ([] if middle else [nn.Linear(WIDTH, WIDTH)])
    model = nn.Sequential(*layers)
    stage = PipelineStage(model, number, stages, role.device, group=mesh.get_group("pp"))
    schedule = Schedule1F1B(stage, n_microbatches=MICROBATCHES, loss_fn=nn.MSELoss())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return {
        "model": model,
        "optimizer": optimizer,
        "schedule": schedule,
        "replicas": mesh.get_group("dp"),
        "replica": mesh.get_local_rank("dp"),
        "stage": number,
        "stages": stages,
    }


def train_step(state: dict[str, Any], step: int) -> dict[str, Any]:
    wait_at_gate(step, tm_slurm.options()["gates"])
    generator = torch.Generator().manual_seed(1000 * step + state["replica"])
    inputs, targets = (torch.randn(BATCH, WIDTH, generator=generator) for _ in range(2))
    state["optimizer"].zero_grad()
    losses: list[torch.Tensor] = []
    if state["stage"] == 0:
        state["schedule"].step(inputs)
    elif state["stage"] == state["stages"] - 1:
        state["schedule"].step(target=targets, losses=losses)
    else:
        state["schedule"].step()
    for parameter in state["model"].parameters():
        dist.all_reduce(parameter.grad, group=state["replicas"])
        parameter.grad /= state["replicas"].size()
    state["optimizer"].step()
    return {"loss": torch.stack(losses).mean().detach()} if losses else {}


def main() -> None:
    stages = tm_slurm.options()["stages"]
    result = tm_slurm.run(lambda role: build(role, stages), train_step)
    print(f"rank {result.role.rank} finished at step {result.step}", flush=True)


if __name__ == "__main__":
    main()
