"""A training without tm_slurm's runtime, agent and coordinator, one rank a Slurm task: DDP on gloo, on "tm",
and on "tm" with one part of the runtime switched on, in turn: the vote, with what belongs to it in every
step (the mark to go back to), or heartbeats. A program of bench_overhead:

    srun python plain_training.py RESULT TRAINING STEPS ROUNDS VARIANT…

TRAINING is char_gpt, or device: growing_training, whose steps wait as for a device (options: DEVICE).
Every variant has a model and an optimizer of its own; all of them run in the same processes, a block of
STEPS steps each, ROUNDS times around. Rank 0 writes the seconds of every step, by variant and block, to
RESULT (JSON).
"""

from __future__ import annotations

import copy
import functools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import growing_training
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tm_slurm.comm import Endpoint, Peer, register
from tm_slurm.control.handshake import SECRET_BYTES
from tm_slurm.examples import char_gpt
from tm_slurm.examples.char_gpt_options import read_options
from tm_slurm.runtime.agent_link import AgentLink
from tm_slurm.runtime.role import role_of
from tm_slurm.runtime.vote import Ballot, Vote
from tm_slurm.slurm import expand, reachable_address
from tm_slurm.state.marking import Mark, mark

PORT = 29555
DEVICE = {"pause_s": 0.1, "state_bytes": 1 << 20, "groups": 1}
"""Options of growing_training."""


def join_world() -> tuple[int, int]:
    """torch.distributed over "tm", with a store that gloo can use as well."""
    rank, size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    first = expand(os.environ["SLURM_STEP_NODELIST"])[0]
    store = dist.TCPStore(first, PORT, size, rank == 0)
    host = reachable_address(os.environ["SLURMD_NODENAME"])
    endpoint = Endpoint(secret=b"b" * SECRET_BYTES, job="plain", host=host, incarnation=rank + 1)
    store.set(f"peer/{rank}", json.dumps([host, endpoint.port, rank + 1]))
    peers = {other: Peer(*json.loads(store.get(f"peer/{other}"))) for other in range(size)}
    endpoint.configure(rank=rank, epoch=0, term=0, peers=peers)
    register(endpoint)
    dist.init_process_group("tm", store=store, rank=rank, world_size=size)
    return rank, size


class CharGpt:
    """A model of its own for each variant, with the parameters and the data of the first one."""

    def __init__(self, rank: int, size: int) -> None:
        options = read_options({"eval_every": 0})
        self._first = char_gpt.build(role_of(rank, size, 0), options=options)

    def state(self, group: Any) -> dict[str, Any]:
        first = self._first
        model = copy.deepcopy(first["model"].module)
        wrapped = DistributedDataParallel(model, process_group=group)
        optimizer = torch.optim.AdamW(_groups_for(model, first))
        warming = functools.partial(char_gpt.warm_up, first["options"].warmup_steps)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warming)
        return {**first, "model": wrapped, "optimizer": optimizer, "schedule": schedule}

    step = staticmethod(char_gpt.train_step)


class Device:
    """The same of growing_training."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank

    def state(self, group: Any) -> dict[str, Any]:
        return growing_training.state_of(self._rank, DEVICE, group)

    step = staticmethod(growing_training.train_step)


TRAININGS = {"char_gpt": CharGpt, "device": Device}


class Variant:
    """A training of its own, on a process group."""

    def __init__(self, name: str, training: CharGpt | Device, group: Any) -> None:
        self.name = name
        self.state = training.state(group)
        self._train_step = training.step
        self.vote: Vote | None = None
        self.link: AgentLink | None = None
        if name == "tm_vote":
            self.vote = Vote(Ballot())
            self.vote.watch(self.state)
        if name == "tm_beats":
            ours, theirs = socket.socketpair()
            subprocess.Popen(["cat"], stdin=theirs.fileno(), stdout=subprocess.DEVNULL)
            theirs.close()
            self.link = AgentLink(ours)
            self.link.start({}, every_beat=self.link.beat)
        self.step = 0
        self._seconds = 0.0
        self._mark: Mark | None = None

    def one(self, rank: int) -> float:
        """A step; its seconds."""
        began = time.perf_counter()
        if self.vote is not None:
            self._mark = mark(self.state, self._mark)
            self.vote.open()
        loss = float(self._train_step(self.state, self.step)["loss"])
        if self.link is not None:
            about = {"rank": rank, "epoch": 0, "step": self.step, "loss": loss}
            self.link.committed(**about, at=time.time(), seconds=self._seconds)
        self.step += 1
        self._seconds = time.perf_counter() - began
        return self._seconds


def _groups_for(model: torch.nn.Module, state: dict[str, Any]) -> list[dict[str, Any]]:
    """The parameter groups that char_gpt's optimizer has, of a copy of its model."""
    names = {id(parameter): name for name, parameter in state["model"].module.named_parameters()}
    own = dict(model.named_parameters())
    return [
        {
            "params": [own[names[id(parameter)]] for parameter in group["params"]],
            "lr": group["initial_lr"],
            "betas": group["betas"],
            "weight_decay": group["weight_decay"],
        }
        for group in state["optimizer"].param_groups
    ]


def main() -> None:
    result, training, names = Path(sys.argv[1]), sys.argv[2], sys.argv[5:]
    steps, rounds = int(sys.argv[3]), int(sys.argv[4])
    rank, size = join_world()
    trained = TRAININGS[training](rank, size)
    gloo = dist.new_group(backend="gloo")
    group_of: Callable[[str], Any] = lambda name: gloo if name == "gloo" else dist.group.WORLD  # noqa: E731
    variants = [Variant(name, trained, group_of(name)) for name in names]
    blocks: dict[str, list[list[float]]] = {name: [] for name in names}
    for number in range(rounds + 1):  # the first is not counted: buckets, allocators, caches
        for variant in variants if number % 2 else variants[::-1]:
            dist.barrier()
            seconds = [variant.one(rank) for _ in range(steps)]
            if number:
                blocks[variant.name].append(seconds)
    if rank == 0:
        result.write_text(json.dumps(blocks))
    dist.barrier()
    os._exit(0)  # threads of links need not be waited for


if __name__ == "__main__":
    main()
