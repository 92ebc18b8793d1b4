"""The leader: the network and the clock around the decisions. It lives in one agent process of the job.

Whatever can change a decision goes journal → decisions → actions, one input at a time, without waiting in
between. Whatever takes time (Slurm commands) runs beside it, and its outcome comes back as another input.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tm_slurm.control import Channel, ChannelClosed, HandshakeRefused, accept
from tm_slurm.coordinator.actions import Action, Comment, End, Note, Release, Resign, Tell
from tm_slurm.coordinator.awaiting import first_of
from tm_slurm.coordinator.decide import Decisions
from tm_slurm.coordinator.election import LeaderFile, Leadership, write_atomically
from tm_slurm.coordinator.journal import Journal
from tm_slurm.coordinator.model import JobState, Plan
from tm_slurm.coordinator.slurm_side import SlurmSide
from tm_slurm.coordinator.status import status_of
from tm_slurm.events import Event, EventError
from tm_slurm.observe.record import Record
from tm_slurm.slurm import Slurm

log = logging.getLogger("tm_slurm.leader")

FROM_AGENTS = frozenset(
    {
        "process_ready",
        "process_warm",
        "process_exited",
        "leaver_prepared",
        "joined",
        "join_failed",
        "switching",
        "resumed",
        "stopped",
        "too_late",
        "rank_done",
        "broken",
        "survivor",
        "source_ready",
        "agent_retired",
    }
)
"""Inputs that an agent may bring."""

PRIVATES_KEPT = 4
"""Private states kept of each rank: the survivors may agree on a step before the newest one told."""

MALFORMED = (KeyError, TypeError, ValueError)
"""What the decisions raise for a message that lacks something, or has it in the wrong type."""

HANDSHAKE_TIMEOUT_S = 5.0
TICK_S = 0.1
FAREWELL_S = 8.0
RETIRED_LIMIT_S = 5.0
"""A retired agent whose process has not ended by then is not waited for: Slurm will end it."""


@dataclass(kw_only=True)
class Limits:
    """Seconds, from the job's policy."""

    poll_interval_s: float
    lease_s: float
    start_timeout_s: float
    reconnect_s: float


class Leader:
    """Leads until the job has ended ("ended") or another agent has been asked to lead ("resigned")."""

    def __init__(
        self,
        *,
        job_dir: Path,
        job_id: int | None,
        node: str,
        host: str,
        plan: Plan,
        attempt: int,
        leadership: Leadership,
        secret: bytes,
        slurm: Slurm | None,
        limits: Limits,
    ) -> None:
        self.job_dir = job_dir
        self.node = node
        self.exit_code = 1
        self._over = False
        self._job_id = job_id
        self._host = host
        self._attempt = attempt
        self._leadership = leadership
        self._secret = secret
        self._limits = limits
        self._agents: dict[str, Channel] = {}
        self._gone_at: dict[str, float] = {}
        self._retired_at: dict[str, float] = {}
        self._heard_at: dict[str, float] = {}
        self._privates: dict[int, deque[dict[str, Any]]] = {}
        self._left = asyncio.Event()
        self._outcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._started_at = time.time()
        self._record = Record(job_dir, plan.world_size)
        path = job_dir / f"journal.{attempt}.jsonl"
        self._decisions = Decisions(JobState.initial(plan), node)
        self._replayed = 0
        for given in Journal.replay(path):
            with contextlib.suppress(*MALFORMED):  # as it was refused when it came
                self._decisions.handle(given)
            self._replayed += 1
        self._journal = Journal(path)
        self._slurm_side: SlurmSide | None = None
        if slurm is not None and job_id is not None:
            self._slurm_side = SlurmSide(
                slurm=slurm,
                job_id=job_id,
                leader_node=node,
                state=self._decisions.state,
                feed=self._feed,
                poll_interval_s=limits.poll_interval_s,
            )
        if self._replayed == 0:
            (job_dir / "verdict.json").unlink(missing_ok=True)

    @property
    def state(self) -> JobState:
        return self._decisions.state

    async def lead(self) -> str:
        """Serve agents and users until the end. Returns "ended" or "resigned"."""
        server = await asyncio.start_server(self._connected, self._host, 0)
        self._port = int(server.sockets[0].getsockname()[1])
        self._renew_lease()
        self._feed({"kind": "led", "node": self.node, "term": self._leadership.term})
        self._record.note("leads", time.time(), node=self.node, term=self._leadership.term)
        log.info("leading node=%s term=%d replayed=%d", self.node, self._leadership.term, self._replayed)
        loops = [asyncio.create_task(self._tick_for_ever())]
        if self._slurm_side is not None:
            loops += self._slurm_side.start()
        if self.state.verdict is not None:  # the leader before was lost between its verdict and its farewell
            self._ended(End(**self.state.verdict))
        self._expect_the_known()
        try:
            outcome = await first_of(self._outcome, loops)
            if outcome == "ended":
                await self._farewell()
        finally:
            for task in loops:
                task.cancel()
            server.close()
            for channel in self._agents.values():
                channel.abort()
            self._write_status()
            self._over = True
            self._leadership.resign()
            self._journal.close()
            self._record.close()
        return outcome

    def stop(self, reason: str) -> None:
        """End the job now, as failed."""
        self._feed({"kind": "stop", "reason": reason, "exit_code": 1})

    def _expect_the_known(self) -> None:
        """Agents that an earlier leader knew have as long to come as a leader's lease runs, and are lost
        then."""
        for node in self.state.nodes.values():
            if node.agent_up:
                self._gone_at[node.name] = time.time() + self._limits.lease_s

    # ---- inputs ----

    def _feed(self, given: dict[str, Any]) -> None:
        """Journal an input, decide, act."""
        if self._over:
            return
        given.setdefault("at", time.time())
        try:
            self._journal.append(given)
        except OSError as error:  # what is not written must not be acted on: let another try
            log.critical("the journal cannot be written, stepping down reason=%s", error)
            if not self._outcome.done():
                self._outcome.set_result("resigned")
            return
        self._perform(self._decisions.handle(given))

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            channel = await accept(reader, writer, self._secret, timeout_s=HANDSHAKE_TIMEOUT_S)
        except (HandshakeRefused, ChannelClosed, OSError, asyncio.TimeoutError) as error:
            log.warning("refused a connection reason=%s", error)
            return
        if self._outcome.done():
            await channel.close()  # the verdict, or the next leader, is in the job directory
        elif channel.identity.get("role") == "agent":
            await self._serve_agent(channel, str(channel.identity.get("node")))
        else:
            await self._serve_user(channel)

    async def _serve_agent(self, channel: Channel, node: str) -> None:
        before = self._agents.get(node)
        if before is not None:
            before.abort()
        self._agents[node] = channel
        self._heard_at[node] = time.monotonic()
        self._gone_at.pop(node, None)
        channel.send({"kind": "led", "term": self._leadership.term})
        self._feed({"kind": "node_joined", "node": node})
        try:
            while True:
                message = await channel.receive()
                self._from_agent(node, message)
        except ChannelClosed:
            if self._agents.get(node) is channel:
                del self._agents[node]
                self._left.set()
                if self._retired_at.pop(node, None) is not None:
                    self._feed({"kind": "agent_gone", "node": node})
                else:
                    self._gone_at[node] = time.time()

    def _from_agent(self, node: str, message: dict[str, Any]) -> None:
        kind = message.get("kind")
        self._heard_at[node] = time.monotonic()
        if kind == "beat":
            for report in message["ranks"]:
                self._record.beat(node, report)
        elif kind == "private":
            self._privates.setdefault(int(message["rank"]), deque(maxlen=PRIVATES_KEPT)).append(message)
        elif kind in FROM_AGENTS:
            if kind == "agent_retired":
                self._retired_at[node] = time.time()
            self._take(node, message)
        else:
            log.warning("refused a message node=%s kind=%s reason=unknown kind", node, kind)

    def _take(self, node: str, message: dict[str, Any]) -> None:
        try:
            self._feed({**message, "node": node})
        except MALFORMED as error:
            log.warning("refused a message node=%s kind=%s reason=%r", node, message.get("kind"), error)

    async def _serve_user(self, channel: Channel) -> None:
        """One request, one answer."""
        with contextlib.suppress(ChannelClosed, asyncio.TimeoutError):
            request = await asyncio.wait_for(channel.receive(), HANDSHAKE_TIMEOUT_S)
            channel.send(self._answer(request))
            await channel.drain(HANDSHAKE_TIMEOUT_S)
        await channel.close()

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if request.get("kind") == "status":
            return self.status()
        if request.get("kind") != "event":
            return {"error": f"unknown request {request.get('kind')!r}"}
        try:
            event = Event.from_json(request["event"]).to_json()
        except (EventError, KeyError, TypeError) as error:
            return {"error": f"that is no event: {error}"}
        node = self.state.nodes.get(event["node"])
        if node is None:
            names = ", ".join(self.state.nodes)
            return {"error": f"node {event['node']} is not in this job; its nodes are {names}"}
        if event["kind"] == "request" and node.standing != "active":
            return {"error": f"node {node.name} has no ranks to move: it is {node.standing}"}
        self._feed({"kind": "events", "events": [event]})
        return {"ok": True, "epoch": self.state.epoch}

    # ---- actions ----

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Tell):
                self._tell(action)
            elif isinstance(action, Note):
                self._noted(action)
            elif isinstance(action, Release):
                self._release(action.node)
            elif isinstance(action, Comment):
                if self._slurm_side is not None:
                    self._slurm_side.comment(action.text)
            elif isinstance(action, Resign):
                self._resign_to(action.to)
            elif isinstance(action, End):
                self._ended(action)

    def _tell(self, action: Tell) -> None:
        channel = self._agents.get(action.node)
        if channel is None:
            return  # it is told again when its agent connects
        message = action.message
        if message["kind"] == "replace":
            private = self._private_before(int(message["rank"]), int(message["target"]))
            if private is None:
                self.stop(f"rank {message['rank']} died before it had told its state")
                return
            message = {**message, "private": private["private"], "private_step": private["step"]}
        with contextlib.suppress(ChannelClosed):
            channel.send({"slot": action.slot, "term": self._leadership.term, "message": message})

    def _private_before(self, rank: int, step: int) -> dict[str, Any] | None:
        """The newest private state that a rank has told of a step up to `step`."""
        told = [message for message in self._privates.get(rank, ()) if message["step"] <= step]
        return told[-1] if told else None

    def _noted(self, note: Note) -> None:
        at = time.time()
        log.info("%s %s", note.what, " ".join(f"{key}={value}" for key, value in note.fields.items()))
        self._record.note(note.what, at, **note.fields)
        if note.what in ("moved", "recovered"):
            self._record.moved(note.fields)

    def _release(self, node: str) -> None:
        if self._slurm_side is not None:
            self._slurm_side.release(node)
        else:
            refused = {"kind": "release_refused", "node": node, "why": "there is no Slurm job"}
            asyncio.get_running_loop().call_soon(self._feed, refused)

    def _resign_to(self, node: str) -> None:
        channel = self._agents.get(node)
        if channel is None:
            asyncio.get_running_loop().call_soon(self._feed, {"kind": "resign_failed", "to": node})
        elif not self._outcome.done():
            with contextlib.suppress(ChannelClosed):
                channel.send({"slot": None, "term": self._leadership.term, "message": {"kind": "lead"}})
            self._outcome.set_result("resigned")

    def _ended(self, action: End) -> None:
        self.exit_code = action.exit_code
        verdict = {"state": action.state, "exit_code": action.exit_code, "reason": action.reason}
        write_atomically(self.job_dir / "verdict.json", json.dumps(verdict))
        if not self._outcome.done():
            self._outcome.set_result("ended")

    async def _farewell(self) -> None:
        """Tell all agents to end, the others first; give them a moment to do so."""
        message = {"kind": "exit", "reason": "the job has ended", "exit_code": self.exit_code}
        others = [name for name in self._agents if name != self.node]
        for name in others:
            self._tell(Tell(name, None, message))
        await asyncio.wait({asyncio.ensure_future(self._await_left(others))}, timeout=FAREWELL_S)
        self._tell(Tell(self.node, None, message))
        channel = self._agents.get(self.node)
        if channel is not None:
            await channel.drain(1.0)

    async def _await_left(self, names: list[str]) -> None:
        while any(name in self._agents for name in names):
            self._left.clear()
            await self._left.wait()

    # ---- time ----

    def _renew_lease(self) -> None:
        lease_until = time.time() + self._limits.lease_s
        LeaderFile(
            self.node, self._host, self._port, self._leadership.term, self._attempt, lease_until
        ).write(self.job_dir)

    async def _tick_for_ever(self) -> None:
        renewed = written = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now, clock = time.time(), time.monotonic()
            for given in self._decisions.due(now):
                self._feed(given)
            self._notice_the_lost(now)
            if not self.state.started and now - self._started_at > self._limits.start_timeout_s:
                self._started_at = now
                self._feed({"kind": "start_expired"})
            if clock - renewed > self._limits.lease_s / 3:
                renewed = clock
                self._renew_lease()
            if clock - written > 0.5:
                written = clock
                self._write_status()

    def _notice_the_lost(self, now: float) -> None:
        for node, gone_at in list(self._gone_at.items()):
            if now - gone_at > self._limits.reconnect_s:
                del self._gone_at[node]
                self._feed({"kind": "node_lost", "node": node, "reason": "its agent closed the connection"})
        clock = time.monotonic()
        for node in [
            n for n in self._agents if clock - self._heard_at.get(n, clock) > self._limits.reconnect_s
        ]:
            self._agents.pop(node).abort()
            self._feed({"kind": "node_lost", "node": node, "reason": "its agent has fallen silent"})
        for node, retired_at in list(self._retired_at.items()):
            if now - retired_at > RETIRED_LIMIT_S:
                del self._retired_at[node]
                self._feed({"kind": "agent_gone", "node": node})

    # ---- what people read ----

    def status(self) -> dict[str, Any]:
        """The state of the job as JSON: see tm_slurm.coordinator.status."""
        return status_of(self.state, self._record, self.node, self._leadership.term, self._job_id)

    def _write_status(self) -> None:
        with contextlib.suppress(OSError):
            write_atomically(self.job_dir / "status.json", json.dumps(self.status()))
