"""A replica of torchft: one rank, with the whole model.

    BASELINES_RUN=DIR BASELINES_TORCHFT=SETTINGS python -m baselines.torchft_replica [RANK]

Without RANK it is a standby: it has done all that it can do alone, a step included, when it waits for its
turn. torchft's hook for DistributedDataParallel fails an assertion on gloo once an all-reduce has failed;
ours does the same without it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torchft

from baselines.rival_torchft import SETTINGS
from baselines.run_files import RunFiles
from baselines.training import Training
from tm_slurm.examples.char_gpt import train_step


class Replicated(torchft.DistributedDataParallel):  # type: ignore[misc]
    """Gradients are averaged over the replicas of the quorum."""

    @staticmethod
    def _comm_hook(state, bucket):  # type: ignore[no-untyped-def]  # torch rejects annotations that are text
        state.allreduce(bucket.buffer()).wait()
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done


def manager_of(
    training: Training, rank: int, store: dist.TCPStore, settings: dict[str, Any]
) -> torchft.Manager:
    """`store`: on this node; it must be kept."""
    timeout = timedelta(seconds=settings["timeout_s"])
    return torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timeout),
        load_state_dict=training.load_state_dict,
        state_dict=training.state_dict,
        min_replica_size=settings["min_replica_size"],
        timeout=timeout,
        connect_timeout=timeout,
        quorum_timeout=timedelta(seconds=settings["quorum_timeout_s"]),
        heartbeat_interval=timedelta(milliseconds=settings["heartbeat_ms"]),
        rank=0,
        world_size=1,
        store_addr=store.host,
        store_port=store.port,
        hostname=store.host,
        lighthouse_addr=settings["lighthouse"],
        replica_id=f"replica_{rank}",
        init_sync=False,
    )


def main(rank: int | None) -> None:
    files = RunFiles.from_environment()
    settings = json.loads(os.environ[SETTINGS])
    training = Training(files, rank or 0, 1)
    if rank is None:
        training.step(0)
        rank = files.await_turn()
        data = training.state["data"]
        data.load_state_dict({**data.state_dict(), "rank": rank})
    writer, node = files.writer(), os.uname().nodename
    store = dist.TCPStore(socket.gethostbyname(node), 0, is_master=True, wait_for_workers=False)
    manager = manager_of(training, rank, store, settings)
    state = {
        **training.state,
        "model": Replicated(manager, training.state["model"]),
        "optimizer": torchft.Optimizer(manager, training.state["optimizer"]),
    }
    while files.leaver != node:
        train_step(state, manager.current_step())
        if manager.current_step() > writer.last + 1:
            writer.done(rank, manager.current_step() - 1)
    manager.shutdown(wait=False)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else None)
