"""Whether the gradients that an optimizer is about to apply are numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


@torch.no_grad()
def all_finite(state: Mapping[str, Any]) -> bool:
    """False if any gradient of the optimizers in `state` holds NaN or Inf. One pass over the gradients, one
    wait for the device."""
    grads: list[torch.Tensor] = []
    for value in state.values():
        if isinstance(value, torch.optim.Optimizer):
            for group in value.param_groups:
                grads += [_local(p.grad) for p in group["params"] if p.grad is not None]
    if not grads:
        return True
    norms = torch._foreach_norm(grads, float("inf"))  # NaN stays NaN, Inf stays Inf
    return bool(torch.isfinite(torch.stack([norm.to(norms[0].device) for norm in norms])).all())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """A distributed tensor's part on this rank: every rank looks at its own."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor
