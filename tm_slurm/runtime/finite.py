"""Whether the gradients that an optimizer is about to apply are numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


@torch.no_grad()
def all_finite(state: Mapping[str, Any]) -> bool:
    """False if any gradient of the optimizers in `state` holds NaN or Inf. One pass over the gradients, one
    wait for the device; where that finds something, another one: squares of what is finite may be too large.
    """
    grads: list[torch.Tensor] = []
    for value in state.values():
        if isinstance(value, torch.optim.Optimizer):
            for group in value.param_groups:
                grads += [_local(p.grad) for p in group["params"] if p.grad is not None]
    grads = [grad for grad in grads if grad.numel()]  # a shard may be empty, and has no largest
    if not grads:
        return True
    # NaN stays NaN, Inf stays Inf; the largest of a tensor takes twenty times as long as its Euclidean norm
    return _finite_norms(grads, 2.0) or _finite_norms(grads, float("inf"))


def _finite_norms(tensors: list[torch.Tensor], order: float) -> bool:
    norms = torch._foreach_norm(tensors, order)
    return bool(torch.isfinite(torch.stack([norm.to(norms[0].device) for norm in norms])).all())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """A distributed tensor's part on this rank: every rank looks at its own."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor
