"""A value is summed in the order of the ranks, wherever it lies in however large a tensor. DDP's buckets are
others in its first step than later: a job whose ranks were built anew in mid-training must round as before.
"""

from __future__ import annotations

import functools

import pytest
import torch
from one_process import world
from torch.distributed import ReduceOp

VALUES = 97


def reduced(backends: list, parts: list[torch.Tensor], op: ReduceOp) -> list[torch.Tensor]:
    works = [of.allreduce([part], op) for of, part in zip(backends, parts, strict=True)]
    for work in works:
        work.wait()
    return parts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("size", [3, 4, 5, 7, 8])
def test_the_place_of_a_value_changes_no_bit(size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    values = [(torch.randn(VALUES, generator=generator) * 10**rank).to(dtype) for rank in range(size)]
    expected = functools.reduce(torch.add, values)
    with world(size, keepalive_s=0) as w:
        for before, behind in ((0, 0), (5, 3), (3_000, 0), (0, 70_000), (70_001, 30_000), (400_000, 200_000)):
            parts = [
                torch.cat([torch.ones(before, dtype=dtype), part, torch.ones(behind, dtype=dtype)])
                for part in values
            ]
            for part in reduced(w.backends, parts, ReduceOp.SUM):
                assert torch.equal(part[before : before + VALUES], expected), (before, behind)
                assert part[:before].eq(size).all() and part[before + VALUES :].eq(size).all()


def test_products_and_means_keep_the_order_too() -> None:
    values = [torch.linspace(0.1, 3.3, VALUES) ** (rank + 1) for rank in range(5)]
    with world(5, keepalive_s=0) as w:
        for op, expected in (
            (ReduceOp.PRODUCT, functools.reduce(torch.mul, values)),
            (ReduceOp.AVG, functools.reduce(torch.add, values) / 5),
        ):
            for ahead in (0, 50_000):
                parts = [torch.cat([torch.ones(ahead), part]) for part in values]
                assert all(torch.equal(p[ahead:], expected) for p in reduced(w.backends, parts, op))
