"""The control channel over asyncio: a proved connection that carries messages both ways."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable

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
        self.send_encoded(encode(message))

    def send_encoded(self, frame: bytes) -> None:
        """The same with the bytes of a message, made once for many peers."""
        if self._writer.is_closing():
            raise ChannelClosed("the connection is closed")
        if self._writer.transport.get_write_buffer_size() > SEND_BUFFER_LIMIT_BYTES:
            self.abort()
            raise ChannelClosed("the peer has stopped reading")
        self._writer.write(frame)

    async def receive(self, limit: int = MAX_FRAME_BYTES) -> Message:
        """The next message; ChannelClosed when there will be none. Callers that must not wait for ever add a
        timeout."""
        try:
            length = length_of(await self._reader.readexactly(LENGTH_BYTES), limit)
            return decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, FrameError, OSError) as error:
            self.abort()
            raise ChannelClosed(str(error) or type(error).__name__) from None

    async def deliver(self, take: Callable[[Message], None]) -> None:
        """Call `take` with each message from now on, as it comes in; returns when there will be none. To be
        used instead of `receive` by who listens to thousands: it costs a third."""
        transport = self._writer.transport
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()
        self._reader.feed_eof()
        come = b""
        with contextlib.suppress(OSError):
            come = await self._reader.read()  # what has come already, at once
        delivery = _Delivery(transport, take)
        transport.set_protocol(delivery)
        try:
            delivery.data_received(come)
        except BaseException:
            transport.abort()
            raise
        if not transport.is_closing():
            transport.resume_reading()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

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


class _Delivery(asyncio.Protocol):
    """Takes a connection over from its stream, which still hears what concerns writing and the end."""

    def __init__(self, transport: asyncio.Transport, take: Callable[[Message], None]) -> None:
        self._transport = transport
        self._take = take
        self._stream = transport.get_protocol()
        self._come = bytearray()

    def data_received(self, data: bytes) -> None:
        if self._come:
            self._come += data
            del self._come[: self._take_frames(self._come)]
        else:  # nearly always: whole frames
            self._come += data[self._take_frames(data) :]

    def _take_frames(self, come: bytes | bytearray) -> int:
        """Take the whole frames; returns how many bytes they were."""
        at = 0
        try:
            while len(come) - at >= LENGTH_BYTES and not self._transport.is_closing():
                start = at + LENGTH_BYTES
                end = start + length_of(come[at:start], MAX_FRAME_BYTES)
                if len(come) < end:
                    break
                at = end
                self._take(decode(come[start:end]))
        except FrameError:
            self._transport.abort()
        return at

    def connection_lost(self, exc: Exception | None) -> None:
        self._stream.connection_lost(exc)

    def pause_writing(self) -> None:
        self._stream.pause_writing()

    def resume_writing(self) -> None:
        self._stream.resume_writing()


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
