"""How a leader comes to know what those before it knew, and leaves it to the next."""

from __future__ import annotations

import asyncio
import logging

from tm_slurm.coordinator import summary
from tm_slurm.coordinator.election import Leadership
from tm_slurm.coordinator.journal import Journal, Piece
from tm_slurm.coordinator.memory import Memory
from tm_slurm.coordinator.model import Plan
from tm_slurm.state.collecting import no_garbage_collection

log = logging.getLogger("tm_slurm.leader")


class Remembering:
    """`memory` is what the leaders before knew: what one of them has summed up, and every input since.
    `replayed`: how many inputs there were."""

    def __init__(
        self, journal: Journal, leadership: Leadership, plan: Plan, node: str, secret: bytes
    ) -> None:
        self._journal = journal
        self._leadership = leadership
        self._secret = secret
        self._putting_down: asyncio.Task[None] | None = None
        self.is_whole = True
        """whether all that this term has journalled was acted on; else only the journal makes up for it"""
        with (
            no_garbage_collection()
        ):  # nearly all that is made stays: to look for garbage takes a third of it
            where = leadership.job_dir, leadership.attempt, journal.pieces
            # a long history must not cost the lease
            known = summary.newest(*where, secret, meanwhile=leadership.keep)
            self.memory, self.covered = known if known is not None else (Memory(plan, node), [])
            self.memory.decisions.state.plan = plan  # who led then, the history itself says
            self._summed_up = self.memory.inputs
            leadership.keep()
            for term, given in journal.inherited(self.covered):
                self.memory.repeat(term, given)
                leadership.keep()
        self.replayed = self.memory.inputs

    def sum_up(self) -> None:
        """For the next leader, when that has become worth it, and nothing is under way that would wait."""
        state = self.memory.decisions.state
        calm = state.started and state.move is None and state.recovery is None and not state.ended
        worth_it = self.memory.inputs - self._summed_up >= summary.INPUTS
        if not calm or not worth_it or not self.is_whole or self._journal.closed:
            return
        if self._putting_down is not None and not self._putting_down.done():
            return
        if not self._leadership.renew():  # just before, since it takes a while
            return
        self._summed_up = self.memory.inputs
        try:
            with no_garbage_collection():
                position, whole = self._journal.position(), summary.pickled(self.memory)
        except Exception as error:  # whatever it is: it is of no use to this leader
            log.warning("what is known cannot be summed up for the next leader reason=%r", error)
            return
        self._putting_down = asyncio.create_task(self._put_down(position, whole))

    async def _put_down(self, position: list[Piece], whole: bytes) -> None:
        job_dir, attempt = self._leadership.job_dir, self._leadership.attempt
        try:
            await asyncio.to_thread(summary.write, job_dir, attempt, position, whole, self._secret)
        except OSError as error:
            log.warning("what is known cannot be summed up for the next leader reason=%s", error)
