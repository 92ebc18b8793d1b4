"""A rank of a restarting rival: DistributedDataParallel on gloo, from the newest checkpoint on.

    BASELINES_RUN=DIR BASELINES_CHECKPOINT_EVERY=1 torchrun … -m baselines.ddp_rank

Rank 0 writes the checkpoint (the others' state is the same). When this rank's node is to be left, it goes at
the end of a step, once there is a checkpoint newer than the order, and asks its launcher to end.
"""

from __future__ import annotations

import os
import signal

import torch.distributed as dist

from baselines.run_files import RunFiles
from baselines.training import STEPS, Training

EVERY = "BASELINES_CHECKPOINT_EVERY"


def train(files: RunFiles, every: int) -> None:
    """Until the process is ended from outside, or its node is to be left."""
    dist.init_process_group("gloo")
    rank, node = dist.get_rank(), os.uname().nodename
    training = Training(files, rank, dist.get_world_size())
    writer = files.writer()
    noticed_at: int | None = None
    for step in range(training.load(), STEPS):
        training.step(step)
        writer.done(rank, step)
        leaver = files.leaver
        if leaver is not None and noticed_at is None:
            noticed_at = step + 1
        if rank == 0 and ((step + 1) % every == 0 or noticed_at == step + 1):
            training.save(step + 1)
        if leaver == node and noticed_at is not None and files.saved_steps >= noticed_at:
            os.kill(os.getppid(), signal.SIGTERM)
            os._exit(0)


if __name__ == "__main__":
    train(RunFiles.from_environment(), int(os.environ[EVERY]))
