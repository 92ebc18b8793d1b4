"""Signed events of root's programs at the leader's listener: what comes within a moment is journalled
together, and answered once it is."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

from tm_slurm.control import Channel, ChannelClosed
from tm_slurm.control.frames import MAX_HELLO_BYTES
from tm_slurm.coordinator.clock import elapsed_s
from tm_slurm.coordinator.presence import Presence
from tm_slurm.events import Event
from tm_slurm.events.signed import EventRefused, SignedEvents

log = logging.getLogger("tm_slurm.leader")

KINDS = frozenset({"signed_event", "event"})
"""First frames that are no handshake. An `event` by itself is one that nobody has signed."""

APART_S = 0.005
"""Least time between two journal entries: in a flood one entry holds all that has come meanwhile."""

ENDED_KINDS = frozenset({"task_exit", "node_leave"})
"""After these the node's agent, if it is not connected either, need not be waited for."""

Message = dict[str, Any]


class SignedDoor:
    """`events` judges the frames; `feed` takes an input of the decisions, and says whether this leader still
    leads. `presence` hears of ended tasks."""

    def __init__(self, events: SignedEvents, feed: Callable[[Message], bool], presence: Presence) -> None:
        self._events = events
        self._feed = feed
        self._presence = presence
        self._together: list[Event] = []
        self._flushed_at = 0.0
        self._journalled: asyncio.Future[bool] | None = None

    @property
    def counts(self) -> dict[str, int]:
        """How many frames were accepted, known already, or refused and why."""
        return dict(self._events.counts)

    async def first_frame(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, timeout_s: float
    ) -> Message | None:
        """The first frame of a connection, if it is one of a handshake; signed events are dealt with here,
        until their connection ends or is silent for `timeout_s`. ChannelClosed or asyncio.TimeoutError."""
        channel = Channel(reader, writer)
        try:
            frame = await asyncio.wait_for(channel.receive(MAX_HELLO_BYTES), timeout_s)
        except BaseException:
            channel.abort()
            raise
        if frame.get("kind") not in KINDS:
            return frame
        with contextlib.suppress(ChannelClosed, OSError, asyncio.TimeoutError):
            while True:
                channel.send(await self._answer(frame))
                frame = await asyncio.wait_for(channel.receive(MAX_HELLO_BYTES), timeout_s)
        await channel.close()
        return None

    async def _answer(self, frame: Message) -> Message:
        try:
            event = self._events.take(frame, time.time())
        except EventRefused as refused:
            count = self._events.counts[refused.why]
            if str(count).rstrip("0") == "1":  # the first, the tenth, the hundredth: a flood fills no disk
                log.warning("refused a signed event reason=%s count=%d", refused, count)
            return {"refused": refused.why}
        if event is not None and not await self._journal(event):
            return {"refused": "the coordinator is changing"}
        return {"ok": True}

    async def _journal(self, event: Event) -> bool:
        """Hand an event over with those that come in the same moment; whether this leader still leads."""
        if self._journalled is None:
            loop = asyncio.get_running_loop()
            self._journalled = loop.create_future()
            wait_s = self._flushed_at + APART_S - elapsed_s()
            loop.call_later(max(0.0, wait_s), self._flush)
        self._together.append(event)
        return await asyncio.shield(self._journalled)

    def _flush(self) -> None:
        events, self._together = self._together, []
        journalled, self._journalled = self._journalled, None
        assert journalled is not None
        taken = self._feed({"kind": "events", "events": [event.to_json() for event in events]})
        for event in events if taken else ():
            if event.kind in ENDED_KINDS:
                self._presence.accuse(event.node, elapsed_s())
        self._flushed_at = elapsed_s()
        journalled.set_result(taken)
