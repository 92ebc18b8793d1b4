"""When an agent leads: it stands when nobody else does, after those that are better placed for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from tm_slurm.coordinator.clock import elapsed_s
from tm_slurm.coordinator.election import Candidate, Leadership, LeaderWatch
from tm_slurm.coordinator.leader import Leader
from tm_slurm.coordinator.model import Plan

log = logging.getLogger("tm_slurm.agent")

STAND_BACK_S = 0.3
"""How long an agent leaves the lead to those who are better placed for it, when a leader has been lost."""

FIRST_STAND_BACK_S = 1.0
"""The same at the start of the job, where the agents of the nodes do not come up in one moment."""

ASIDE_S = 1.0
"""How long, beyond a lease, a leader that has stepped down leaves the lead to others."""

HAND_OVER_LIMIT_S = 60.0
RETRY_S = 0.05


class Leading:
    """`make`: a leader for a term, told whether it is sure that the others are gone. `finish`: ends this
    agent, with an exit code."""

    def __init__(
        self,
        watch: LeaderWatch,
        *,
        node: str,
        host: str,
        plan: Plan,
        make: Callable[[Leadership, bool], Leader],
        finish: Callable[[int], None],
    ) -> None:
        self._watch = watch
        self._node = node
        self._plan = plan
        self._make = make
        self._finish = finish
        self._candidate = Candidate(watch, node=node, host=host)
        self._aside_until = 0.0
        self._cut_off_term: int | None = None
        self._leader: Leader | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def is_on(self) -> bool:
        """Whether this agent leads."""
        return self._task is not None

    def stop(self, reason: str) -> bool:
        """End the job as failed, if this agent leads; whether it does."""
        if self._leader is not None:
            self._leader.stop(reason)
        return self._leader is not None

    def let_go(self) -> None:
        """Leave the lead to somebody else, if this agent has it."""
        if self._leader is not None:
            self._leader.let_go()

    def consider(self) -> None:
        """Lead, if nobody has led for so long that it is this agent's turn."""
        over_s = self._watch.over_for_s()
        if over_s is not None and over_s >= self._stand_back_s() and elapsed_s() >= self._aside_until:
            self._stand()

    def _stand_back_s(self) -> float:
        """0 for the batch host, then the other standbys, then everybody else."""
        if self._node == self._plan.batch_host or len(self._plan.order) == 1:
            return 0.0
        unit = STAND_BACK_S if self._watch.known is not None else FIRST_STAND_BACK_S
        return unit if self._node in self._plan.first_standbys() else 2 * unit

    async def take_over(self) -> None:
        """The leader hands over to this agent: lead as soon as it has let go."""
        deadline = elapsed_s() + HAND_OVER_LIMIT_S
        before = self._watch.known.term if self._watch.known is not None else 0
        while not self.is_on and elapsed_s() < deadline:
            known = self._watch.look()
            if known is not None and known.term > before:
                return
            self._stand()
            await asyncio.sleep(RETRY_S)

    def _stand(self) -> None:
        if self.is_on:
            return
        before = self._watch.known.term if self._watch.known is not None else None
        try:
            leadership = self._candidate.claim()
        except OSError as error:
            log.warning("this agent cannot lead: the job directory cannot be written reason=%s", error)
            return
        if leadership is not None:
            sure = before is not None and before == self._cut_off_term
            self._task = asyncio.create_task(self._lead(leadership, sure))

    async def _lead(self, leadership: Leadership, sure: bool) -> None:
        try:
            self._leader = self._make(leadership, sure)
            outcome = await self._leader.lead()
            if outcome == "ended":
                self._finish(0)
            elif outcome != "deposed":
                self._aside_until = elapsed_s() + leadership.lease_s + ASIDE_S
            if outcome == "cut_off":
                self._cut_off_term = leadership.term
        except Exception:
            log.exception("the leader failed")  # whatever it was, the agent must not be left without an end
            self._finish(1)
        finally:
            leadership.resign()
            self._task = self._leader = None

    async def ended(self, limit_s: float) -> None:
        """Wait until this agent leads no more."""
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=limit_s)
