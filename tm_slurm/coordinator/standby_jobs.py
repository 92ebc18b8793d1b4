"""Makes Slurm's queue agree with what the decisions ask for (`JobState.asks`): a standby job for each ask,
none beside them, and none at all when the job is over.

Every standby job's name says whose it is: `tm-standby-JOB.ATTEMPT.ASK.NAME`. So a leader that does not know
whether the one before it got an answer from sbatch finds out by asking the queue, and never asks twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from tm_slurm.coordinator.model import Ask, JobState
from tm_slurm.coordinator.submitting import answer_of, submission
from tm_slurm.coordinator.sweeper_job import SweeperJob
from tm_slurm.coordinator.training import IS_ENDING, Training, has_ended
from tm_slurm.slurm import QueuedJob, Slurm, SlurmRefused, SlurmUnavailable

log = logging.getLogger("tm_slurm.leader")

LOOK_S = 0.2
"""Between looks at what is asked for; Slurm is asked at most once in a poll interval."""

ENDS_BY_ITSELF_S = 1.5
"""A standby job whose agent has ended is over so soon; later it is cancelled."""

SWEEP_LIMIT_S = 10.0


class StandbyJobs:
    """`feed` takes an input of the decisions; `state` is theirs, and is only read here. `leads`: asked before
    anything is changed."""

    def __init__(
        self,
        *,
        slurm: Slurm,
        training: Training,
        leader_node: str,
        state: JobState,
        feed: Callable[[dict[str, Any]], object],
        leads: Callable[[], bool],
        poll_interval_s: float,
    ) -> None:
        self._slurm = slurm
        self._training = training
        self._leader_node = leader_node
        self._state = state
        self._feed = feed
        self._leads = leads
        self._poll_interval_s = poll_interval_s
        self._changing = asyncio.Lock()
        self._sweeper = SweeperJob(slurm=slurm, training=training, leads=leads)

    async def look_for_ever(self) -> None:
        """Until it is cancelled. What an earlier start of the job has left in the queue is cancelled."""
        if not self._state.plan.asks:
            await asyncio.Event().wait()
        looked_at, before = time.monotonic(), self._wanted()
        await self._look()
        while True:
            await asyncio.sleep(LOOK_S)
            due = time.monotonic() - looked_at >= self._poll_interval_s
            if (due and self._state.asks) or self._wanted() != before:
                looked_at, before = time.monotonic(), self._wanted()
                await self._look()

    def _wanted(self) -> list[tuple[int, bool]]:
        return [(ask.number, ask.unwanted) for ask in self._state.asks.values()]

    async def _look(self) -> None:
        """Compare the queue with what is asked for, once."""
        known = {number: ask.job_id for number, ask in self._state.asks.items()}
        try:
            async with self._changing:
                await self._ask_about_the_training_job()
                queue = await self._queue()
                for ask in list(self._state.asks.values()):
                    if ask.number in known:
                        await self._tend(ask, known[ask.number], queue)
                unsure = tuple(
                    map(self._training.name_of, (n for n, job_id in known.items() if job_id is None))
                )
                for job_id in queue.keys() - {ask.job_id for ask in self._state.asks.values()}:
                    if not queue[job_id].name.startswith(unsure):  # else the next look will tell
                        await self._cancel(job_id, "nobody asks for it")
                coming = {ask.job_id for ask in self._state.asks.values() if ask.is_coming}
                pending = {job.job_id for job in queue.values() if job.state == "PENDING"}
                await self._sweeper.tend(waits=bool(coming & pending))
        except (SlurmUnavailable, SlurmRefused) as error:
            log.warning("standby jobs are left as they are for now reason=%s", error)

    async def _queue(self) -> dict[int, QueuedJob]:
        jobs = await asyncio.to_thread(self._slurm.queued, self._training.prefix)
        return {job.job_id: job for job in jobs if job.state not in IS_ENDING}

    async def _tend(self, ask: Ask, job_id: int | None, queue: Mapping[int, QueuedJob]) -> None:
        """`job_id`: as it was known before the queue was asked."""
        if job_id is not None:
            if job_id not in queue:
                self._feed({"kind": "standby_job_over", "ask": ask.number})
            elif ask.unwanted:
                await self._cancel(job_id, "it is not needed any more")
        elif ask.job_id is None:  # else its agent has come meanwhile
            name = self._training.name_of(ask.number)
            found = sorted(number for number, job in queue.items() if job.name.startswith(name))
            if found:  # an earlier leader has asked for it, and has not heard the answer
                self._feed({"kind": "standby_job", "ask": ask.number, "job": found[0]})
            elif ask.unwanted:
                self._feed({"kind": "standby_job_over", "ask": ask.number})
            elif self._leads():
                await self._submit(ask)

    async def _submit(self, ask: Ask) -> None:
        called = self._training.name_of(ask.number)
        command = submission("tm_slurm.submit.standby", self._training, called)
        command += [f"--ask={ask.number}", f"--exclude={','.join(ask.exclude)}"]
        command += [] if ask.minutes is None else [f"--minutes={ask.minutes}"]
        try:
            job_id = await asyncio.to_thread(answer_of, command)
        except SlurmRefused as error:
            log.warning("Slurm refuses a standby job ask=%d reason=%s", ask.number, error)
            self._feed({"kind": "standby_job_refused", "ask": ask.number, "why": str(error)})
            return
        log.info("asked Slurm for a node ask=%d job=%d", ask.number, job_id)
        self._feed({"kind": "standby_job", "ask": ask.number, "job": job_id})

    async def _cancel(self, job_id: int, why: str) -> None:
        if self._leads():
            log.info("cancelling a standby job job=%d reason=%s", job_id, why)
            await asyncio.to_thread(self._slurm.cancel, job_id)

    async def _ask_about_the_training_job(self) -> None:
        """A leader on a node of a standby job outlives the training job when that is cancelled."""
        here = self._state.nodes.get(self._leader_node)
        if here is None or here.job_id is None:
            return
        if await asyncio.to_thread(has_ended, self._slurm, self._training):
            ended = f"job {self._training.job_id} has been cancelled or has ended"
            self._feed({"kind": "stop", "reason": ended, "exit_code": 1})

    # ---- giving back, and the end ----

    async def end(self, job_id: int) -> None:
        """Give back the node of a standby job whose agent has ended, and the job with it. Tries until Slurm
        answers."""
        deadline = time.monotonic() + ENDS_BY_ITSELF_S
        while self._leads():
            try:
                job = await asyncio.to_thread(self._slurm.job, job_id)
                if job.is_over or job.state in IS_ENDING:
                    return
                if time.monotonic() >= deadline:
                    await self._cancel(job_id, "its node is given back")
                    return
            except SlurmRefused:  # it is over for so long that Slurm knows it no longer
                return
            except SlurmUnavailable as error:
                log.warning("a standby job cannot be ended yet job=%d reason=%s", job_id, error)
            await asyncio.sleep(LOOK_S)

    async def sweep(self) -> None:
        """The job is over: take out of the queue what has not brought a node. Those that have end with their
        agents."""
        if not self._state.plan.asks:
            return
        joined = {node.job_id for node in self._state.nodes.values() if node.connected}
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._sweep_all_but(joined), SWEEP_LIMIT_S)

    async def _sweep_all_but(self, joined: set[int | None]) -> None:
        async with self._changing:  # what is just being submitted is in the queue then
            while self._leads():
                try:
                    for job_id in (await self._queue()).keys() - joined:
                        await self._cancel(job_id, "the job is over")
                    await self._sweeper.end()
                    return
                except (SlurmUnavailable, SlurmRefused) as error:
                    log.warning("standby jobs could not be cancelled yet reason=%s", error)
                await asyncio.sleep(LOOK_S)
