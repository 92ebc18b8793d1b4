"""Moving the state from a leaver, or a replica, to a joiner (paper section 7), over connections that are
already authenticated.

What can be done before the pause is: `Sender.prepare` and `Receiver.prepare` agree on the layout, allocate,
and map the live memory. In the pause `Sender.send` and `Receiver.receive` move the small tree and the bytes,
in place, and both sides hear how it ended. Who skips prepare() has the same done in the pause.

On the wire, per connection: 16 bytes of greeting. On the first: messages of one byte of kind, four of length,
and JSON. After the message with the tree: on each connection the bytes of its blocks, then 8 bytes of xxh3
for each block. Nothing is pickled; nothing is allocated from a size that was not checked.

After a StateError the connections are shut down; a receiver's tensors may be half written, and must be
received again.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tm_slurm.state.binding import Binding, bind, same_tensors
from tm_slurm.state.blocks import Block, plan_streams
from tm_slurm.state.capture import Snapshot, capture
from tm_slurm.state.collecting import no_garbage_collection
from tm_slurm.state.connection import LAYOUT, READY, REFUSED, RESTORED, SEEN, STATE, Connection, Deadline
from tm_slurm.state.errors import StateError, StateRefused
from tm_slurm.state.layout import Layout, layout_of, read_json, read_layout
from tm_slurm.state.restore import restore
from tm_slurm.state.streams import Memory, in_parallel, receive_blocks, send_blocks

MAX_CONNECTIONS = 64
_GREETING = struct.Struct(">8sII")  # magic and version, number of this connection, how many there are
_MAGIC = b"tmstate\x01"
_LAST_WORD_S = 1.0  # how long a side whose connection broke listens for the other's reason


@dataclass(frozen=True)
class SendReport:
    """One transfer, as the sender saw it. `seconds`: until the receiver has restored the state."""

    step: int
    bytes: int
    seconds: float
    tree_bytes: int
    connections: int
    prepared: bool  # the layout had been agreed on before


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


def _connections(sockets: socket.socket | Sequence[socket.socket]) -> list[Connection]:
    given = [sockets] if isinstance(sockets, socket.socket) else list(sockets)
    if not 1 <= len(given) <= MAX_CONNECTIONS:
        raise ValueError(f"a transfer takes 1 to {MAX_CONNECTIONS} connections, {len(given)} given")
    return [Connection(sock) for sock in given]


class Sender:
    """The side that has the state. The sockets stay the caller's, who gives them in blocking mode."""

    def __init__(self, sockets: socket.socket | Sequence[socket.socket]) -> None:
        self._connections = _connections(sockets)
        self._greeted = False
        self._agreed: Snapshot | None = None
        self._layout: Layout | None = None
        self._memories: list[Memory] = []
        self._streams: list[list[Block]] = []

    def prepare(self, snapshot: Snapshot, *, timeout_s: float) -> None:
        """Agrees with the receiver on the layout of `snapshot`, ahead of the pause; waits for its answer.

        The snapshot's tensors may change their values afterwards. Raises StateError after `timeout_s` seconds
        or if the receiver refuses.
        """
        with _Transfer(self._connections):
            self._agree(snapshot, Deadline.after(timeout_s))

    def send(self, snapshot: Snapshot, *, timeout_s: float) -> SendReport:
        """Sends the live bytes of `snapshot`'s tensors and its tree; returns when the receiver has restored
        them.

        Raises StateError after `timeout_s` seconds in all, with the receiver's reason if it refused.
        """
        began = time.perf_counter()
        deadline = Deadline.after(timeout_s)
        with _Transfer(self._connections), no_garbage_collection():
            prepared = self._still_agreed(snapshot)
            if not prepared:
                self._agree(snapshot, deadline)
            assert self._layout is not None
            pieces = self._layout.pieces
            content = {
                "fingerprint": self._layout.fingerprint,
                "step": snapshot.step,
                "tree": snapshot.tree,
                "generators": snapshot.generators,
            }
            text = json.dumps(content, separators=(",", ":"), allow_nan=False).encode("ascii")
            control = self._connections[0]
            for memory in self._memories:
                memory.fill()
            control.send_message(STATE, text, deadline)
            in_parallel(
                lambda index: send_blocks(
                    self._connections[index], self._streams[index], self._memories, pieces, deadline
                ),
                self._connections,
            )
            control.receive_message(deadline, RESTORED)
            control.send_message(SEEN, b"", deadline)
            seconds = time.perf_counter() - began
        return SendReport(
            snapshot.step, self._layout.nbytes, seconds, len(text), len(self._connections), prepared
        )

    def _still_agreed(self, snapshot: Snapshot) -> bool:
        return self._agreed is not None and same_tensors(self._agreed, snapshot)

    def _agree(self, snapshot: Snapshot, deadline: Deadline) -> None:
        layout = layout_of(snapshot)
        control = self._connections[0]
        if not self._greeted:
            for index, connection in enumerate(self._connections):
                greeting = _GREETING.pack(_MAGIC, index, len(self._connections))
                connection.send(greeting, deadline, "the greeting")
            self._greeted = True
        control.send_message(LAYOUT, layout.text, deadline)
        self._memories = [
            Memory(piece, named.local) for piece, named in zip(layout.pieces, snapshot.tensors, strict=True)
        ]
        self._streams = plan_streams([piece.nbytes for piece in layout.pieces], len(self._connections))
        _, answer = control.receive_message(deadline, READY)
        if answer.decode("ascii", "replace") != layout.fingerprint:
            raise StateError(
                "the other side is ready for another layout; do two transfers share a connection?"
            )
        self._agreed, self._layout = snapshot, layout


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
        self._connections = _connections(sockets)
        self._state = state
        self._max_bytes = max_bytes
        self._greeted = False
        self._layout: Layout | None = None
        self._binding: Binding | None = None
        self._memories: list[Memory] = []
        self._streams: list[list[Block]] = []

    def prepare(self, *, timeout_s: float) -> None:
        """Waits for the sender's layout and gets ready for it; nothing that the state holds is changed.

        Shadow steps may run between this and `receive`. Raises StateError after `timeout_s` seconds or if the
        layout does not fit this rank's objects; the sender is told.
        """
        deadline = Deadline.after(timeout_s)
        with _Transfer(self._connections, tells=True):
            self._greet(deadline)
            _, text = self._connections[0].receive_message(deadline, LAYOUT)
            self._get_ready(text, deadline)

    def receive(self, *, timeout_s: float) -> ReceiveReport:
        """Waits for the state, writes it in place, checks every block and restores the rest.

        Raises StateError after `timeout_s` seconds in all, or naming the tensor that is wrong; the sender is
        told.
        """
        deadline = Deadline.after(timeout_s)
        with _Transfer(self._connections, tells=True):
            self._greet(deadline)
            prepared = self._binding is not None
            if self._binding is not None and not self._binding.still_holds(
                capture(self._state, 0, generators=False)
            ):
                self._bind()
            control = self._connections[0]
            kind, text = control.receive_message(deadline, LAYOUT, STATE)
            while kind == LAYOUT:
                prepared = False
                self._get_ready(text, deadline)
                kind, text = control.receive_message(deadline, LAYOUT, STATE)
            began = time.perf_counter()
            with no_garbage_collection():
                step = self._take(text, deadline)
            control.send_message(RESTORED, b"", deadline)
            seconds = time.perf_counter() - began
            acknowledged = True
            try:
                control.receive_message(deadline, SEEN)
            except StateError:
                acknowledged = (
                    False  # the state is here and checked: what became of the sender does not change that
                )
        assert self._layout is not None and self._binding is not None
        return ReceiveReport(
            step,
            self._layout.nbytes,
            seconds,
            len(text),
            len(self._connections),
            self._binding.allocated_bytes,
            prepared,
            acknowledged,
        )

    def _greet(self, deadline: Deadline) -> None:
        """Reads which connection is which: they may have been accepted in any order."""
        if self._greeted:
            return
        ordered: dict[int, Connection] = {}
        for connection in self._connections:
            greeting = bytearray(_GREETING.size)
            connection.receive_into(memoryview(greeting), deadline, "the greeting")
            magic, index, count = _GREETING.unpack(greeting)
            if magic != _MAGIC:
                raise StateError("the greeting: not a state transfer of this version")
            if count != len(self._connections):
                raise StateError(f"the sender uses {count} connections, {len(self._connections)} given here")
            ordered[index] = connection
        if sorted(ordered) != list(range(len(self._connections))):
            raise StateError(
                "the greeting: two connections have one number; do two transfers share a connection?"
            )
        self._connections[:] = [ordered[index] for index in range(len(ordered))]
        self._greeted = True

    def _get_ready(self, text: bytes, deadline: Deadline) -> None:
        self._layout = read_layout(text)
        self._bind()
        self._connections[0].send_message(READY, self._layout.fingerprint.encode("ascii"), deadline)

    def _bind(self) -> None:
        layout = self._layout
        assert layout is not None
        self._binding = binding = bind(layout, self._state, max_bytes=self._max_bytes)
        self._memories = [
            Memory(piece, local) for piece, local in zip(layout.pieces, binding.locals, strict=True)
        ]
        self._streams = plan_streams([piece.nbytes for piece in layout.pieces], len(self._connections))

    def _take(self, text: bytes, deadline: Deadline) -> int:
        """Everything after the STATE message's arrival, up to objects that are restored; answers the step."""
        content = read_json(text, "the state")
        layout, binding = self._layout, self._binding
        if layout is None or binding is None or content.get("fingerprint") != layout.fingerprint:
            raise StateError(
                "the state: of another layout than the one agreed on; do two transfers share a connection?"
            )
        step = content.get("step")
        tree = content.get("tree")
        if type(step) is not int or not isinstance(tree, dict):
            raise StateError("the state: the step or the tree is missing; is the sender another version?")
        in_parallel(
            lambda index: receive_blocks(
                self._connections[index], self._streams[index], self._memories, layout.pieces, deadline
            ),
            self._connections,
        )
        with torch.no_grad():
            for memory in self._memories:
                memory.empty()
            for position, tensor in binding.copies:
                tensor.copy_(binding.locals[position])
        restore(self._state, tree, binding.wholes.__getitem__, content.get("generators"))
        return step


class _Transfer:
    """Around one exchange: puts socket timeouts back, or on failure tells the other side and lets go."""

    def __init__(self, connections: list[Connection], *, tells: bool = False) -> None:
        self._connections = connections
        self._tells = tells
        self._timeouts = [(connection.sock, connection.sock.gettimeout()) for connection in connections]

    def __enter__(self) -> None:
        return None

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        if error is None:
            for sock, timeout in self._timeouts:
                sock.settimeout(timeout)
            return
        control = self._connections[0]
        try:
            if self._tells:
                control.send_message(REFUSED, str(error).encode()[:4096], Deadline.after(_LAST_WORD_S))
            elif isinstance(error, StateError) and not isinstance(error, StateRefused):
                control.raise_refusal(_LAST_WORD_S)
        except StateRefused as refusal:
            raise refusal from error
        except StateError:
            pass  # it is gone; the error that is being raised says why
        finally:
            for connection in self._connections:
                connection.shut_down()


def send(
    sockets: socket.socket | Sequence[socket.socket], snapshot: Snapshot, *, timeout_s: float
) -> SendReport:
    """Sends `snapshot` in one go; see `Sender` for preparing it before the pause."""
    return Sender(sockets).send(snapshot, timeout_s=timeout_s)


def receive(
    sockets: socket.socket | Sequence[socket.socket],
    state: Mapping[str, Any],
    *,
    timeout_s: float,
    max_bytes: int | None = None,
) -> ReceiveReport:
    """Makes `state` what the sender's is, in one go; see `Receiver` for preparing it before the pause."""
    return Receiver(sockets, state, max_bytes=max_bytes).receive(timeout_s=timeout_s)
