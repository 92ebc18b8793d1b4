"""Further nodes: when Slurm is asked for one, which it must not be, who may join by it, and when it is not
wanted any more.

    refill       as many nodes as the job was submitted for: one is asked for when one has been given back, or
                 is lost for good
    elastic      as many as hold ranks, and a node that should be left counts as gone at once

What is asked for is a plain list in the state (`JobState.asks`); tm_slurm.coordinator.standby_jobs makes
Slurm's queue agree with it. So a new leader, which finds the list in the journal, asks for nothing twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tm_slurm.coordinator.deciding import Input
from tm_slurm.coordinator.membership import Membership
from tm_slurm.coordinator.model import FAILURE_LIMIT, Ask, JobState, Node, Notice

ASK_AGAIN_S = 5.0
"""After one that brought no node, doubled each time, up to ASK_AGAIN_LIMIT_S: nobody floods a queue."""

ASK_AGAIN_LIMIT_S = 300.0

NOT_NEEDED = "no place is missing any more"

UNKNOWN_TO_SLURM = frozenset({"unhealthy", "straggler"})
"""Nodes that were left for this are free to Slurm, and no better than before."""


Brought = dict[str, int]
"""Of an agent that has come with a standby job: which `ask` it is for, and its `job`. Of others, empty."""


class Refilling(Membership):
    """The part of the decisions that is about nodes beyond those of the training job."""

    # ---- asking ----

    def _plan_refill(self) -> None:
        """Ask for what is missing, take back what is not needed any more."""
        state = self.state
        if not state.plan.asks or state.ended:
            return
        coming = [ask for ask in state.asks.values() if ask.is_coming]
        surplus = len(coming) - missing_places(state)
        for ask in reversed(coming):
            if surplus > 0:
                surplus -= 1
                self._withdraw(ask, NOT_NEEDED)
        for node in self._not_needed():
            node.notice = Notice(
                f"surplus/{node.name}/{node.job_id}", "surplus", NOT_NEEDED, self.now, "", True
            )
            self._standby_leaves(node)
        exclude = self._excluded() if surplus < 0 else ()
        if surplus < 0 and (self.now >= state.ask_again_at or exclude != state.asked_in_vain):
            for _ in range(-surplus):
                self._ask_for_a_node(exclude)

    def _ask_for_a_node(self, exclude: tuple[str, ...]) -> None:
        state = self.state
        state.asked += 1
        left_s = None if state.ends_at is None else state.ends_at - self.now
        minutes = None if left_s is None or left_s <= 0 else math.ceil(left_s / 60)
        state.asks[state.asked] = Ask(state.asked, self.now, exclude, minutes)
        self._note("asked", ask=state.asked, exclude=list(exclude))

    def _not_needed(self) -> list[Node]:
        """Standbys that have come by standby jobs, where more are there than places: the node that one of
        them was asked for has been resumed, say."""
        state = self.state
        if not state.started or state.move is not None or state.recovery is not None or state.absent:
            return []
        came = [n for n in state.nodes.special() if n.job_id is not None and n.free_to_join()]
        if not came or state.seats.hosts() or state.finishing or state.stopping:
            return []
        more = sum(_counts(state, node) for node in state.nodes.values()) - wanted_nodes(state)
        return came[: max(0, more)]

    def _withdraw(self, ask: Ask, why: str) -> None:
        ask.unwanted = True
        self._note("ask_withdrawn", ask=ask.number, job=ask.job_id, why=why)

    def _excluded(self) -> tuple[str, ...]:
        """Nodes that must not be given: those that are in the job (a node with a live rank is never a
        joiner), and those that have failed without Slurm's knowing."""
        nodes = self.state.nodes.values()
        return tuple(sorted(node.name for node in nodes if node.standing != "released" or _is_bad(node)))

    def _is_to_ask_again(self, now: float) -> bool:
        state = self.state
        coming = sum(ask.is_coming for ask in state.asks.values())
        waits = state.plan.asks and 0.0 < state.ask_again_at <= now
        return waits and missing_places(state) > coming

    def _on_ask_again(self, given: Input) -> None:
        """The pause after one that brought no node is over; see _plan_refill."""
        self.state.ask_again_at = 0.0

    def _can_be_asked_for(self, node: Node) -> None:
        """The administrator has resumed it. What waits in the queue and may not have it is asked for anew."""
        node.shunned = False
        if node.standing != "released":
            return
        for ask in self.state.asks.values():
            if ask.is_coming and node.name in ask.exclude:
                self._withdraw(ask, f"{node.name} may be given again")

    def _on_node_lost(self, given: Input) -> None:
        super()._on_node_lost(given)
        node = self.state.nodes[given["node"]]
        node.shunned |= not node.agent_up

    # ---- what comes of it ----

    def _on_standby_job(self, given: Input) -> None:
        """Slurm has taken a standby job."""
        ask = self.state.asks.get(int(given["ask"]))
        if ask is not None and ask.job_id is None:
            ask.job_id = int(given["job"])
            self._note("standby_job", ask=ask.number, job=ask.job_id)

    def _on_standby_job_refused(self, given: Input) -> None:
        """Slurm does not take it as it is."""
        ask = self.state.asks.pop(int(given["ask"]), None)
        if ask is not None:
            self._note("ask_refused", ask=ask.number, why=given["why"])
            self._failed(ask)

    def _on_standby_job_over(self, given: Input) -> None:
        """A standby job is in the queue no more: it has ended, or somebody has cancelled it."""
        ask = self.state.asks.pop(int(given["ask"]), None)
        if ask is None:
            return
        self._note("standby_job_over", ask=ask.number, job=ask.job_id, node=ask.node)
        if ask.is_coming:
            self._failed(ask)

    def _failed(self, ask: Ask) -> None:
        state = self.state
        pause_s = min(ASK_AGAIN_S * 2.0**state.ask_failures, ASK_AGAIN_LIMIT_S)
        state.ask_failures += 1
        state.ask_again_at, state.asked_in_vain = self.now + pause_s, ask.exclude

    # ---- joining ----

    def _on_node_joined(self, given: Input) -> None:
        brought = brought_by(given)
        if brought and not why_not_admitted(self.state, given["node"], **brought):
            known = self.state.nodes.get(given["node"])
            if known is None or known.job_id != brought["job"]:  # else its agent has connected again
                self._admit(given["node"], self.state.asks[brought["ask"]], brought["job"])
        super()._on_node_joined(given)

    def _admit(self, name: str, ask: Ask, job_id: int) -> None:
        """A node has come by a standby job: it is new to this job, also if it has been in it before."""
        ask.node, ask.job_id = name, job_id
        self.state.nodes[name] = Node(name, batch_host=False, standing="standby", job_id=job_id)
        self.state.accused.pop(name, None)
        self.state.ask_failures, self.state.ask_again_at = 0, 0.0
        self._note("refilled", node=name, ask=ask.number, job=job_id, seconds=self.now - ask.at)


def missing_places(state: JobState) -> int:
    """How many nodes the job has too few, those not counted that were asked for and have not come.

    0 until training has begun: a node that is slow to start is not replaced by one that was asked for."""
    plan = state.plan
    if not plan.asks or not state.started or state.finishing or state.stopping or state.ended:
        return 0
    return max(0, wanted_nodes(state) - sum(_counts(state, node) for node in state.nodes.values()))


def wanted_nodes(state: JobState) -> int:
    """As how many nodes the job should have."""
    standbys = len(state.plan.order) - state.plan.active_nodes
    return state.plan.active_nodes + (standbys if state.plan.refill else 0)


def brought_by(said: Mapping[str, Any]) -> Brought:
    """What an agent says of its standby job."""
    ask, job = said.get("ask"), said.get("job")
    return {"ask": ask, "job": job} if isinstance(ask, int) and isinstance(job, int) else {}


def why_not_admitted(state: JobState, node: str, ask: int | None = None, job: int | None = None) -> str:
    """Why the agent that says to be of `node` may not connect; empty if it may. `ask`, `job`: of its standby
    job; None for an agent of the training job itself."""
    known = state.nodes.get(node)
    if ask is None:
        other = known is not None and known.job_id is not None
        return f"node {node} is here by another job now" if other else ""
    if known is not None and known.job_id == job and known.standing != "released":
        return ""
    return _why_not_new(state, known, ask, job)


def _why_not_new(state: JobState, known: Node | None, number: int, job: int | None) -> str:
    ask = state.asks.get(number)
    if ask is None or ask.job_id not in (None, job):
        return f"standby job {job} is not one that is asked for"
    if ask.node is not None:
        return f"standby job {job} has brought node {ask.node}"
    if ask.unwanted or missing_places(state) == 0:
        return NOT_NEEDED
    if known is not None and known.standing != "released":
        return f"node {known.name} is in this job already"
    return ""


def _counts(state: JobState, node: Node) -> bool:
    """Whether a place is taken: by a node that stays, or that may come back."""
    if node.standing == "lost" or (node.standing == "active" and not node.agent_up):
        waits = state.recovery is not None and state.recovery.waiting_since is not None
        for_good = node.standing == "lost" and (node.lost_at is None or node.batch_host)
        return not waits and not for_good
    failed = node.standing == "standby" and node.failures > FAILURE_LIMIT
    if node.standing in ("released", "kept") or failed:
        return False
    gives_back = node.notice is not None and node.notice.gives_back
    return not (gives_back and state.plan.elastic)


def _is_bad(node: Node) -> bool:
    return node.shunned or (node.notice is not None and node.notice.kind in UNKNOWN_TO_SLURM)
