"""A step that was broken off in the middle of a pipeline's schedule is done again as if it were the first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from tm_slurm.runtime.pipelines import forget_broken_step


@pytest.fixture(autouse=True)
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_second_try_has_the_gradients_of_an_undisturbed_one() -> None:
    torch.manual_seed(0)
    model, fails_at = torch.nn.Linear(4, 4), [-1]
    inputs, targets = torch.randn(8, 4), torch.randn(8, 4)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        fails_at[0] -= 1
        if fails_at[0] == 0:
            raise ConnectionResetError("a peer is gone")
        return torch.nn.functional.mse_loss(output, target)

    part = torch.empty(2, 4)
    stage = PipelineStage(model, 0, 1, torch.device("cpu"), input_args=part, output_args=part)
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=loss)
    schedule.step(inputs, target=targets)
    expected = model.weight.grad.clone()
    model.zero_grad()
    fails_at[0] = 3
    with pytest.raises(ConnectionResetError):
        schedule.step(inputs, target=targets)
    forget_broken_step()
    model.zero_grad()
    schedule.step(inputs, target=targets)
    assert torch.equal(model.weight.grad, expected)
