"""What the leader does with Slurm: asks for the nodes' states, gives nodes back, sets the job's comment.

Slurm commands take time, so they run in threads beside the decisions; what comes of them is fed back as
inputs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from tm_slurm.coordinator.allocation import give_all_back, watch_controller
from tm_slurm.coordinator.lookout import Lookout
from tm_slurm.coordinator.model import JobState
from tm_slurm.coordinator.standby_jobs import StandbyJobs
from tm_slurm.coordinator.training import Training
from tm_slurm.events import Episodes, Event, NodeWatch
from tm_slurm.slurm import NodeState, ResizeBlocked, Slurm, SlurmRefused, SlurmUnavailable

log = logging.getLogger("tm_slurm.leader")

COMMENT_INTERVAL_S = 1.0
AWAIT_DRAINED_INTERVAL_S = 0.2
"""Between polls while a node that was given back is not DRAINED yet."""

AWAIT_DRAINED_LIMIT_S = 60.0
"""So long polls are that close; later only as close as ever."""

NODES_POLLED_PER_S = 1000.0
"""At most so many: in a larger job polls are further apart, so that they cost neither slurmctld nor the
leader more than in one of 1,000 nodes. Triggers, prolog, epilog and plugin tell at once."""

CONTROLLER_INTERVAL_S = 1.0
"""Between looks at whether somebody has cancelled the controller's job."""

ASK_AGAIN_S = 1.0
"""Between attempts to give a node back while Slurm does not answer."""

RELEASE_TOGETHER_S = 1.0
"""How long a node that is ready to be given back waits for others that are about to be."""


def pause_s(interval_s: float, nodes: int) -> float:
    """Seconds between two polls of so many nodes, where `interval_s` is wished."""
    return max(interval_s, nodes / NODES_POLLED_PER_S)


class SlurmSide:
    """`feed` takes an input of the decisions; `state` is theirs, and is only read here. `leads`: whether this
    leader still leads: asked before anything is changed. `seen`: the events that earlier leaders have
    handled, in order."""

    def __init__(
        self,
        *,
        slurm: Slurm,
        training: Training,
        leader_node: str,
        state: JobState,
        feed: Callable[[dict[str, Any]], object],
        leads: Callable[[], bool],
        seen: Iterable[Event],
        poll_interval_s: float,
    ) -> None:
        self._slurm = slurm
        self._training = training
        self._job_id = job_id = training.job_id
        self._leader_node = leader_node
        self._state = state
        self._feed = feed
        self._leads = leads
        self._poll_interval_s = poll_interval_s
        episodes = Episodes()
        episodes.restore(seen)
        self.episodes = episodes
        """The facts about nodes that hold: every source of events shares them."""
        self._watch = NodeWatch(episodes)
        self._lookout = Lookout(
            slurm=slurm, job_id=job_id, state=state, feed=feed, poll_interval_s=poll_interval_s
        )
        self.standby_jobs = StandbyJobs(
            slurm=slurm,
            training=training,
            leader_node=leader_node,
            state=state,
            feed=feed,
            leads=leads,
            poll_interval_s=poll_interval_s,
        )
        self._to_release: asyncio.Queue[str] = asyncio.Queue()
        self._comment: str | None = None
        self._awaited_since: dict[str, float] = {}
        self._look_ahead = asyncio.Event()

    def start(self) -> list[asyncio.Task[None]]:
        """The tasks that do it all, until they are cancelled."""
        works = (self._poll_for_ever(), self._look_ahead_for_ever(), self._comment_for_ever())
        works_of_change = (self._release_for_ever(), self.standby_jobs.look_for_ever())
        tasks = [asyncio.create_task(work) for work in (*works, *works_of_change)]
        if self._training.controller is not None:
            interval_s = max(self._poll_interval_s, CONTROLLER_INTERVAL_S)
            watching = watch_controller(self._slurm, self._training.controller, self._feed, interval_s)
            tasks.append(asyncio.create_task(watching))
        return tasks

    def release(self, node: str) -> None:
        """Give a node back as soon as may be."""
        self._to_release.put_nowait(node)

    def comment(self, text: str) -> None:
        """Have the job's comment say this; of several texts within a second, the last."""
        self._comment = text

    async def _release_for_ever(self) -> None:
        """Give nodes back, those that leave together in one update: a Slurm without accounting storage may
        let a job be resized only once."""
        while True:
            nodes = {await self._to_release.get()}
            deadline = time.monotonic() + RELEASE_TOGETHER_S
            while self._others_leaving(nodes) and time.monotonic() < deadline:
                with contextlib.suppress(asyncio.TimeoutError):
                    nodes.add(await asyncio.wait_for(self._to_release.get(), deadline - time.monotonic()))
            try:
                await self._give_back(nodes)
            except SlurmRefused as error:
                for node in sorted(nodes):
                    self._feed({"kind": "release_refused", "node": node, "why": str(error)})
                continue
            for node in sorted(nodes):
                self._feed({"kind": "released", "node": node})

    async def _give_back(self, nodes: set[str]) -> None:
        """Those of the training job by shrinking it, those of standby jobs with them. SlurmRefused."""
        brought_by = {node: self._state.nodes[node].job_id for node in nodes}
        own = {node for node, job_id in brought_by.items() if job_id is None}
        if own:
            await self._shrink_without(own)
        ends = [self.standby_jobs.end(job_id) for job_id in brought_by.values() if job_id is not None]
        await asyncio.gather(*ends)

    async def _shrink_without(self, nodes: set[str]) -> None:
        """Asks until Slurm answers. What Slurm has cut out of the job by itself needs no shrinking.
        SlurmRefused."""
        while self._leads():
            try:
                job = await asyncio.to_thread(self._slurm.job, self._job_id)
                keep = [name for name in job.nodes if name not in nodes]
                if not keep and self._training.without_script and self._leads():
                    await asyncio.to_thread(give_all_back, self._slurm, self._training.job_dir, self._job_id)
                elif len(keep) < len(job.nodes) and self._leads():
                    await asyncio.to_thread(self._slurm.shrink, self._job_id, keep)
                return
            except SlurmUnavailable as error:
                log.warning(
                    "nodes cannot be given back yet nodes=%s reason=%s", ",".join(sorted(nodes)), error
                )
                await asyncio.sleep(ASK_AGAIN_S)

    def _others_leaving(self, nodes: set[str]) -> bool:
        """Whether another node is about to be ready to be given back, too."""
        return any(
            node.standing == "leaving" and node.name not in nodes and node.name != self._leader_node
            for node in self._state.nodes.values()
        )

    async def _poll_for_ever(self) -> None:
        await self._lookout.look()  # first of all, what the job's own reservation is
        self._look_ahead.set()
        while True:
            names = list(self._state.nodes)
            try:
                nodes = await asyncio.to_thread(self._slurm.nodes, names)
            except (SlurmUnavailable, SlurmRefused) as error:
                log.warning("poll failed, nothing is concluded from it reason=%s", error)
                nodes = None
            at_home = self._lookout.at_home
            events = self._watch.observe(
                nodes, time.time(), at_home=at_home if at_home is not None else frozenset(names)
            )
            if events:
                self._feed({"kind": "events", "events": [event.to_json() for event in events]})
            for name in self._awaited():
                if nodes is not None and name in nodes and self._has_it(name, nodes[name].state):
                    self._feed({"kind": "node_drained", "node": name, "state": str(nodes[name].state)})
            await asyncio.sleep(self._pause_s(self._awaited(), time.monotonic()))

    async def _look_ahead_for_ever(self) -> None:
        """Beside the polls, which are not to wait for it."""
        await self._look_ahead.wait()
        await self._lookout.look_for_ever()

    def _awaited(self) -> list[str]:
        """Nodes that were given back, and that Slurm does not call DRAINED, or free, yet."""
        nodes = self._state.nodes.values()
        return [n.name for n in nodes if n.standing == "released" and n.notice is not None and not n.drained]

    def _has_it(self, name: str, state: NodeState) -> bool:
        """Whether the administrator has a node that was given back. Only what is drained is called so; a node
        that was left for a reservation, a reboot or FAIL is free."""
        notice = self._state.nodes[name].notice
        drained = notice is None or notice.kind in ("drain", "down")
        return state.is_drained if drained else state.is_free

    def _pause_s(self, awaited: list[str], now: float) -> float:
        """Until the next poll: short while nodes are awaited, but not for ever (somebody has resumed one)."""
        self._awaited_since = {name: self._awaited_since.get(name, now) for name in awaited}
        fresh = any(now - since < AWAIT_DRAINED_LIMIT_S for since in self._awaited_since.values())
        interval_s = AWAIT_DRAINED_INTERVAL_S if fresh else self._poll_interval_s
        return pause_s(interval_s, len(self._state.nodes))

    async def _comment_for_ever(self) -> None:
        said: str | None = None
        while True:
            text = self._comment
            if text is not None and text != said and self._leads():
                try:
                    job_id = self._training.controller or self._job_id  # that one is there to the end
                    await asyncio.to_thread(
                        self._slurm.set_comment, job_id, text.replace("JOBID", str(job_id))
                    )
                    said = text
                except ResizeBlocked as error:
                    log.warning("no more job comments: this Slurm refuses every change now reason=%s", error)
                    return
                except SlurmRefused as error:
                    said = text
                    log.warning("Slurm refused the job comment reason=%s", error)
                except SlurmUnavailable as error:
                    log.warning("the job comment could not be set yet reason=%s", error)
            await asyncio.sleep(COMMENT_INTERVAL_S)
