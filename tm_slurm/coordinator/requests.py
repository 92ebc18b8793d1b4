"""What users ask of the leader over a connection of their own: one request, one answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from tm_slurm.control import Channel, ChannelClosed
from tm_slurm.coordinator.model import JobState
from tm_slurm.events import Event, EventError

REQUEST_LIMIT_S = 5.0

Message = dict[str, Any]


class Requests:
    """`feed` takes an input of the decisions, and says whether this leader still leads; `status` is what
    `tm-slurm status` shows."""

    def __init__(
        self, state: JobState, feed: Callable[[Message], bool], status: Callable[[], Message]
    ) -> None:
        self._state = state
        self._feed = feed
        self._status = status

    async def serve(self, channel: Channel) -> None:
        with contextlib.suppress(ChannelClosed, asyncio.TimeoutError):
            request = await asyncio.wait_for(channel.receive(), REQUEST_LIMIT_S)
            channel.send(self._answer(request))
            await channel.drain(REQUEST_LIMIT_S)
        await channel.close()

    def _answer(self, request: Message) -> Message:
        if request.get("kind") == "status":
            return self._status()
        if request.get("kind") != "event":
            return {"error": f"unknown request {request.get('kind')!r}"}
        try:
            event = Event.from_json(request["event"]).to_json()
        except (EventError, KeyError, TypeError) as error:
            return {"error": f"that is no event: {error}"}
        node = self._state.nodes.get(event["node"])
        if node is None:
            names = ", ".join(self._state.nodes)
            return {"error": f"node {event['node']} is not in this job; its nodes are {names}"}
        if event["kind"] == "request" and node.standing != "active":
            return {"error": f"node {node.name} has no ranks to move: it is {node.standing}"}
        if event["kind"] == "resume":
            notice = node.notice
            if notice is None:
                return {"error": f"nothing is to be moved off node {node.name}"}
            if notice.gives_back:
                why = f"{notice.kind}: {notice.reason}" if notice.reason else notice.kind
                by = f"scontrol update nodename={node.name} state=resume"
                return {
                    "error": f"node {node.name} is to be given back ({why}), which is taken back by: {by}"
                }
        if not self._feed({"kind": "events", "events": [event]}):
            return {"error": "the coordinator is changing: ask again in a moment"}
        return {"ok": True, "epoch": self._state.epoch}
