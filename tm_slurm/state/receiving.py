"""The side of a transfer that becomes what the other is: from one sender, or several replicas at once."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tm_slurm.state.binding import Binding, bind
from tm_slurm.state.capturing import capture
from tm_slurm.state.collecting import no_garbage_collection
from tm_slurm.state.connection import LAYOUT, READY, RESTORED, SEEN, STATE, Connection, Deadline
from tm_slurm.state.errors import StateError
from tm_slurm.state.json_object import read_json
from tm_slurm.state.layout import Layout, read_layout
from tm_slurm.state.restoring import restore
from tm_slurm.state.streams import Memory, Stream, in_parallel, streams_of
from tm_slurm.state.transfer import GREETING, MAGIC, Exchange, connections_of


@dataclass(frozen=True)
class ReceiveReport:
    """One transfer, as the receiver saw it. `seconds`: from its first message until it is restored."""

    step: int
    bytes: int
    seconds: float
    tree_bytes: int
    connections: int
    allocated_bytes: int  # of tensors that this rank had not
    prepared: bool
    acknowledged: (
        bool  # the sender knows that it arrived; False if it left before saying so (the state is complete)
    )


@dataclass
class _Source:
    """One sender: `share` is its number among all of them, once it has said so."""

    name: str
    connections: list[Connection]
    share: int = -1
    agreed: str = ""  # the fingerprint of its layout
    streams: list[Stream] = field(default_factory=list)

    @property
    def control(self) -> Connection:
        return self.connections[0]


class Receiver:
    """The side that becomes what the sender is: `state` holds its live objects, of the same build().

    `max_bytes` bounds what may be allocated for tensors that this side has not (see `binding.bind`).
    """

    def __init__(
        self,
        sockets: socket.socket | Sequence[socket.socket],
        state: Mapping[str, Any],
        *,
        max_bytes: int | None = None,
    ) -> None:
        self._sources = [_Source("", connections_of(sockets))]
        self._state = state
        self._max_bytes = max_bytes
        self._greeted = False
        self._layout: Layout | None = None
        self._binding: Binding | None = None
        self._memories: dict[int, Memory] = {}

    @classmethod
    def of_sources(
        cls,
        sources: Sequence[socket.socket | Sequence[socket.socket]],
        state: Mapping[str, Any],
        *,
        names: Sequence[str] | None = None,
        max_bytes: int | None = None,
    ) -> Receiver:
        """For the state from several senders at once, each with its own share, in any order.

        `names` says in errors which one it was ("rank 3"). ValueError for no source, or names for others.
        """
        if not sources or (names is not None and len(names) != len(sources)):
            raise ValueError(f"{len(sources)} sources, named {names!r}: give each one name")
        receiver = cls(sources[0], state, max_bytes=max_bytes)
        called = names or [f"source {number}" for number in range(len(sources))]
        receiver._sources = [
            _Source(name, connections_of(sockets)) for name, sockets in zip(called, sources, strict=True)
        ]
        return receiver

    def prepare(self, *, timeout_s: float) -> None:
        """Waits for the senders' layout and gets ready for it; nothing that the state holds is changed.

        Shadow steps may run between this and `receive`. Raises StateError after `timeout_s` seconds, if the
        layout does not fit this rank's objects, or if two senders do not agree on it; the senders are told.
        """
        deadline = Deadline.after(timeout_s)
        with self._exchange():
            self._greet(deadline)
            for source in self._sources:
                with _named(source):
                    _, text = source.control.receive_message(deadline, LAYOUT)
                    self._get_ready(source, text, deadline)

    def receive(self, *, timeout_s: float) -> ReceiveReport:
        """Waits for the state, writes it in place, checks every block and restores the rest.

        Raises StateError after `timeout_s` seconds in all, or naming the tensor, or the sender, that is
        wrong; the senders are told.
        """
        deadline = Deadline.after(timeout_s)
        with self._exchange():
            self._greet(deadline)
            prepared = self._binding is not None
            if self._binding is not None and not self._binding.still_holds(
                capture(self._state, 0, generators=False)
            ):
                self._bind()
            texts = []
            began = 0.0
            for source in self._sources:
                with _named(source):
                    kind, text = source.control.receive_message(deadline, LAYOUT, STATE)
                    while kind == LAYOUT:
                        prepared = False
                        self._get_ready(source, text, deadline)
                        kind, text = source.control.receive_message(deadline, LAYOUT, STATE)
                texts.append(text)
                began = began or time.perf_counter()
            with no_garbage_collection():
                step = self._take(texts, deadline)
            for source in self._sources:
                with _named(source):
                    source.control.send_message(RESTORED, b"", deadline)
            seconds = time.perf_counter() - began
            acknowledged = True
            for source in self._sources:
                try:
                    source.control.receive_message(deadline, SEEN)
                except StateError:
                    acknowledged = (
                        False  # the state is here and checked: what became of the sender is no matter
                    )
        assert self._layout is not None and self._binding is not None
        return ReceiveReport(
            step,
            self._layout.nbytes,
            seconds,
            sum(len(text) for text in texts),
            len(self._connections),
            self._binding.allocated_bytes,
            prepared,
            acknowledged,
        )

    @property
    def _connections(self) -> list[Connection]:
        return [connection for source in self._sources for connection in source.connections]

    def _exchange(self) -> Exchange:
        return Exchange(self._connections, [source.control for source in self._sources], tells=True)

    def _greet(self, deadline: Deadline) -> None:
        """Reads which connection is which, and which source: they may have been accepted in any order."""
        if self._greeted:
            return
        for source in self._sources:
            with _named(source):
                self._greet_one(source, deadline)
        if sorted(source.share for source in self._sources) != list(range(len(self._sources))):
            raise StateError("the greeting: two senders have the same share of the state")
        self._sources.sort(key=lambda source: source.share)
        self._greeted = True

    def _greet_one(self, source: _Source, deadline: Deadline) -> None:
        ordered: dict[int, Connection] = {}
        for connection in source.connections:
            greeting = bytearray(GREETING.size)
            connection.receive_into(memoryview(greeting), deadline, "the greeting")
            magic, index, count, share, sources = GREETING.unpack(greeting)
            if magic != MAGIC:
                raise StateError("the greeting: not a state transfer of this version")
            if count != len(source.connections):
                raise StateError(f"the sender uses {count} connections, {len(source.connections)} given here")
            if sources != len(self._sources):
                raise StateError(
                    f"the sender is one of {sources} that have a share each, {len(self._sources)} given here"
                )
            if source.share not in (-1, share):
                raise StateError("the greeting: connections of two senders are given as one's")
            source.share = share
            ordered[index] = connection
        if sorted(ordered) != list(range(len(source.connections))):
            raise StateError(
                "the greeting: two connections have one number; do two transfers share a connection?"
            )
        source.connections = [ordered[index] for index in range(len(ordered))]

    def _get_ready(self, source: _Source, text: bytes, deadline: Deadline) -> None:
        """Agrees on the layout in `text`; the first source's is what the others must have too."""
        layout = read_layout(text)
        if self._layout is None or self._layout.fingerprint != layout.fingerprint:
            if source.share > 0:
                raise StateError(f"its layout is not that of {self._sources[0].name}: they are no replicas")
            self._layout = layout
            self._bind()
        source.agreed = layout.fingerprint
        source.control.send_message(READY, layout.fingerprint.encode("ascii"), deadline)

    def _bind(self) -> None:
        layout = self._layout
        assert layout is not None
        self._binding = binding = bind(layout, self._state, max_bytes=self._max_bytes)
        self._memories = {}
        for source in self._sources:
            share = source.share, len(self._sources)
            source.streams = streams_of(source.connections, layout, binding.locals, share, self._memories)

    def _take(self, texts: Sequence[bytes], deadline: Deadline) -> int:
        """Everything after the STATE messages' arrival, up to objects that are restored; answers the step."""
        layout, binding = self._layout, self._binding
        steps = []
        contents = []
        for source, text in zip(self._sources, texts, strict=True):
            with _named(source):
                content = read_json(text, "the state")
                if layout is None or not (content.get("fingerprint") == source.agreed == layout.fingerprint):
                    raise StateError(
                        "the state: of another layout than the one agreed on; do two transfers share a "
                        "connection?"
                    )
                if type(content.get("step")) is not int:
                    raise StateError(_INCOMPLETE)
                contents.append(content)
                steps.append(content["step"])
                if content["step"] != steps[0]:
                    raise StateError(f"it is at step {steps[-1]}, {self._sources[0].name} is at {steps[0]}")
        tree = contents[0].get("tree")
        if not isinstance(tree, dict):
            raise StateError(_INCOMPLETE)
        assert binding is not None
        streams = [(source, stream) for source in self._sources for stream in source.streams]

        def work(index: int) -> None:
            source, stream = streams[index]
            with _named(source):
                stream.receive(deadline)

        controls = [source.control for source in self._sources]
        in_parallel(work, self._connections, controls=controls, wake=socket.SHUT_RD)
        with torch.no_grad():
            for memory in self._memories.values():
                memory.empty()
            for position, tensor in binding.copies:
                tensor.copy_(binding.locals[position])
        restore(self._state, tree, binding.wholes.__getitem__, contents[0].get("generators"))
        return int(steps[0])


_INCOMPLETE = "the state: the step or the tree is missing; is the sender another version?"


@contextlib.contextmanager
def _named(source: _Source) -> Iterator[None]:
    """Errors from inside say which source it was, where there are several."""
    try:
        yield
    except StateError as error:
        if not source.name:
            raise
        raise type(error)(f"{source.name}: {error}") from error


def receive(
    sockets: socket.socket | Sequence[socket.socket],
    state: Mapping[str, Any],
    *,
    timeout_s: float,
    max_bytes: int | None = None,
) -> ReceiveReport:
    """Makes `state` what the sender's is, in one go; see `Receiver` for preparing it before the pause."""
    return Receiver(sockets, state, max_bytes=max_bytes).receive(timeout_s=timeout_s)
