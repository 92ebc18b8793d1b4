"""A training script for the tests: small, with everything in it that a move could lose.

Dropout and all three global generators feed the loss, there is momentum, a schedule, and data by (step,
rank). The option `gates` is a list of steps at which every rank waits until the file `gate-STEP` is in the
job directory, so that a test decides what happens before a certain boundary. `busy`: how many small products
make a step longer; `pause_s`: seconds that it waits, as for a device, without using the CPU. `hang_at`:
[rank, step]: that rank never comes out of that step, the first time. `die_at`: [rank, step, "before" or
"after"]: it is killed there before the forward, or after the backward, the first time. `keep`: computes
in float64, and writes the parameters that each rank ends with to `parameters-RANK.pt`. `slow_at`: [rank,
step, seconds]: the process that has that rank then is slower by so much from then on.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tm_slurm

GATE_LIMIT_S = 120.0
SLOWER_BY: list[float] = []
"""Seconds, of this process."""


def build(role: tm_slurm.Role) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(7)
    layers = [
        nn.Linear(32, 64),
        nn.Tanh(),
        nn.Dropout(0.2),
        nn.Linear(64, 64),
        nn.BatchNorm1d(64),
        nn.Linear(64, 8),
    ]
    if tm_slurm.options()["sharded"]:  # every rank has parameters of its own: nobody is another's replica
        torch.manual_seed(7 + role.rank)
        layers = [nn.Linear(32, 64), nn.Tanh(), nn.Dropout(0.2), nn.Linear(64, 8)]
        model: nn.Module = nn.Sequential(*layers)
    else:
        kept = tm_slurm.options()["keep"]
        layers = [layer.double() if kept else layer for layer in layers]
        model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.01)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(100 + role.rank)
    return {"model": model, "optimizer": optimizer, "schedule": schedule, "rank": role.rank}


def wait_at_gate(step: int, gates: list[int]) -> None:
    if step not in gates:
        return
    gate = Path(os.environ["TM_SLURM_JOB_DIR"]) / f"gate-{step}"
    deadline = time.monotonic() + GATE_LIMIT_S
    while not gate.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody opened {gate}")
        time.sleep(0.01)


def first_time(what: str) -> bool:
    """Whether this has not happened in this job before."""
    try:
        (Path(os.environ["TM_SLURM_JOB_DIR"]) / what).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def hang(rank: int, step: int, hang_at: list[int] | None) -> None:
    if [rank, step] != hang_at or not first_time("hung"):
        return
    time.sleep(GATE_LIMIT_S)
    raise TimeoutError(f"nobody ended rank {rank}, which hangs in step {step}")


def slow_down(rank: int, step: int, slow_at: list[Any] | None) -> None:
    if slow_at is not None and [rank, step] == slow_at[:2] and first_time("slowed"):
        SLOWER_BY.append(float(slow_at[2]))
    time.sleep(sum(SLOWER_BY))


def die(rank: int, step: int, where: str, die_at: list[Any] | None) -> None:
    if [rank, step, where] == die_at and first_time("died"):
        os.kill(os.getpid(), signal.SIGKILL)


def learn(state: dict[str, Any], step: int, rank: int) -> torch.Tensor:
    """The loss of one rank's data, whose gradients are there now."""
    options = tm_slurm.options()
    dtype = torch.float64 if options["keep"] else torch.float32
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(16, 32, generator=generator, dtype=dtype) * (1 + 0.1 * random.random())
    targets = torch.randn(16, 8, generator=generator, dtype=dtype) + 0.1 * float(numpy.random.rand())
    for _ in range(options["busy"]):
        torch.mm(inputs.T, inputs)
    time.sleep(options["pause_s"])
    loss = nn.functional.mse_loss(state["model"](inputs), targets)
    loss.backward()
    return loss.detach()


def main() -> None:
    options = tm_slurm.options()

    def train_step(state: dict[str, Any], step: int) -> dict[str, Any]:
        wait_at_gate(step, options["gates"])
        hang(state["rank"], step, options["hang_at"])
        slow_down(state["rank"], step, options["slow_at"])
        if step == options["crash_at"]:
            raise RuntimeError("this batch is broken")
        state["optimizer"].zero_grad()
        die(state["rank"], step, "before", options["die_at"])
        for share in tm_slurm.shares():
            with share:
                loss = learn(state, step, share.rank)
        die(state["rank"], step, "after", options["die_at"])
        if options["sharded"]:  # what one rank learns depends on the others all the same
            torch.distributed.all_reduce(next(state["model"].parameters()).grad)
        if [state["rank"], step] == options["nan_at"] and first_time("nan"):
            next(state["model"].parameters()).grad.fill_(float("nan"))
        nn.utils.clip_grad_norm_(state["model"].parameters(), 1.0)
        state["optimizer"].step()
        state["schedule"].step()
        return {"loss": loss}

    result = tm_slurm.run(build, train_step)
    if options["keep"]:
        path = Path(os.environ["TM_SLURM_JOB_DIR"]) / f"parameters-{result.role.rank}.pt"
        torch.save([parameter.detach() for parameter in result.state["model"].parameters()], path)
    print(f"rank {result.role.rank} finished at step {result.step}", flush=True)


if __name__ == "__main__":
    main()
