"""Bytes and messages over one blocking socket, with a deadline on every wait."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from dataclasses import dataclass

from tm_slurm.state.errors import StateError, StateRefused

MAX_MESSAGE_BYTES = 64 << 20
_FRAME = struct.Struct(">BI")  # kind of message, bytes that follow
_GROW = 1 << 20  # a message's buffer grows by this much as its bytes arrive, whatever length it claims

LAYOUT, READY, STATE, RESTORED, SEEN, REFUSED = range(1, 7)
_MESSAGE_NAMES = {
    LAYOUT: "the layout",
    READY: "that it is ready",
    STATE: "the state",
    RESTORED: "that it restored the state",
    SEEN: "that it saw the end",
    REFUSED: "a refusal",
}


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment of time.monotonic() after which nothing waits any longer."""

    at: float
    timeout_s: float

    @staticmethod
    def after(timeout_s: float) -> Deadline:
        return Deadline(time.monotonic() + timeout_s, timeout_s)

    def remaining(self, what: str) -> float:
        """Seconds left; StateError saying what was waited for if there are none."""
        left = self.at - time.monotonic()
        if left <= 0:
            raise StateError(
                f"{what}: not done within {self.timeout_s:g} s; is the other side alive, and timeout_s "
                "long enough?"
            )
        return left


class Connection:
    """A socket of the caller, who keeps owning it."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def send(self, data: memoryview | bytes, deadline: Deadline, what: str) -> None:
        """Sends all of `data`; StateError naming `what` after the deadline or on a broken connection."""
        try:
            self.sock.settimeout(deadline.remaining(what))
            self.sock.sendall(data)
        except TimeoutError:
            deadline.remaining(what)
            raise StateError(f"{what}: not sent within {deadline.timeout_s:g} s") from None
        except OSError as error:
            raise StateError(f"{what}: the connection broke while sending: {error}") from error

    def receive_into(self, view: memoryview, deadline: Deadline, what: str) -> None:
        """Fills `view`; StateError naming `what` after the deadline, or if the stream ends before."""
        done, size = 0, len(view)
        try:
            while done < size:
                self.sock.settimeout(deadline.remaining(what))
                count = self.sock.recv_into(view[done:] if done else view)
                if count == 0:
                    raise StateError(
                        f"{what}: the other side closed the connection after {done} of {size} bytes"
                    )
                done += count
        except TimeoutError:
            raise StateError(
                f"{what}: {done} of {size} bytes arrived within {deadline.timeout_s:g} s; is the other "
                "side alive?"
            ) from None
        except OSError as error:
            raise StateError(f"{what}: the connection broke after {done} of {size} bytes: {error}") from error

    def send_message(self, kind: int, content: bytes, deadline: Deadline) -> None:
        if len(content) > MAX_MESSAGE_BYTES:
            raise StateError(
                f"{_MESSAGE_NAMES[kind]}: {len(content)} bytes without the tensors, at most "
                f"{MAX_MESSAGE_BYTES} travel; "
                "keep large data in tensors or NumPy arrays of numbers"
            )
        self.send(_FRAME.pack(kind, len(content)) + content, deadline, _MESSAGE_NAMES[kind])

    def receive_message(self, deadline: Deadline, *expected: int) -> tuple[int, bytes]:
        """The next message, one of the `expected` kinds; StateRefused with the other side's words."""
        what = " or ".join(_MESSAGE_NAMES[kind] for kind in expected)
        frame = bytearray(_FRAME.size)
        self.receive_into(memoryview(frame), deadline, f"waiting for the other side to say {what}")
        kind, size = _FRAME.unpack(frame)
        if kind not in _MESSAGE_NAMES or size > MAX_MESSAGE_BYTES:
            raise StateError(
                f"expected {what}, found message kind {kind} of {size} bytes: not a state transfer of "
                "this version"
            )
        content = bytearray()
        while len(content) < size:
            part = bytearray(min(_GROW, size - len(content)))
            self.receive_into(memoryview(part), deadline, _MESSAGE_NAMES[kind])
            content += part
        if kind == REFUSED:
            raise StateRefused(f"the other side refused: {bytes(content[:4096]).decode('utf-8', 'replace')}")
        if kind not in expected:
            raise StateError(f"expected {what}, the other side said {_MESSAGE_NAMES[kind]}")
        return kind, bytes(content)

    def raise_refusal(self, timeout_s: float) -> None:
        """Raises StateRefused if the other side said why before the connection broke; else returns."""
        try:
            self.receive_message(Deadline.after(timeout_s), RESTORED)
        except StateRefused:
            raise
        except StateError:
            return

    def shut_down(self, how: int = socket.SHUT_RDWR) -> None:
        """Ends both directions at once, or the one in `how`, so that nobody waits. The caller closes it."""
        with contextlib.suppress(OSError):  # it was not connected any longer
            self.sock.shutdown(how)
