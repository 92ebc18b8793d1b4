"""Moving the state from a leaver, or a replica, to a joiner (paper section 7), over connections that are
already authenticated.

What can be done before the pause is: `Sender.prepare` and `Receiver.prepare` agree on the layout, allocate,
and map the live memory. In the pause `Sender.send` and `Receiver.receive` move the small tree and the bytes,
in place, and both sides hear how it ended. Who skips prepare() has the same done in the pause.

A receiver may have several senders, replicas of one another: each sends its share of the bytes, the first one
the tree.

On the wire, per connection: 24 bytes of greeting. On the first: messages of one byte of kind, four of length,
and JSON. After the message with the tree: on each connection the bytes of its blocks, then 8 bytes of xxh3
for each block. Nothing is pickled; nothing is allocated from a size that was not checked.

After a StateError the connections are shut down; a receiver's tensors may be half written, and must be
received again.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tm_slurm.state.binding import same_tensors
from tm_slurm.state.capturing import Snapshot
from tm_slurm.state.collecting import no_garbage_collection
from tm_slurm.state.connection import LAYOUT, READY, REFUSED, RESTORED, SEEN, STATE, Connection, Deadline
from tm_slurm.state.errors import StateError, StateRefused
from tm_slurm.state.layout import Layout, layout_of
from tm_slurm.state.streams import Memory, Stream, in_parallel, streams_of
from tm_slurm.state.tree import Json

MAX_CONNECTIONS = 64
GREETING = struct.Struct(">8sIIII")  # magic and version, number and count of connections, and of sources
MAGIC = b"tmstate\x02"
_LAST_WORD_S = 1.0  # how long a side whose connection broke listens for the other's reason


@dataclass(frozen=True)
class SendReport:
    """One transfer, as a sender saw it.

    `bytes`: those that it sent. `seconds`: until the receiver has restored the state."""

    step: int
    bytes: int
    seconds: float
    tree_bytes: int
    connections: int
    prepared: bool  # the layout had been agreed on before


def connections_of(sockets: socket.socket | Sequence[socket.socket]) -> list[Connection]:
    """A connection for each socket; ValueError for none, or too many."""
    given = [sockets] if isinstance(sockets, socket.socket) else list(sockets)
    if not 1 <= len(given) <= MAX_CONNECTIONS:
        raise ValueError(f"a transfer takes 1 to {MAX_CONNECTIONS} connections, {len(given)} given")
    return [Connection(sock) for sock in given]


class Exchange:
    """Around one exchange: puts socket timeouts back, or on failure tells the other sides and lets go.

    `controls`: the first connection of each other side. `tells`: on failure this side says why; else it
    listens for a reason.
    """

    def __init__(
        self, connections: Sequence[Connection], controls: Sequence[Connection], *, tells: bool = False
    ) -> None:
        self._connections = connections
        self._controls = controls
        self._tells = tells
        self._timeouts = [(connection.sock, connection.sock.gettimeout()) for connection in connections]

    def __enter__(self) -> None:
        return None

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        if error is None:
            for sock, timeout in self._timeouts:
                sock.settimeout(timeout)
            return
        try:
            for control in self._controls:
                if self._tells:
                    self._tell(control, str(error))
                elif isinstance(error, StateError) and not isinstance(error, StateRefused):
                    control.raise_refusal(_LAST_WORD_S)
        except StateRefused as refusal:
            raise refusal from error
        finally:
            for connection in self._connections:
                connection.shut_down()

    @staticmethod
    def _tell(control: Connection, why: str) -> None:
        with contextlib.suppress(StateError):  # it is gone; the error that is being raised says why
            control.send_message(REFUSED, why.encode()[:4096], Deadline.after(_LAST_WORD_S))


class Sender:
    """A side that has the state. The sockets stay the caller's, who gives them in blocking mode.

    `share` (i, n): this is source i of n replicas, which send the state together.
    """

    def __init__(
        self, sockets: socket.socket | Sequence[socket.socket], *, share: tuple[int, int] = (0, 1)
    ) -> None:
        if not 0 <= share[0] < share[1] <= MAX_CONNECTIONS:
            raise ValueError(f"share {share}: the first of 1 to {MAX_CONNECTIONS} sources is number 0")
        self._connections = connections_of(sockets)
        self._share = share
        self._greeted = False
        self._agreed: Snapshot | None = None
        self._layout: Layout | None = None
        self._memories: dict[int, Memory] = {}
        self._streams: list[Stream] = []

    def prepare(self, snapshot: Snapshot, *, timeout_s: float) -> None:
        """Agrees with the receiver on the layout of `snapshot`, ahead of the pause; waits for its answer.

        The snapshot's tensors may change their values afterwards. Raises StateError after `timeout_s` seconds
        or if the receiver refuses.
        """
        with self._exchange():
            self._agree(snapshot, Deadline.after(timeout_s))

    def send(self, snapshot: Snapshot, *, timeout_s: float) -> SendReport:
        """Sends the live bytes of `snapshot`'s tensors and its tree; returns when the receiver has restored
        them.

        Raises StateError after `timeout_s` seconds in all, with the receiver's reason if it refused.
        """
        began = time.perf_counter()
        deadline = Deadline.after(timeout_s)
        with self._exchange(), no_garbage_collection():
            prepared = self._still_agreed(snapshot)
            if not prepared:
                self._agree(snapshot, deadline)
            text = self._text(snapshot)
            control = self._connections[0]
            for memory in self._memories.values():
                memory.fill()
            control.send_message(STATE, text, deadline)
            in_parallel(
                lambda index: self._streams[index].send(deadline),
                self._connections,
                controls=[control],
                wake=socket.SHUT_WR,
            )
            control.receive_message(deadline, RESTORED)
            control.send_message(SEEN, b"", deadline)
            seconds = time.perf_counter() - began
        sent = sum(block.nbytes for stream in self._streams for block in stream.blocks)
        return SendReport(snapshot.step, sent, seconds, len(text), len(self._connections), prepared)

    def _exchange(self) -> Exchange:
        return Exchange(self._connections, self._connections[:1])

    def _text(self, snapshot: Snapshot) -> bytes:
        """The message before the data; with the tree, if this is the first source."""
        assert self._layout is not None
        content: dict[str, Json] = {"fingerprint": self._layout.fingerprint, "step": snapshot.step}
        if self._share[0] == 0:
            content |= {"tree": snapshot.tree, "generators": snapshot.generators}
        return json.dumps(content, separators=(",", ":"), allow_nan=False).encode("ascii")

    def _still_agreed(self, snapshot: Snapshot) -> bool:
        return self._agreed is not None and same_tensors(self._agreed, snapshot)

    def _agree(self, snapshot: Snapshot, deadline: Deadline) -> None:
        layout = layout_of(snapshot)
        control = self._connections[0]
        if not self._greeted:
            for index, connection in enumerate(self._connections):
                greeting = GREETING.pack(MAGIC, index, len(self._connections), *self._share)
                connection.send(greeting, deadline, "the greeting")
            self._greeted = True
        control.send_message(LAYOUT, layout.text, deadline)
        tensors = [named.local for named in snapshot.tensors]
        self._memories = {}
        self._streams = streams_of(self._connections, layout, tensors, self._share, self._memories)
        _, answer = control.receive_message(deadline, READY)
        if answer.decode("ascii", "replace") != layout.fingerprint:
            raise StateError(
                "the other side is ready for another layout; do two transfers share a connection?"
            )
        self._agreed, self._layout = snapshot, layout


def send(
    sockets: socket.socket | Sequence[socket.socket], snapshot: Snapshot, *, timeout_s: float
) -> SendReport:
    """Sends `snapshot` in one go; see `Sender` for preparing it before the pause."""
    return Sender(sockets).send(snapshot, timeout_s=timeout_s)
