"""Launch mode `allocation`: the training job is an allocation without a batch script (`salloc --no-shell`),
so that each of its nodes can be given back. What a controller has noted about it in the job directory:

    allocation.json   {"job_id": 12, "controller": 11, "attempt": 0, "launched": true, "given_back": false}

Whoever starts a controller again takes the same allocation up by this file; whoever leads ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tm_slurm.coordinator.election import write_atomically
from tm_slurm.slurm import Slurm, SlurmRefused, SlurmUnavailable

log = logging.getLogger("tm_slurm.leader")

FILE = "allocation.json"
ASK_AGAIN_S = 1.0
END_LIMIT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """`job_id`: of the allocation; `controller`: of the job that has asked for it, None when that runs in a
    shell; `attempt`: how often training has been started before; `launched`: its agents are there;
    `given_back`: all of its nodes were, one after another, and training goes on on others."""

    job_id: int
    controller: int | None
    attempt: int
    launched: bool = False
    given_back: bool = False

    @classmethod
    def read(cls, job_dir: Path) -> Allocation | None:
        """None in launch mode `batch`, and before there are nodes."""
        try:
            return cls(**json.loads((job_dir / FILE).read_text()))
        except FileNotFoundError:
            return None

    def write(self, job_dir: Path) -> None:
        write_atomically(job_dir / FILE, json.dumps(asdict(self)))


def give_all_back(slurm: Slurm, job_dir: Path, job_id: int) -> None:
    """The last nodes of the allocation are given back: noted first, so that nobody takes its end for the end
    of training."""
    known = Allocation.read(job_dir)
    if known is not None and known.job_id == job_id:
        replace(known, given_back=True).write(job_dir)
    slurm.cancel(job_id)


async def watch_controller(
    slurm: Slurm, controller: int, feed: Callable[[dict[str, Any]], object], interval_s: float
) -> None:
    """Stop training when the user cancels the controller's job. One that is lost, or has to wait in the
    queue, stops nothing. One that was requeued need not wait for two minutes, as Slurm would have it."""
    restarts = -1
    while True:
        await asyncio.sleep(interval_s)
        with contextlib.suppress(SlurmUnavailable, SlurmRefused):
            job = await asyncio.to_thread(slurm.job, controller)
            if job.state == "CANCELLED":
                feed({"kind": "stop", "reason": f"job {controller} was cancelled", "exit_code": 1})
                return
            if job.state == "PENDING" and job.restarts != restarts:
                restarts = job.restarts
                await asyncio.to_thread(slurm.begin_not_before, controller, time.time())


async def end(slurm: Slurm, allocation: Allocation) -> None:
    """Training is over: nothing stays allocated, and a controller that waits in the queue need not. Tries
    until Slurm answers, at most END_LIMIT_S."""
    deadline = time.monotonic() + END_LIMIT_S
    while not allocation.given_back and time.monotonic() < deadline:
        try:
            await asyncio.to_thread(slurm.cancel, allocation.job_id)
            break
        except SlurmRefused as error:
            log.error("the allocation cannot be ended job=%d reason=%s", allocation.job_id, error)
            break
        except SlurmUnavailable as error:
            log.warning("the allocation cannot be ended yet job=%d reason=%s", allocation.job_id, error)
        await asyncio.sleep(ASK_AGAIN_S)
    if allocation.controller is not None:
        with contextlib.suppress(SlurmUnavailable, SlurmRefused):  # it runs, which is the usual case
            await asyncio.to_thread(slurm.begin_not_before, allocation.controller, time.time())
