"""Outside a job this process is the whole world, so that a training script can be run and debugged."""

from __future__ import annotations

import secrets

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from tm_slurm.comm import Endpoint, Peer, register
from tm_slurm.control.handshake import SECRET_BYTES


def join_nobody() -> None:
    """Initialise torch.distributed over "tm" with one rank, unless the script has initialised it itself."""
    if dist.is_initialized():
        return
    endpoint = Endpoint(
        secret=secrets.token_bytes(SECRET_BYTES), job="alone", host="127.0.0.1", incarnation=1
    )
    endpoint.configure(rank=0, epoch=0, term=0, peers={0: Peer("127.0.0.1", endpoint.port, 1)})
    register(endpoint)
    dist.init_process_group("tm", store=HashStore(), rank=0, world_size=1)
