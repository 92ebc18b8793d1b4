"""The example as the configs in configs/ lay it out, tiny, as one rank of a replacement test."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from gang import Member
from replacement import FIRST, LAST

from tm_slurm import comm
from tm_slurm.config import load
from tm_slurm.examples.char_gpt import build, train_step
from tm_slurm.examples.char_gpt_options import read_options
from tm_slurm.runtime import Role
from tm_slurm.sandbox import forget_groups
from tm_slurm.state import Stored, digest, pack, unpack

CONFIGS = Path(__file__).parents[2] / "configs"
TINY: dict[str, Any] = {
    "model": {"layers": 4, "heads": 4, "width": 16, "context": 8, "dropout": 0.1},
    "eval_every": 2,
    "eval_batches": 1,
    "data": {"paths": [str(CONFIGS.parent / "README.md")]},
}


class CharGptRank:
    """A training in the sense of `replacement`."""

    def __init__(self, name: str, cache: str | None, rank: int, size: int, _: bool) -> None:
        if cache is not None:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        given = load(CONFIGS / f"{name}.yaml").train.options | TINY
        self.state_of_rank = build(Role(rank=rank, world_size=size), read_options(given))
        self.losses: list[float] = []
        self.done = 0

    def step(self, step: int) -> None:
        self.losses.append(float(train_step(self.state_of_rank, step)["loss"]))
        self.done = step + 1

    def state(self) -> Stored:
        return pack(self.state_of_rank, self.done)

    def load(self, stored: Stored) -> None:
        unpack(self.state_of_rank, stored)

    def digest(self) -> str:
        """With torch's generator, which dropout draws from."""
        drawn = xxhash.xxh3_128_hexdigest(torch.get_rng_state().numpy())
        return digest(self.state_of_rank, self.done) + drawn


def size_of(name: str) -> int:
    job = load(CONFIGS / f"{name}.yaml").job
    return job.nodes * job.ranks_per_node


@functools.cache
def kind_of(name: str, cache: str | None = None) -> Any:
    """What `replacement` takes for a class of trainings. `cache`: a folder for compiled code."""
    return functools.partial(CharGptRank, name, cache)


def trains(me: Member, kind: Any, steps: int) -> tuple[list[float], str]:
    """Losses and digest of an undisturbed run."""
    training = kind(me.rank, me.join_world(), False)
    for step in range(steps):
        training.step(step)
    return training.losses, training.digest()


def joins_after_another_role(me: Member, kind: Any, linked: list[int]) -> tuple[str, bool]:
    """A standby that was warm for the rank next to the one that it has to take."""
    peers = me.hear()
    size, training = len(peers), None
    me.endpoint.sandbox = True
    for rank in (me.rank ^ 1, me.rank):
        if dist.is_initialized():
            training = None
            forget_groups()
        me.endpoint.configure(rank=rank, epoch=1, term=1, peers=peers)
        comm.register(me.endpoint)
        dist.init_process_group("tm", store=dist.HashStore(), rank=rank, world_size=size)
        training = kind(rank, size, True)
        for step in range(2):
            training.step(step)
    assert training is not None
    me.endpoint.sandbox = False
    me.endpoint.dial(epoch=1, ranks=linked, timeout_s=20)
    me.tell("dialled")
    training.load(me.hear())
    for step in range(FIRST, LAST):
        training.step(step)
    return training.digest(), True
