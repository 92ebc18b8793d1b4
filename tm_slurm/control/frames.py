"""Framing: a 4-byte big-endian length, then that many bytes of UTF-8 JSON holding one object."""

from __future__ import annotations

import json
import socket
import struct
import threading
from typing import Any

Message = dict[str, Any]

MAX_FRAME_BYTES = 16 << 20
"""No frame is longer: a table of 16,384 ranks takes about 1.5 MiB."""

MAX_HELLO_BYTES = 4096
"""Before the peer has proved that it knows the secret."""

_LENGTH = struct.Struct("!I")
LENGTH_BYTES = _LENGTH.size


class FrameError(ConnectionError):
    """The peer sent something that is not a frame; the connection is of no more use."""


def encode(message: Message) -> bytes:
    """The bytes of one frame."""
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"a message of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


def length_of(prefix: bytes | bytearray, limit: int) -> int:
    """The length that a prefix announces, refused before anything is allocated when it is over `limit`
    bytes."""
    (length,) = _LENGTH.unpack(prefix)
    if length > limit:
        raise FrameError(f"the peer announced a frame of {length} bytes, the limit is {limit}")
    return int(length)


def decode(body: bytes | bytearray) -> Message:
    """The object in a frame's body; FrameError when it is no JSON object."""
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"the peer sent a frame that is not JSON: {error}") from None
    if not isinstance(message, dict):
        raise FrameError(f"the peer sent JSON of type {type(message).__name__}, expected an object")
    return message


class FrameSocket:
    """Frames over a blocking socket. Any thread may send; one thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._send_lock = threading.Lock()

    def send(self, message: Message) -> None:
        """Send one message; OSError when the peer is gone."""
        data = encode(message)
        with self._send_lock:
            self._socket.sendall(data)

    def receive(self, limit: int = MAX_FRAME_BYTES) -> Message:
        """The next message. ConnectionError when the peer is gone; TimeoutError as the socket's timeout
        says."""
        length = length_of(self._exactly(LENGTH_BYTES), limit)
        return decode(self._exactly(length))

    def _exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            piece = self._socket.recv(count - len(data))
            if not piece:
                raise ConnectionError("the peer closed the connection")
            data += piece
        return bytes(data)

    def close(self) -> None:
        self._socket.close()
