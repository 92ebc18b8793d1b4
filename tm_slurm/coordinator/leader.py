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
from dataclasses import dataclass, replace
from typing import Any, Literal

from tm_slurm.control import ChannelClosed, HandshakeRefused, accept, listening_at
from tm_slurm.coordinator import batch_script, long_lived
from tm_slurm.coordinator.actions import Action, Comment, End, Note, Release, Resign, Spread, Tell
from tm_slurm.coordinator.agents import Agents
from tm_slurm.coordinator.allocation import Allocation
from tm_slurm.coordinator.allocation import end as end_allocation
from tm_slurm.coordinator.awaiting import first_of
from tm_slurm.coordinator.clock import elapsed_s
from tm_slurm.coordinator.election import Leadership, write_atomically
from tm_slurm.coordinator.journal import Journal
from tm_slurm.coordinator.memory import MALFORMED
from tm_slurm.coordinator.metrics_door import MetricsDoor
from tm_slurm.coordinator.model import JobState, Plan
from tm_slurm.coordinator.presence import Presence
from tm_slurm.coordinator.refilling import brought_by, why_not_admitted
from tm_slurm.coordinator.remembering import Remembering
from tm_slurm.coordinator.requests import Requests
from tm_slurm.coordinator.shrinking import reports_of_all
from tm_slurm.coordinator.signed_events import SignedDoor
from tm_slurm.coordinator.slurm_side import SlurmSide
from tm_slurm.coordinator.status import status_of
from tm_slurm.coordinator.step_watch import StepWatch
from tm_slurm.coordinator.training import Training
from tm_slurm.coordinator.wards import Wards, wards_of
from tm_slurm.events import Episodes
from tm_slurm.events.signed import SignedEvents
from tm_slurm.observe.record import Record
from tm_slurm.slurm import Slurm
from tm_slurm.state.checkpoint_directory import checkpoints_of, complete, step_of

log = logging.getLogger("tm_slurm.leader")

HANDSHAKE_TIMEOUT_S = 5.0
TICK_S = 0.1
OVERSLEPT = 4
"""A tick that comes so many times too late: it is this process that has not got to run."""

STATUS_INTERVAL_S = 0.5
STATUS_SHARE, NEWS_SHARE = 0.02, 0.1
"""At most so much of the processor's time goes into telling the status while nothing happens, and while
something does: of a job of thousands it is told less often."""

STATUS_LIMIT_S = 2.5
"""But at least so often: a leader whose status is older than 5 s is taken for one that may be gone."""

BACKLOG = 4096
"""Agents that may knock at once: all of them do, at a new leader."""

LET_IN_AT_ONCE = 32
"""Between two of such batches the lease is renewed, and those who are in are heard."""

FAREWELL_S = 8.0

Outcome = Literal["ended", "resigned", "deposed", "cut_off"]
"""ended: the job has; resigned: another agent was asked to lead; deposed: another leads, or may lead,
already; cut_off: nobody is heard, so others had better lead."""

Message = dict[str, Any]


@dataclass(kw_only=True)
class Limits:
    """Seconds, from the job's policy."""

    poll_interval_s: float
    heartbeat_s: float
    start_timeout_s: float
    reconnect_s: float
    watchdog_floor_s: float = 60.0
    watchdog_factor: float = 10.0
    metrics_port: int | None = None
    signed_events: bool = True
    straggler_slower: float | None = None
    straggler_steps: int = 10


class Leader:
    """Leads for one term. `sure`: it has been cut off before, and nobody has led since (see Presence)."""

    def __init__(
        self,
        *,
        job_id: int | None,
        node: str,
        host: str,
        plan: Plan,
        leadership: Leadership,
        secret: bytes,
        slurm: Slurm | None,
        limits: Limits,
        sure: bool = False,
    ) -> None:
        self.job_dir = leadership.job_dir
        self.node = node
        self.exit_code = 1
        self._job_id = job_id
        self._host = host
        self._leadership = leadership
        self._secret = secret
        self._limits = limits
        self._slurm = slurm
        self._wards = Wards()
        self._outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._end: End | None = None
        self._started_at = elapsed_s()
        self._presence = Presence(node, limits.reconnect_s, elapsed_s(), sure=sure)
        self._journal = Journal(
            self.job_dir,
            leadership.attempt,
            leadership.term,
            {"batch_host": plan.batch_host, "order": plan.order},
        )
        about = self._journal.about
        plan = replace(plan, batch_host=about["batch_host"], order=about.get("order", plan.order))
        self._record = Record(self.job_dir, plan.world_size)
        self._remembering = Remembering(self._journal, leadership, plan, node, secret)
        self._memory = self._remembering.memory
        if self._remembering.replayed == 0:
            (self.job_dir / "verdict.json").unlink(missing_ok=True)
        self._step_watch = StepWatch(
            self._memory.decisions, limits, say=self._say_to_ranks, noted=self._noted
        )
        self._soon: list[Message] = []
        self._has_news_for_people = False
        self._slurm_side: SlurmSide | None = None
        if slurm is not None and job_id is not None:
            self._slurm_side = SlurmSide(
                slurm=slurm,
                training=Training.of(self.job_dir, job_id, leadership.attempt),
                leader_node=node,
                state=self.state,
                feed=self._feed,
                leads=leadership.holds,
                seen=self._memory.seen,
                poll_interval_s=limits.poll_interval_s,
            )
            if self._memory.comment is not None:
                self._slurm_side.comment(self._memory.comment.text)
        self._agents = Agents(
            leadership=leadership,
            presence=self._presence,
            orders=self._memory.orders,
            news=self._memory.news,
            feed=self._feed,
            feed_soon=self._feed_soon,
            aside=self._took_aside,
            node_of=self._node_of,
            listens_at=self._listens_at,
            why_not=lambda node, brought: why_not_admitted(self.state, node, **brought),
        )
        self._refused = 0
        self._metrics = MetricsDoor(
            self.job_dir, host, limits.metrics_port, status=self.status, tally=self._record.tally
        )
        self._requests = Requests(self.state, self._feed, self.status)
        self._signed = SignedDoor(
            SignedEvents(
                secret,
                job_id=job_id,
                term=leadership.term,
                nodes=self.state.nodes,
                episodes=Episodes() if self._slurm_side is None else self._slurm_side.episodes,
                handled=list(self._memory.seen),
                job_of=lambda node: self.state.nodes[node].job_id,
                wanted=limits.signed_events,
            ),
            self._feed,
            self._presence,
        )

    @property
    def state(self) -> JobState:
        return self._memory.decisions.state

    def _listens_at(self, node: str) -> tuple[str, int] | None:
        vault = self.state.nodes[node].vault
        return (str(vault[0]), int(vault[1])) if vault is not None else None

    def _node_of(self, rank: int) -> str | None:
        return self.state.seats[rank][0] if rank in self.state.seats else None

    async def lead(self) -> Outcome:
        """Serve agents and users until the job has ended, or this leader leads no more."""
        with long_lived.left_out():
            return await self._lead()

    async def _lead(self) -> Outcome:
        sock = listening_at(self._host)
        server = await asyncio.start_server(self._connected, sock=sock, backlog=LET_IN_AT_ONCE)
        sock.listen(BACKLOG)  # they may knock; asyncio lets as many in at once as it is told
        loops = [asyncio.create_task(self._tick_for_ever())]
        try:
            self._begin(int(server.sockets[0].getsockname()[1]))
            await self._metrics.open()
            if self._slurm_side is not None:
                loops += self._slurm_side.start()
            outcome = await first_of(self._outcome, loops)
            if outcome == "ended" and self._end is not None and not await self._end_job(self._end):
                outcome = "deposed"
        finally:
            for task in loops:
                task.cancel()
            server.close()
            self._metrics.close()
            self._agents.close()
            self._write_status()
            self._record.close(job_ended=self._end is not None and self._leadership.holds())
            self._leadership.resign()
            self._journal.close()
        log.info("leading no more outcome=%s term=%d", outcome, self._leadership.term)
        return outcome

    def _begin(self, port: int) -> None:
        if not self._leadership.renew(port):
            self._over("deposed")
            return
        if self._remembering.replayed > 0:
            for node in self.state.nodes.values():
                if node.agent_up:
                    self._presence.expect(node.name, elapsed_s())
        self._feed({"kind": "led", "node": self.node, "term": self._leadership.term})
        found = complete(checkpoints_of(self.job_dir)) if self._remembering.replayed == 0 else []
        if found:
            older = [[step_of(path), str(path)] for path in found[1:]]
            newest = {"step": step_of(found[0]), "path": str(found[0])}
            self._feed({"kind": "checkpoint_found", **newest, "older": older})
        self._record.note("leads", time.time(), node=self.node, term=self._leadership.term)
        log.info(
            "leading node=%s term=%d replayed=%d",
            self.node,
            self._leadership.term,
            self._remembering.replayed,
        )
        if self.state.verdict is not None:  # the leader before was lost between its verdict and its farewell
            self._ended(End(**self.state.verdict))

    def let_go(self) -> None:
        """Lead no more, whoever comes next: this agent must end, and the job must not."""
        self._over("resigned")

    def stop(self, reason: str) -> None:
        """End the job now, as failed."""
        self._feed({"kind": "stop", "reason": reason, "exit_code": 1})

    def _over(self, outcome: Outcome) -> None:
        if not self._outcome.done():
            self._outcome.set_result(outcome)

    # ---- inputs ----

    def _feed(self, given: Message) -> bool:
        """Journal an input, decide, act. False when this leader leads no more: then nothing was done."""
        self._feed_what_has_come()
        return self._take_all(given)

    def _feed_soon(self, given: Message) -> None:
        """The same a moment later, together with what else comes until then: the disk is waited for once. So
        a leader to which thousands of agents come at once gets through."""
        if not self._soon:
            asyncio.get_running_loop().call_soon(self._feed_what_has_come)
        given.setdefault("at", self._leadership.job_clock.now())
        self._soon.append(given)

    def _feed_what_has_come(self) -> None:
        given, self._soon = self._soon, []
        if given:
            self._take_all(*given, judged=False)

    def _take_all(self, *given: Message, judged: bool = True) -> bool:
        """`judged`: whether the caller hears what is wrong with an input."""
        if self._journal.closed or not self._leadership.holds():
            self._over("deposed")
            return False
        for each in given:
            each.setdefault("at", self._leadership.job_clock.now())
        try:
            self._journal.append(*given)
        except OSError as error:  # what is not written must not be acted on: let another try
            log.critical("the journal cannot be written, stepping down reason=%s", error)
            self._over("resigned")
            return False
        was_whole, self._remembering.is_whole = self._remembering.is_whole, False
        if not self._leadership.holds():  # the disk has taken longer than the lease
            self._over("deposed")
            return False
        for each in given:
            try:
                self._perform(self._memory.take(each))
            except MALFORMED as error:
                if judged:
                    self._remembering.is_whole = was_whole  # it is refused again when it is repeated
                    raise
                log.warning(
                    "refused a message node=%s kind=%s reason=%r", each.get("node"), each.get("kind"), error
                )
        self._remembering.is_whole = was_whole
        return True

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            hello = await self._signed.first_frame(reader, writer, timeout_s=HANDSHAKE_TIMEOUT_S)
            if hello is None:
                return
            channel = await accept(reader, writer, self._secret, timeout_s=HANDSHAKE_TIMEOUT_S, hello=hello)
        except (HandshakeRefused, ChannelClosed, OSError, asyncio.TimeoutError) as error:
            self._refused += 1
            log.warning("refused a connection reason=%s", error)
            return
        if self._outcome.done():
            await channel.close()  # the verdict, or the next leader, is in the job directory
        elif channel.identity.get("role") == "agent":
            await self._agents.serve(channel, str(channel.identity.get("node")), brought_by(channel.identity))
        else:
            await self._requests.serve(channel)

    def _took_aside(self, node: str, message: Message) -> bool:
        """What the decisions need not know: heartbeats, private states, and evidence."""
        if message.get("kind") == "beat":
            self._agents.obeyed(node, message.get("place"))
            for report in message["ranks"] if self._leadership.holds() else ():  # else another writes the log
                for told in reports_of_all(self.state, report):
                    self._record.beat(node, told)
                    self._step_watch.committed(told)
                slow = self._step_watch.compared(node, report)
                if slow is not None:
                    self._feed_soon(slow)
            return True
        if message.get("kind") == "whereabouts":
            self._step_watch.whereabouts(message)
            return True
        if message.get("kind") == "link_ended":
            if int(message["epoch"]) >= self.state.epoch:  # at an older one it knew other processes
                self._agents.accuse(message)
            return True
        taken = self._wards.take(message)
        for order in self._wards.complete() if taken else ():
            self._agents.say(order.node, order.message, slot=order.slot)
        return taken

    # ---- actions ----

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            if not self._leadership.keep():  # there may be thousands
                self._over("deposed")
                return
            if isinstance(action, Tell):
                self._tell(action)
            elif isinstance(action, Spread):
                self._memory.news.add(action.message)
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
        message = self._wards.with_ward(action.message)
        if message is not None:
            self._agents.tell(replace(action, message=message))
        else:
            self._agents.tell(action, whole=False)
            self._wards.hold(action, elapsed_s())

    def _noted(self, note: Note) -> None:
        at = time.time()
        self._has_news_for_people = True
        log.info("%s %s", note.what, " ".join(f"{key}={value}" for key, value in note.fields.items()))
        self._record.note(note.what, at, **note.fields)
        if note.what in ("moved", "recovered"):
            self._record.moved(note.fields)
            for pair in note.fields["pairs"]:  # links were closed while its processes took other roles
                self._presence.acquit(pair["joiner"])

    def _release(self, node: str) -> None:
        if self._slurm_side is not None:
            self._slurm_side.release(node)
        else:
            refused = {"kind": "release_refused", "node": node, "why": "there is no Slurm job"}
            asyncio.get_running_loop().call_soon(self._feed, refused)

    def _resign_to(self, node: str) -> None:
        if node not in self._agents:
            asyncio.get_running_loop().call_soon(self._feed, {"kind": "resign_failed", "to": node})
        elif not self._outcome.done():
            self._agents.say(node, {"kind": "lead"})
            self._over("resigned")

    def _ended(self, action: End) -> None:
        self._end = action
        self.exit_code = action.exit_code
        self._over("ended")

    # ---- the end ----

    async def _end_job(self, end: End) -> bool:
        """Write the verdict, and have everybody go. Before that, end the Slurm job if its batch script
        cannot: should this leader be lost meanwhile, the next one finds no verdict yet and does it. False
        when another leads: what follows cannot be taken back, so the leader file is looked at each time."""
        host = self.state.plan.batch_host
        if self._slurm is not None and self._job_id is not None and host is not None:
            there = self._presence.is_fresh(host, elapsed_s(), 2 * self._limits.heartbeat_s)
            gone = not there and await batch_script.is_gone(self._slurm, self._job_id, host)
            if gone and self._leadership.renew():
                log.info("ending the job in the place of its batch script host=%s", host)
                await batch_script.end_in_its_place(self._slurm, self._job_id, end, host)
        if self._slurm_side is not None:
            await self._slurm_side.standby_jobs.sweep()
        if not self._leadership.renew():
            return False
        verdict: Message = {"state": end.state, "exit_code": end.exit_code, "reason": end.reason}
        verdict |= {"failure": end.failure} if end.failure is not None else {}
        verdict["attempt"] = self._leadership.attempt
        if end.begins is not None:
            verdict["begins"] = end.begins
        write_atomically(self.job_dir / "verdict.json", json.dumps(verdict))
        message = {"kind": "exit", "reason": "the job has ended", "exit_code": self.exit_code}
        await self._agents.farewell(message, last=self.node, limit_s=FAREWELL_S)
        allocation = Allocation.read(self.job_dir)
        if self._slurm is not None and allocation is not None:
            await end_allocation(self._slurm, allocation)
        return True

    # ---- time ----

    async def _tick_for_ever(self) -> None:
        tick_s = min(TICK_S, self._leadership.lease_s / 8)
        turns = max(1, round(self._limits.heartbeat_s / tick_s))
        now = alive_at = status_at = news_at = elapsed_s()
        turn = 0
        while True:
            before = now
            await asyncio.sleep(tick_s)
            now = elapsed_s()
            if now - before > OVERSLEPT * tick_s:
                self._presence.slept(now - before)
            if self._leadership.is_due() and not self._leadership.renew() and not self._outcome.done():
                log.warning("stepping down term=%d reason=the lease is over", self._leadership.term)
                self._over("deposed")
            apart_s = self._limits.heartbeat_s / turns
            due = int((now - alive_at) / apart_s)  # several, where this task was late
            alive_at = alive_at + due * apart_s if due < turns else now
            for _ in range(min(due, turns) if self._leadership.holds() else 0):
                turn = (turn + 1) % turns
                self._agents.say_alive(turn, turns)
            if now >= status_at or (self._has_news_for_people and now >= news_at):
                self._has_news_for_people = False
                used_s = time.thread_time()
                self._write_status()
                used_s = time.thread_time() - used_s
                status_at = now + min(max(STATUS_INTERVAL_S, used_s / STATUS_SHARE), STATUS_LIMIT_S)
                news_at = now + used_s / NEWS_SHARE
            if not self._outcome.done():
                self._look_around(now)
                self._remembering.sum_up()

    def _look_around(self, now: float) -> None:
        if self._presence.is_cut_off(now):
            log.warning("stepping down term=%d reason=hardly anybody is heard", self._leadership.term)
            self._record.note("cut_off", time.time(), node=self.node, term=self._leadership.term)
            self._over("cut_off")
            return
        self._agents.give_up(now)
        stuck = self._step_watch.look(now)
        if stuck is not None:
            self._feed(stuck)
        for order in self._wards.overdue(now):
            self._feed(
                {"kind": "ward_missing", "epoch": order.message["epoch"], "ranks": wards_of(order.message)}
            )
        for given in self._memory.decisions.due(self._leadership.job_clock.now()):
            self._feed(given)
        if not self.state.started and now - self._started_at > self._limits.start_timeout_s:
            self._started_at = now
            self._feed({"kind": "start_expired"})

    def _say_to_ranks(self, message: Message) -> None:
        for node, slot in self.state.seats.values():
            self._agents.say(node, message, slot=slot)

    # ---- what people read ----

    def status(self) -> Message:
        """The state of the job as JSON: see tm_slurm.coordinator.status."""
        status = status_of(self.state, self._record, self.node, self._leadership.term, self._job_id)
        refused = {"signed_events": self._signed.counts, "refused_connections": self._refused}
        return {**status, **refused, "metrics": self._metrics.address}

    def _write_status(self) -> None:
        if self._leadership.holds():
            with contextlib.suppress(OSError):
                write_atomically(self.job_dir / "status.json", json.dumps(self.status()))
