"""A process that has one role after the other: what it needs once, and the end of a role's groups."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import torch
import torch.distributed as dist

PARTS = (torch.nn.Module, torch.optim.Optimizer)


def import_what_comes_late() -> None:
    """The first optimizer imports much of torch; better at the start of a process than in a switch. All that
    is imported by now is left out of garbage collections from now on: a full one costs 0.15 s otherwise, in
    the middle of a recovery."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    gc.collect()
    gc.freeze()


def forget_role(state: dict[str, Any]) -> None:
    """End a role: its groups, and what it has in `state`, which is emptied, because whoever runs the steps
    may still hold it. So the next role does not need memory beside this one's.

    What the role has imported is left out of garbage collections, too; unless a part of the role is still
    held somewhere: then it must be found when it is let go."""
    parts = [weakref.ref(value) for value in state.values() if isinstance(value, PARTS)]
    state.clear()
    forget_groups()
    if all(part() is None for part in parts):
        gc.freeze()


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
    gc.collect()
