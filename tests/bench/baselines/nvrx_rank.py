"""A process of an in-process restart: a rank, or in reserve.

    BASELINES_RUN=DIR BASELINES_NVRX=SETTINGS RANK=… WORLD_SIZE=5 MASTER_ADDR=… python -m baselines.nvrx_rank

Only what hangs on process groups is made again in a restart; imports, and a step that this process has done
alone, are there. gloo's collectives cannot be aborted as NCCL's can (by the package's Abort), so they get a
short time limit as soon as DistributedDataParallel is built. The package looks for its own class among the
annotations of the wrapped function, so these must be classes, and no text.
"""

import json
import os
from datetime import timedelta

import torch.distributed as dist
from nvidia_resiliency_ext import inprocess
from nvidia_resiliency_ext.inprocess import CallWrapper
from torch.distributed.distributed_c10d import _set_pg_timeout

from baselines.rival_nvrx_inprocess import RANKS, SETTINGS
from baselines.run_files import RunFiles
from baselines.training import STEPS, Training


def train(files: RunFiles, store: dist.Store, settings: dict, call: CallWrapper = None) -> None:  # type: ignore
    """From the newest checkpoint on, as the rank that this process has now."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", store=dist.PrefixStore(str(call.iteration), store), rank=rank, world_size=world_size
    )
    training = Training(files, rank, world_size)
    _set_pg_timeout(timedelta(seconds=settings["gloo_timeout_s"]))
    writer, node = files.writer(), os.uname().nodename
    for step in range(training.load(), STEPS):
        training.step(step)
        writer.done(rank, step)
        if rank == 0:
            with call.atomic():
                training.save(step + 1)
        if files.leaver == node:
            os._exit(0)


def main() -> None:
    files = RunFiles.from_environment()
    settings = json.loads(os.environ[SETTINGS])
    Training(files, 0, 1).step(0)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = settings["store"]
    store = dist.TCPStore(host, port, world_size, is_master=False, wait_for_workers=False)
    intervals = {name: timedelta(seconds=seconds) for name, seconds in settings["wrapper"].items()}
    assign = inprocess.rank_assignment
    wrapper = inprocess.Wrapper(
        store_kwargs={"port": int(os.environ["MASTER_PORT"])},
        rank_assignment=inprocess.Compose(assign.MaxActiveWorldSize(RANKS), assign.ShiftRanks()),
        **intervals,
    )
    if rank >= RANKS:
        (files.directory / f"ready-{os.uname().nodename}").touch()
    wrapper(train)(files, store, settings)


if __name__ == "__main__":
    main()
