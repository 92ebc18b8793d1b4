"""A whole world in one process: an endpoint and a group object for each rank. Quick, easy to take apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed import ReduceOp

from tm_slurm import comm
from tm_slurm.comm import _tm
from tm_slurm.comm.backend import group_identity

SECRET = b"0123456789abcdef0123456789abcdef"
JOB = "job-1"


def endpoint(incarnation: int = 0, **options: Any) -> comm.Endpoint:
    return comm.Endpoint(
        **{"secret": SECRET, "job": JOB, "host": "127.0.0.1", "incarnation": incarnation, **options}
    )


def peer(of: comm.Endpoint) -> comm.Peer:
    return comm.Peer("127.0.0.1", of.port, of.incarnation)


def backend(
    of: comm.Endpoint, rank: int, ranks: Sequence[int], name: str = "g", timeout_s: float = 20.0
) -> Any:
    """This rank's object of a group, as `new_group` would make it."""
    return _tm.make_backend(
        of._native, name, group_identity(name, ranks), list(ranks).index(rank), ranks, timeout_s
    )


class World:
    def __init__(self, size: int, **options: Any) -> None:
        self.options = options
        self.ranks = list(range(size))
        self.endpoints = [endpoint(**options) for _ in self.ranks]
        self.everyone = list(self.endpoints)
        self.configure()
        self.backends = self.group(self.ranks, "world")

    def table(self) -> dict[int, comm.Peer]:
        return {rank: peer(of) for rank, of in enumerate(self.endpoints)}

    def configure(self, epoch: int = 0) -> None:
        for rank, of in enumerate(self.endpoints):
            of.configure(rank=rank, epoch=epoch, term=1, peers=self.table())

    def group(self, ranks: Sequence[int], name: str, timeout_s: float = 20.0) -> list[Any]:
        return [backend(self.endpoints[rank], rank, ranks, name, timeout_s) for rank in ranks]

    def joiner(self, rank: int, epoch: int, **options: Any) -> comm.Endpoint:
        """An endpoint that will take `rank` at `epoch`; configured, not yet dialled, not yet in the world."""
        number = self.endpoints[rank].incarnation + 1
        of = endpoint(**{"incarnation": number, **self.options, **options})
        self.everyone.append(of)
        of.configure(rank=rank, epoch=epoch, term=1, peers={**self.table(), rank: peer(of)})
        return of

    def replace(self, rank: int, epoch: int, *, dial: bool = True) -> None:
        """Planned replacement of one rank, all phases; group objects of the stayers stay."""
        joiner = self.joiner(rank, epoch)
        stayers = [of for other, of in enumerate(self.endpoints) if other != rank]
        for of in stayers:
            of.prepare(epoch=epoch, changes={rank: peer(joiner)})
        if dial:
            joiner.dial(epoch=epoch, ranks=[other for other in self.ranks if other != rank], timeout_s=10)
            for of in stayers:
                assert of.wait_staged(epoch=epoch, ranks=[rank], timeout_s=10)
        for of in stayers:
            of.switch(epoch=epoch)
        self.endpoints[rank].close()
        self.endpoints[rank] = joiner
        self.backends[rank] = backend(joiner, rank, self.ranks, "world")

    def close(self) -> None:
        for of in self.everyone:
            of.close()


@contextmanager
def world(size: int, **options: Any) -> Iterator[World]:
    made = World(size, **options)
    try:
        yield made
    finally:
        made.close()


def all_reduce(backends: Sequence[Any], elements: int, op: Any = ReduceOp.SUM) -> list[torch.Tensor]:
    """Post an all-reduce of rank + arange on every backend, wait for all, and check the sums."""
    tensors = [torch.arange(elements, dtype=torch.float64) + rank for rank in range(len(backends))]
    for work in [of.allreduce([tensor], op) for of, tensor in zip(backends, tensors, strict=True)]:
        work.wait()
    size = len(backends)
    expected = torch.arange(elements, dtype=torch.float64) * size + sum(range(size))
    for tensor in tensors:
        assert torch.equal(tensor, expected)
    return tensors
