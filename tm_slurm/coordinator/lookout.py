"""What Slurm has in store for the job, asked for now and then: reservations over its nodes, the end of its
time, and whether it is being preempted.

What was found goes to the decisions as one input, and only when it is something new. A question that got no
answer changes nothing: what was known before still holds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from tm_slurm.coordinator.model import JobState
from tm_slurm.events import Event, Window, windows_of
from tm_slurm.events.windows import is_for_maintenance
from tm_slurm.slurm import JobInfo, ReservationInfo, Slurm, SlurmRefused, SlurmUnavailable

log = logging.getLogger("tm_slurm.leader")

LOOK_EVERY = 4
"""Poll intervals from one look ahead to the next: what comes in minutes needs no answer within a second."""


class Lookout:
    """`feed` takes an input of the decisions; `state` is theirs, and is only read here."""

    def __init__(
        self,
        *,
        slurm: Slurm,
        job_id: int,
        state: JobState,
        feed: Callable[[dict[str, Any]], object],
        poll_interval_s: float,
    ) -> None:
        self._slurm = slurm
        self._job_id = job_id
        self._state = state
        self._feed = feed
        self._poll_interval_s = poll_interval_s
        self._preempted_at: float | None = None
        self.at_home: frozenset[str] | None = None
        """nodes of reservations that the job itself runs in: their maintenance is no news to it. None as long
        as it is not known."""

    async def look_for_ever(self) -> None:
        """Look now and then; with each poll as long as no look has got an answer."""
        while True:
            await asyncio.sleep(self._poll_interval_s * (LOOK_EVERY if self.at_home is not None else 1))
            await self.look()

    async def look(self) -> None:
        """Ask, and tell what is new. An allocation whose nodes were all given back has no time limit any
        more: those of the standby jobs' nodes count."""
        try:
            job: JobInfo | None = None
            if self._state.has_own_nodes():
                job = await asyncio.to_thread(self._slurm.job, self._job_id)
            reservations = await asyncio.to_thread(self._slurm.reservations)
            cpus = await asyncio.to_thread(self._cpus_of, reservations)
        except (SlurmUnavailable, SlurmRefused) as error:
            log.warning("the look ahead failed, nothing is concluded from it reason=%s", error)
            return
        now = time.time()
        own = () if job is None else job.reservations
        self.at_home = frozenset(node for name in own for node in _nodes_of(reservations, name))
        windows = windows_of(
            reservations.values(),
            nodes=list(self._state.nodes),
            own=own,
            cpus=cpus,
            now=now,
            ends=None if job is None else job.end_time,
        )
        self._tell(job, windows, now)

    def _cpus_of(self, reservations: dict[str, ReservationInfo]) -> dict[str, int]:
        """The CPUs of all nodes of the reservations for which it matters whether they hold whole nodes."""
        asked = {
            node
            for reservation in reservations.values()
            if not is_for_maintenance(reservation)
            and not self._state.nodes.keys().isdisjoint(reservation.nodes)
            for node in reservation.nodes
        }
        return {name: info.cpus for name, info in self._slurm.nodes(sorted(asked)).items()}

    def _tell(self, job: JobInfo | None, windows: list[Window], now: float) -> None:
        if job is not None:
            self._tell_of_preemption(job, now)
        outlook: dict[str, Any] = {
            "windows": [window.to_json() for window in windows],
            "starts": None if job is None else job.start_time,
            "ends": None if job is None else job.end_time,
        }
        if outlook != self._state.outlook:
            self._feed({"kind": "outlook", "wall": now, **outlook})

    def _tell_of_preemption(self, job: JobInfo, now: float) -> None:
        preempted = job.preempt_time is not None and job.preempt_time > (job.start_time or 0.0)
        if preempted and job.preempt_time != self._preempted_at:
            self._preempted_at = job.preempt_time
            event = Event(
                id=f"preempt//{job.preempt_time:.0f}",
                kind="preempt",
                node="",
                source="poll",
                reason="Slurm wants the nodes for another job",
                at=now,
                deadline=job.end_time,
            )
            self._feed({"kind": "events", "events": [event.to_json()]})


def _nodes_of(reservations: dict[str, ReservationInfo], name: str) -> tuple[str, ...]:
    return reservations[name].nodes if name in reservations else ()
