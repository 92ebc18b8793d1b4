"""The agent's connection to whoever leads: found, watched for silence, left for a newer leader."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from tm_slurm.control import Channel, ChannelClosed, HandshakeRefused, connect
from tm_slurm.coordinator.clock import elapsed_s
from tm_slurm.coordinator.election import LeaderFile, LeaderWatch

log = logging.getLogger("tm_slurm.agent")

CONNECT_TIMEOUT_S = 3.0
LOOK_S = 0.1
"""Between looks at the leader file while nothing is heard."""

DIAL_APART_S = 0.0005
"""Agents come to a new leader one after the other, so far apart: all at once, none of thousands would get
through in time."""

EVERYBODY = "all"
"""The slot of an order that is for every rank process of a node."""

Message = dict[str, Any]
T = TypeVar("T")


@dataclass(kw_only=True)
class Silence:
    """Seconds, from the job's policy. A leader says something every `heartbeat_s`; one that has been silent
    for `keepalive_s` is left."""

    heartbeat_s: float
    keepalive_s: float


class Following:
    """`identity`: what this agent says of itself. `led`: called when a leader has greeted, from when on it
    can be told things. `obey`: takes each of its messages."""

    def __init__(
        self,
        watch: LeaderWatch,
        secret: bytes,
        identity: Message,
        silence: Silence,
        *,
        led: Callable[[], None],
        obey: Callable[[Message], Awaitable[None]],
        number: int = 0,
    ) -> None:
        self._watch = watch
        self._secret = secret
        self._identity = identity
        self._silence = silence
        self._led = led
        self._obey = obey
        self._channel: Channel | None = None
        self._quiet_since = self._heard_at = elapsed_s()
        self.term = 0
        """The newest term heard of: what an older leader says is refused."""
        self._number = number
        self._turn_of = 0
        """the newest term for which this agent has waited its turn to dial"""
        self.news: int | None = None
        """The number of the last news that was heard (see tm_slurm.coordinator.news); None: no leader yet."""
        self.place = (0, 0)
        """How far this agent has obeyed what it was told (see tm_slurm.coordinator.orders)."""

    def alone_for_s(self) -> float:
        """Seconds since a leader was heard."""
        return elapsed_s() - self._heard_at

    def send(self, message: Message) -> bool:
        """False when there is no connection; what was sent on one that breaks is lost."""
        if self._channel is None:
            return False
        try:
            self._channel.send(message)
        except ChannelClosed:
            return False
        return True

    async def last_word(self, message: Message) -> None:
        """Say this, and have the leader see the connection end only when this process has ended."""
        self.send(message)
        if self._channel is not None:
            await self._channel.drain(CONNECT_TIMEOUT_S)
            self._channel.hold_open_to_the_end()

    async def follow(self, leader: LeaderFile) -> None:
        """Serve one leader until its connection ends or falls silent, or somebody else leads."""
        if leader.term < self.term or not leader.port:
            return
        if leader.term > max(self.term, self._turn_of):
            self._turn_of = leader.term
            turn_s = self._number * DIAL_APART_S
            if turn_s > LOOK_S:
                await asyncio.sleep(turn_s)
                return  # who leads by now is looked up anew
        channel = await self._dial(leader)
        if channel is None:
            return
        try:
            while True:
                message = await self._awaited(channel.receive(), leader)
                if message is None:
                    log.info("leaving a leader node=%s term=%d silent_s=%.1f", *self._about(leader))
                    return
                self._heard_at = elapsed_s()
                await self._take(channel, message)
        except ChannelClosed as error:
            log.info("the connection to the leader ended node=%s reason=%s", leader.node, error)
        finally:
            self._channel = None
            channel.abort()

    def _about(self, leader: LeaderFile) -> tuple[str, int, float]:
        return leader.node, leader.term, elapsed_s() - self._quiet_since

    async def _dial(self, leader: LeaderFile) -> Channel | None:
        identity = {**self._identity, "role": "agent", "place": self.place, "news": self.news}
        dialling = connect(leader.host, leader.port, self._secret, identity, timeout_s=CONNECT_TIMEOUT_S)
        try:
            return await self._awaited(dialling, leader)
        except (OSError, HandshakeRefused, ChannelClosed, asyncio.TimeoutError) as error:
            log.debug("the leader cannot be reached host=%s reason=%s", leader.host, error)
            return None

    async def _awaited(self, work: Awaitable[T], leader: LeaderFile) -> T | None:
        """What `work` returns; None when the leader has been silent for too long, or leads no more. While it
        is silent the leader file is looked at."""
        self._quiet_since = elapsed_s()
        task = asyncio.ensure_future(work)
        try:
            while True:
                await asyncio.wait({task}, timeout=LOOK_S)
                if task.done():
                    return task.result()
                silent_s = elapsed_s() - self._quiet_since
                if silent_s > 2 * self._silence.heartbeat_s:
                    self._watch.look()
                known = self._watch.known
                if known is None or known.term != leader.term or self._watch.over_for_s() is not None:
                    return None
                if silent_s > self._silence.keepalive_s:
                    return None
        finally:
            task.cancel()

    async def _take(self, channel: Channel, message: Message) -> None:
        term = int(message["term"])
        if term < self.term:
            log.warning("refused a message of an old leader term=%d known=%d", term, self.term)
            raise ChannelClosed(f"term {term} is over")
        self.term = term
        kind = message.get("kind")
        if kind == "led":
            self._channel = channel
            if self.news is None:
                self.news = int(message.get("news", 0))
            self._led()
        elif kind == "alive":
            self._watch.heard(term, int(message["renewal"]), float(message["at"]))
            for number, news in message.get("news", ()):
                if self.news is not None and int(number) > self.news:  # else it is said again
                    self.news = int(number)
                    await self._obey({"slot": EVERYBODY, "message": news})
        elif message.get("place") is None:
            await self._obey(message)
        else:
            place = (int(message["place"][0]), int(message["place"][1]))
            if place > self.place:  # else it is said again, and was obeyed the first time
                await self._obey(message)
                self.place = place
