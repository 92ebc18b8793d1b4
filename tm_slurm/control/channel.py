"""The control channel over asyncio: a proved connection that carries messages both ways."""

from __future__ import annotations

import asyncio
import os

from tm_slurm.control.frames import (
    LENGTH_BYTES,
    MAX_FRAME_BYTES,
    MAX_HELLO_BYTES,
    FrameError,
    Message,
    decode,
    encode,
    length_of,
)
from tm_slurm.control.handshake import Acceptor, Dialler, HandshakeRefused

SEND_BUFFER_LIMIT_BYTES = 64 << 20
"""A peer that has let this much pile up unread is treated as gone."""


class ChannelClosed(ConnectionError):
    """The other side is gone, or sent something that is no message."""


class Channel:
    """Messages over one proved connection. `identity` is what the other side said about itself in the
    handshake."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, identity: Message | None = None
    ) -> None:
        self._reader = reader
        self._writer = writer
        self.identity: Message = identity or {}

    def send(self, message: Message) -> None:
        """Queue a message; never waits. ChannelClosed when the peer is gone or has stopped reading."""
        if self._writer.is_closing():
            raise ChannelClosed("the connection is closed")
        if self._writer.transport.get_write_buffer_size() > SEND_BUFFER_LIMIT_BYTES:
            self.abort()
            raise ChannelClosed("the peer has stopped reading")
        self._writer.write(encode(message))

    async def receive(self, limit: int = MAX_FRAME_BYTES) -> Message:
        """The next message; ChannelClosed when there will be none. Callers that must not wait for ever add a
        timeout."""
        try:
            length = length_of(await self._reader.readexactly(LENGTH_BYTES), limit)
            return decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, FrameError, OSError) as error:
            self.abort()
            raise ChannelClosed(str(error) or type(error).__name__) from None

    async def drain(self, timeout_s: float) -> None:
        """Wait until what was sent has left this process, at most `timeout_s`."""
        try:
            await asyncio.wait_for(self._writer.drain(), timeout_s)
        except (OSError, asyncio.TimeoutError):
            self.abort()

    def hold_open_to_the_end(self) -> None:
        """From now on the other side sees this channel end only when this process has ended, not before."""
        os.dup(self._writer.get_extra_info("socket").fileno())

    def abort(self) -> None:
        """Close at once; what is still queued is dropped."""
        self._writer.transport.abort()

    async def close(self, timeout_s: float = 1.0) -> None:
        """Close after what is queued has been sent, at most `timeout_s` later."""
        self._writer.close()
        try:
            await asyncio.wait_for(self._writer.wait_closed(), timeout_s)
        except (OSError, asyncio.TimeoutError):
            self.abort()


async def connect(host: str, port: int, secret: bytes, identity: Message, *, timeout_s: float) -> Channel:
    """Dial and prove. HandshakeRefused, ChannelClosed, OSError or asyncio.TimeoutError otherwise."""

    async def dial() -> Channel:
        reader, writer = await asyncio.open_connection(host, port)
        channel = Channel(reader, writer)
        try:
            dialler = Dialler(secret, identity)
            channel.send(dialler.hello)
            channel.send(dialler.answer(await channel.receive(MAX_HELLO_BYTES)))
        except BaseException:
            channel.abort()
            raise
        return channel

    return await asyncio.wait_for(dial(), timeout_s)


async def accept(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    secret: bytes,
    *,
    timeout_s: float,
    hello: Message | None = None,
) -> Channel:
    """Make a dialler prove itself. `hello`: its first frame, if that was read already. HandshakeRefused,
    ChannelClosed or asyncio.TimeoutError otherwise; then it is closed."""
    channel = Channel(reader, writer)

    async def prove() -> Message:
        acceptor = Acceptor(secret)
        try:
            first = hello if hello is not None else await channel.receive(MAX_HELLO_BYTES)
            channel.send(acceptor.challenge(first))
            return acceptor.verify(await channel.receive(MAX_HELLO_BYTES))
        except HandshakeRefused as error:
            channel.send({"refused": str(error)})
            await channel.close()
            raise

    try:
        channel.identity = await asyncio.wait_for(prove(), timeout_s)
    except BaseException:
        channel.abort()
        raise
    return channel
