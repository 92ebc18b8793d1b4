"""The leader's connections to the agents: what they report goes to the decisions, what they are told carries
the term."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

from tm_slurm.control import Channel, ChannelClosed
from tm_slurm.control.frames import encode
from tm_slurm.coordinator.actions import Tell
from tm_slurm.coordinator.clock import elapsed_s
from tm_slurm.coordinator.decide import AGENT_INPUTS
from tm_slurm.coordinator.election import Leadership
from tm_slurm.coordinator.memory import MALFORMED
from tm_slurm.coordinator.news import News
from tm_slurm.coordinator.orders import Orders
from tm_slurm.coordinator.peer_tables import PeerTables
from tm_slurm.coordinator.presence import Presence
from tm_slurm.coordinator.probing import nobody_listens
from tm_slurm.coordinator.refilling import Brought

log = logging.getLogger("tm_slurm.leader")

PROBE_S = 1.0
"""A node that has not said by then whether its agent still listens is waited for like any silent one."""

RETIRED_LIMIT_S = 5.0
"""A retired agent whose process has not ended by then is not waited for: Slurm will end it."""

Message = dict[str, Any]


class Agents:
    """`feed` takes an input of the decisions, and says whether this leader still leads; `feed_soon` takes it
    with what else comes in this moment. `aside` takes what
    the decisions need not know, and says whether the message was of that sort. `node_of` says where a rank
    is, `listens_at` at which address an agent takes connections as long as it lives, `why_not` why an agent
    is none of this job, if so."""

    def __init__(
        self,
        *,
        leadership: Leadership,
        presence: Presence,
        orders: Orders,
        news: News,
        feed: Callable[[Message], bool],
        feed_soon: Callable[[Message], None],
        aside: Callable[[str, Message], bool],
        node_of: Callable[[int], str | None],
        listens_at: Callable[[str], tuple[str, int] | None],
        why_not: Callable[[str, Brought], str],
    ) -> None:
        self._leadership = leadership
        self._presence = presence
        self._orders = orders
        self._news = news
        self._told: dict[str, int] = {}
        """node → the number of the last news that it was told on its connection"""
        self._tables = PeerTables(leadership.job_dir, leadership.attempt, leadership.term)
        self._feed = feed
        self._feed_soon = feed_soon
        self._aside = aside
        self._node_of = node_of
        self._listens_at = listens_at
        self._why_not = why_not
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._says_farewell = False
        self._channels: dict[str, Channel] = {}
        self._in_order: list[str] = []
        """every node whose agent has come, for good: whose turn it is does not depend on who goes"""
        self._retired_at: dict[str, float] = {}
        self._left = asyncio.Event()

    def __contains__(self, node: str) -> bool:
        return node in self._channels

    async def serve(self, channel: Channel, node: str, brought: Brought) -> None:
        """Listen to one agent until its connection ends."""
        if not self._leadership.holds():
            channel.abort()
            return
        why = self._why_not(node, brought)
        if why:  # before it is taken for the agent of this node
            await self._turn_away(channel, node, why)
            return
        before = self._channels.get(node)
        if before is not None:
            before.abort()
        self._channels[node] = channel
        if node not in self._told:
            self._in_order.append(node)
        self._presence.came(node, elapsed_s())
        heard = channel.identity.get("news")
        self._told[node] = self._news.count if heard is None else int(heard)
        self._send(node, {"kind": "led", "news": self._told[node]})
        self.obeyed(node, channel.identity.get("place"))
        for frame in self._orders.waiting(node):
            self._send(node, frame)
        self._feed_soon({"kind": "node_joined", "node": node, **brought})
        await channel.deliver(lambda message: self._take(node, message))
        if self._channels.get(node) is channel:
            del self._channels[node]
            self._left.set()
            if self._retired_at.pop(node, None) is not None:
                self._gone(node)
            else:
                self._presence.went(node, elapsed_s())
                self._feed({"kind": "agent_away", "node": node})
                if not self._says_farewell:
                    self._probes[node] = asyncio.create_task(self._probe(node))

    async def _turn_away(self, channel: Channel, node: str, why: str) -> None:
        log.warning("turned an agent away node=%s reason=%s", node, why)
        message = {"kind": "exit", "reason": why}
        with contextlib.suppress(ChannelClosed):
            channel.send({"slot": None, "message": message, "place": None, "term": self._leadership.term})
            await channel.drain(PROBE_S)
            await asyncio.wait_for(channel.receive(), PROBE_S)  # it leaves by itself
        await channel.close()

    async def _probe(self, node: str) -> None:
        """Ask the node whether its agent, which has closed the connection, is still there: one that is not
        need not be waited for, and a node that starts again may be up again in less time than that."""
        address = self._listens_at(node)
        if address is not None and await nobody_listens(*address, PROBE_S) and node not in self._channels:
            self._presence.ended(node)

    def _take(self, node: str, message: Message) -> None:
        if not self._leadership.holds():
            return
        kind = message.get("kind")
        self._presence.heard(node, elapsed_s())
        try:
            if self._aside(node, message):
                return
        except MALFORMED as error:
            log.warning("refused a message node=%s kind=%s reason=%r", node, kind, error)
            return
        if kind not in AGENT_INPUTS:
            log.warning("refused a message node=%s kind=%s reason=unknown kind", node, kind)
            return
        if kind == "agent_retired":
            self._retired_at[node] = elapsed_s()
        try:
            self._feed_soon({**message, "node": node})
            if kind == "broken":
                self.accuse(message)
        except MALFORMED as error:
            log.warning("refused a message node=%s kind=%s reason=%r", node, kind, error)

    def accuse(self, message: Message) -> None:
        """A rank tells of a link to a lost one: if the agent there is not connected either, its node is
        lost."""
        accused = self._node_of(int(message["lost"])) if message.get("lost") is not None else None
        if accused is not None:
            self._presence.accuse(accused, elapsed_s())

    def tell(self, order: Tell, *, whole: bool = True) -> None:
        """Send to a node's agent (slot None) or through it to a rank process; again when it connects next, if
        it has not said by then that it was heard. What is not `whole` is not sent."""
        frame = self._orders.add(order, self._leadership.term, whole=whole)
        if whole:
            self._send(order.node, frame)

    def say(self, node: str, message: Message, *, slot: int | None = None) -> None:
        """Send an order that is of no use to a node, or to a rank process of it, that does not hear it
        now."""
        self._send(node, {"slot": slot, "message": message, "place": None})

    def obeyed(self, node: str, place: Any) -> None:
        """An agent says how far it has obeyed what it was told."""
        if place is not None:
            self._orders.heard(node, (int(place[0]), int(place[1])))

    def _send(self, node: str, frame: Message) -> None:
        channel = self._channels.get(node)
        if channel is not None:
            with contextlib.suppress(ChannelClosed):
                if frame.get("message") is not None:
                    frame = {**frame, "message": self._tables.to_send(frame["message"])}
                channel.send({**frame, "term": self._leadership.term})

    def say_alive(self, turn: int = 0, turns: int = 1) -> None:
        """A sign of life, with the news, to every agent whose turn it is of so many: to thousands at once
        would hold everything else up."""
        sign: Message = {"renewal": self._leadership.renewal, "at": self._leadership.job_clock.now()}
        sign |= {"kind": "alive", "term": self._leadership.term}
        frames: dict[int, bytes] = {}
        for node in self._in_order[turn::turns]:
            channel = self._channels.get(node)
            if channel is None:
                continue
            told = self._told[node]
            if told not in frames:
                news = self._news.after(told)
                frames[told] = encode({**sign, "news": news} if news else sign)
            with contextlib.suppress(ChannelClosed):
                channel.send_encoded(frames[told])
                self._told[node] = self._news.count

    def give_up(self, now: float) -> None:
        """Tell the decisions which agents are lost by now, and which retired ones have had their time. `now`
        is when this leader was last found not to be cut off itself."""
        for node, reason in self._presence.lost(now).items():
            may_return = self._presence.may_return(node)
            self._presence.forget(node)
            channel = self._channels.pop(node, None)
            if channel is not None:
                channel.abort()
            self._feed({"kind": "node_lost", "node": node, "reason": reason, "may_return": may_return})
        for node, retired_at in list(self._retired_at.items()):
            if now - retired_at > RETIRED_LIMIT_S:
                del self._retired_at[node]
                self._gone(node)

    def _gone(self, node: str) -> None:
        self._presence.forget(node)
        self._feed({"kind": "agent_gone", "node": node})

    async def farewell(self, message: Message, *, last: str, limit_s: float) -> None:
        """Tell all agents the same, `last` after the others have gone or had `limit_s` to go."""
        self._says_farewell = True
        others = [name for name in self._channels if name != last]
        for name in others:
            self.say(name, message)
        try:
            await asyncio.wait_for(self._await_left(others), limit_s)
        except asyncio.TimeoutError:
            stayed = ", ".join(sorted(set(others) & set(self._channels)))
            log.warning("agents have not gone nodes=%s after_s=%.1f", stayed, limit_s)
        channel = self._channels.get(last)
        if channel is not None:
            self.say(last, message)
            await channel.drain(1.0)

    async def _await_left(self, names: list[str]) -> None:
        while any(name in self._channels for name in names):
            self._left.clear()
            await self._left.wait()

    def close(self) -> None:
        """End every connection."""
        for probe in self._probes.values():
            probe.cancel()
        for channel in self._channels.values():
            channel.abort()
