"""The sweeper: a job of one CPU that waits for the end of the training job (`--dependency=afterany`), and
takes its standby jobs out of the queue then (tm_slurm.submit.sweeper).

Whoever leads does that, and every standby job that has brought a node. But a training job that is killed
outright, on all its nodes at once, leaves nobody behind, and Slurm itself has no word for "only as long as
that job runs". So there is a sweeper while standby jobs wait for nodes; not before they have for a while,
since most need not.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from tm_slurm.coordinator.allocation import Allocation
from tm_slurm.coordinator.submitting import answer_of, submission
from tm_slurm.coordinator.training import Training
from tm_slurm.slurm import Slurm, SlurmRefused

log = logging.getLogger("tm_slurm.leader")

PATIENCE_S = 5.0
"""So long a standby job is in the queue before a sweeper is."""


class SweeperJob:
    """`leads`: whether this leader still leads: asked before anything is changed."""

    def __init__(self, *, slurm: Slurm, training: Training, leads: Callable[[], bool]) -> None:
        self._slurm = slurm
        self._training = training
        self._leads = leads
        self._waiting_since: float | None = None
        self._is_there: bool | None = None
        """None: an earlier leader may have asked for one"""

    async def tend(self, *, waits: bool) -> None:
        """`waits`: whether a standby job is in the queue that has no node yet. SlurmUnavailable."""
        now = time.monotonic()
        if not waits:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = now
        wanted = self._waiting_since is not None and now - self._waiting_since >= PATIENCE_S
        wanted = wanted and not self._has_no_job()
        if wanted == self._is_there:
            return
        there = await asyncio.to_thread(self._slurm.queued, self._training.sweeper)
        if wanted and not there and self._leads():
            await self._submit()
        elif not wanted and there and self._leads():
            await self._cancel([job.job_id for job in there])
        self._is_there = wanted

    async def end(self) -> None:
        """The job is over, and its standby jobs are out of the queue. SlurmUnavailable, SlurmRefused."""
        if self._is_there is not False:
            there = await asyncio.to_thread(self._slurm.queued, self._training.sweeper)
            await self._cancel([job.job_id for job in there])
            self._is_there = False

    def _has_no_job(self) -> bool:
        """Whether all nodes of the training job itself were given back: there is no end to wait for."""
        known = Allocation.read(self._training.job_dir) if self._training.without_script else None
        return known is not None and known.given_back

    async def _submit(self) -> None:
        command = submission("tm_slurm.submit.sweeper", self._training, self._training.sweeper)
        try:
            job_id = await asyncio.to_thread(answer_of, command)
        except SlurmRefused as error:
            log.warning(
                "Slurm refuses a sweeper: cancel standby jobs yourself if you kill the job reason=%s", error
            )
        else:
            log.info("a sweeper is in the queue job=%d", job_id)

    async def _cancel(self, job_ids: list[int]) -> None:
        for job_id in job_ids:
            await asyncio.to_thread(self._slurm.cancel, job_id)
