"""A process that has one role after the other: what it needs once, and the end of a role's groups."""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch
import torch.distributed as dist


def import_what_comes_late() -> None:
    """The first optimizer imports much of torch; better at the start of a process than in a switch."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    _collect()


def forget_groups() -> None:
    """End all process groups, and let go of what torch keeps of them.

    DTensor remembers by mesh how operations are done. Two ranks' meshes are equal to it, although their
    groups are not: what it remembers of the role before would lead to groups that are no more."""
    dist.destroy_process_group()
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import DTensor, _redistribute

        propagator: Any = DTensor._op_dispatcher.sharding_propagator
        propagator.propagate_op_sharding.cache_clear()
        propagator._propagate_tensor_meta_cached.cache_clear()
        torch._C._clear_DTensor_sharding_propagator_cache()
        _redistribute._gen_transform_infos.cache_clear()
        _redistribute.clear_redistribute_planner_cache()
    _collect()


def _collect() -> None:
    """Free what is in cycles. What is left (mostly modules that were imported) is left out of collections
    from now on: a full one costs 0.15 s otherwise, in the middle of a recovery."""
    gc.collect()
    gc.freeze()
