"""Whether gradients are finite is told by a quick norm; those that are only large are not called infinite."""

from __future__ import annotations

import math

import pytest
import torch

from tm_slurm.runtime.finite import all_finite


@pytest.mark.parametrize(
    ("value", "finite"), [(1.0, True), (3e38, True), (math.inf, False), (-math.inf, False), (math.nan, False)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_that_are_no_numbers_are_seen(value: float, finite: bool, dtype: torch.dtype) -> None:
    layer = torch.nn.Linear(7, 5).to(dtype)
    empty = torch.nn.Parameter(torch.empty(0, 5, dtype=dtype))
    state = {"layer": layer, "optimizer": torch.optim.SGD([empty, *layer.parameters()], lr=0.1)}
    assert all_finite(state)  # there are none
    for parameter in (empty, *layer.parameters()):
        parameter.grad = torch.ones_like(parameter)
    layer.weight.grad[2, 3] = value  # type: ignore[index]
    assert all_finite(state) == finite
