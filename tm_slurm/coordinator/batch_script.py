"""The end of a job whose batch script is gone: a job whose batch host has died goes on, and when its tasks
have ended nobody would end it. Then the leader does."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from tm_slurm.coordinator.actions import End
from tm_slurm.slurm import Slurm, SlurmRefused, SlurmUnavailable

log = logging.getLogger("tm_slurm.leader")

ANSWER_LIMIT_S = 1.5
"""A machine that answers on none of its ports within this time does not run."""

PORTS = (6818, 22)
"""slurmd's usual port and ssh's. A port where nobody listens is an answer, too."""

ASK_AGAIN_S = 1.0
END_LIMIT_S = 60.0


async def is_gone(slurm: Slurm, job_id: int, batch_host: str) -> bool:
    """Whether the machine of the batch script has left the job, is DOWN, or does not answer any more.

    Slurm learns of a machine's death only after SlurmdTimeout (300 s, usually), so it is asked first and then
    the machine itself. A batch script that has died alone needs nobody: Slurm ends its job."""
    address = batch_host
    with contextlib.suppress(SlurmUnavailable, SlurmRefused):
        if batch_host not in (await asyncio.to_thread(slurm.job, job_id)).nodes:
            return True
        known = (await asyncio.to_thread(slurm.nodes, [batch_host])).get(batch_host)
        if known is not None:
            if known.state.base == "DOWN":
                return True
            address = known.address or batch_host
    return not any(await asyncio.gather(*(_answers(address, port) for port in PORTS)))


async def _answers(address: str, port: int) -> bool:
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(address, port), ANSWER_LIMIT_S)
    except ConnectionRefusedError:
        return True
    except (OSError, asyncio.TimeoutError):
        return False
    writer.transport.abort()
    return True


async def end_in_its_place(slurm: Slurm, job_id: int, end: End, batch_host: str) -> None:
    """Do what the batch script would have done by the verdict: end the job, or put it back into the queue.

    Slurm calls a job that is ended so CANCELLED; its comment says how it really ended. Tries until Slurm
    answers, at most END_LIMIT_S."""
    text = f"tm_slurm: {end.state}: {end.reason} (its batch host {batch_host} was lost before)"
    with contextlib.suppress(SlurmUnavailable, SlurmRefused):
        await asyncio.to_thread(slurm.set_comment, job_id, text)
    act: Callable[[int], None] = slurm.requeue if end.state == "requeue" else slurm.cancel
    deadline = time.monotonic() + END_LIMIT_S
    while time.monotonic() < deadline:
        try:
            await asyncio.to_thread(act, job_id)
            if end.state == "requeue" and end.begins is not None:
                act, end = partial(slurm.begin_not_before, at=end.begins), replace(end, begins=None)
                continue
            return
        except SlurmRefused as error:
            log.error("Slurm does not let the job end job=%d reason=%s", job_id, error)
            return
        except SlurmUnavailable as error:
            log.warning("the job cannot be ended yet job=%d reason=%s", job_id, error)
        await asyncio.sleep(ASK_AGAIN_S)
    log.error("the job could not be ended job=%d: run scancel %d", job_id, job_id)
