"""Registers the torch.distributed backend "tm"."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import torch.distributed
from torch.distributed.constants import default_pg_timeout

from tm_slurm.comm import _tm
from tm_slurm.comm.endpoint import Endpoint

BACKEND_NAME = "tm"


class _Options(Protocol):
    group_rank: int
    group_size: int
    group_id: str
    global_ranks_in_group: Sequence[int]
    timeout: Any


class _Current:
    endpoint: Endpoint | None = None
    groups: ClassVar[Counter[tuple[int, ...]]] = Counter()  # made since the default group, by their ranks


def group_identity(name: str, ranks: Sequence[int]) -> int:
    """Name a group in frames: 63 bits of a name and the global ranks, the same on every rank."""
    text = f"{name}|{','.join(str(rank) for rank in ranks)}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _create(options: _Options, _: object) -> Any:
    endpoint = _Current.endpoint
    if endpoint is None:
        raise RuntimeError(
            f'backend "{BACKEND_NAME}": call tm_slurm.comm.register(endpoint) before making a group'
        )
    ranks = list(options.global_ranks_in_group)
    if not ranks:  # the default group
        ranks = list(range(options.group_size))
        _Current.groups.clear()
    # Not torch's name, which counts all groups: ranks may make groups of different ranks in different orders.
    among_all = sum(_Current.groups.values())
    ordinal = _Current.groups[tuple(ranks)]
    _Current.groups[tuple(ranks)] += 1
    identity = group_identity(str(ordinal), ranks)
    said = options.timeout and options.timeout != default_pg_timeout  # torch fills in its own 30 minutes
    timeout_s = options.timeout.total_seconds() if said else endpoint.timeout_s
    name = str(options.group_id)
    return _tm.make_backend(endpoint._native, name, identity, options.group_rank, ranks, timeout_s, among_all)


def register(endpoint: Endpoint) -> None:
    """Register backend "tm"; groups created from now on communicate through this endpoint.

    CPU tensors are moved where they lie; CUDA tensors are staged through pinned host memory.

    Calling again with another endpoint replaces it for groups created later.
    `torch.distributed.init_process_group("tm", store=HashStore(), rank=…, world_size=…)` then needs no
    network store: addresses come from `Endpoint.configure`.
    """
    first = _Current.endpoint is None
    _Current.endpoint = endpoint
    if first and BACKEND_NAME.upper() not in torch.distributed.Backend._plugins:
        devices = ["cpu", "cuda"] if torch.version.cuda else ["cpu"]
        torch.distributed.Backend.register_backend(BACKEND_NAME, _create, extended_api=True, devices=devices)
