"""Who does not know the job's secret gets nowhere on the control channel, and garbage does no harm."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tm_slurm.control import (
    Channel,
    ChannelClosed,
    FrameSocket,
    HandshakeRefused,
    accept,
    accept_socket,
    connect,
    connect_socket,
    listening_at,
    read_secret,
)
from tm_slurm.control.frames import LENGTH_BYTES, MAX_HELLO_BYTES, FrameError, decode, encode, length_of
from tm_slurm.control.handshake import Acceptor, Dialler

SECRET, OTHER = b"s" * 32, b"o" * 32


def test_both_sides_prove_the_secret_and_the_identity_arrives() -> None:
    dialler, acceptor = Dialler(SECRET, {"role": "agent", "node": "n1"}), Acceptor(SECRET)
    assert acceptor.verify(dialler.answer(acceptor.challenge(dialler.hello))) == {
        "role": "agent",
        "node": "n1",
    }


def test_an_acceptor_without_the_secret_is_refused() -> None:
    dialler = Dialler(SECRET, {})
    with pytest.raises(HandshakeRefused, match="does not know"):
        dialler.answer(Acceptor(OTHER).challenge(dialler.hello))


def test_a_dialler_without_the_secret_is_refused() -> None:
    dialler, acceptor = Dialler(SECRET, {}), Acceptor(SECRET)
    acceptor.challenge(dialler.hello)
    with pytest.raises(HandshakeRefused, match="does not know"):
        acceptor.verify({"proof": "0" * 64})


def test_an_acceptors_proof_is_no_diallers_proof() -> None:
    """A reflected proof must not pass: the attacker sends back what it was sent."""
    dialler, acceptor = Dialler(SECRET, {}), Acceptor(SECRET)
    challenge = acceptor.challenge(dialler.hello)
    with pytest.raises(HandshakeRefused):
        acceptor.verify({"proof": challenge["proof"]})


def test_an_old_proof_is_no_proof() -> None:
    dialler, first, second = Dialler(SECRET, {}), Acceptor(SECRET), Acceptor(SECRET)
    answer = dialler.answer(first.challenge(dialler.hello))
    second.challenge(dialler.hello)
    with pytest.raises(HandshakeRefused):
        second.verify(answer)


def test_a_changed_identity_is_noticed() -> None:
    dialler, acceptor = Dialler(SECRET, {"node": "n1"}), Acceptor(SECRET)
    challenge = acceptor.challenge({**dialler.hello, "node": "n2"})
    with pytest.raises(HandshakeRefused):
        dialler.answer(challenge)


def test_another_protocol_version_is_refused_with_what_to_do() -> None:
    with pytest.raises(HandshakeRefused, match="same tm_slurm"):
        Acceptor(SECRET).challenge({"v": 99, "nonce": ""})


@given(
    st.dictionaries(
        st.text(max_size=8), st.one_of(st.none(), st.integers(), st.text(), st.lists(st.integers()))
    )
)
def test_frames_round_trip(message: dict[str, Any]) -> None:
    data = encode(message)
    assert length_of(data[:LENGTH_BYTES], MAX_HELLO_BYTES + len(data)) == len(data) - LENGTH_BYTES
    assert decode(data[LENGTH_BYTES:]) == message


@given(st.binary(max_size=64))
def test_bytes_that_are_no_message_are_refused(body: bytes) -> None:
    try:
        assert isinstance(decode(body), dict)
    except FrameError as error:
        assert "the peer" in str(error)


def test_an_announced_length_over_the_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(FrameError, match="limit"):
        length_of(struct.pack("!I", 1 << 31), MAX_HELLO_BYTES)


def serve(
    handle: Callable[[Channel], Coroutine[Any, Any, None]], client: Callable[[int], Coroutine[Any, Any, None]]
) -> list[BaseException]:
    """Run a server on loopback and a client against it; what `accept` raised."""
    refused: list[BaseException] = []

    async def main() -> None:
        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                channel = await accept(reader, writer, SECRET, timeout_s=5.0)
            except (HandshakeRefused, ChannelClosed, OSError, asyncio.TimeoutError) as error:
                refused.append(error)
                return
            await handle(channel)

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        async with server:
            await asyncio.wait_for(client(server.sockets[0].getsockname()[1]), 10.0)

    asyncio.run(main())
    return refused


async def echo(channel: Channel) -> None:
    channel.send({"got": await channel.receive(), "from": channel.identity})
    await channel.drain(1.0)


def test_messages_cross_a_proved_connection() -> None:
    async def client(port: int) -> None:
        channel = await connect("127.0.0.1", port, SECRET, {"node": "n7"}, timeout_s=5.0)
        channel.send({"kind": "hello"})
        assert await channel.receive() == {"got": {"kind": "hello"}, "from": {"node": "n7"}}
        await channel.close()

    assert serve(echo, client) == []


@pytest.mark.parametrize("piece", [1, 7, 10_000])
def test_who_listens_to_thousands_gets_every_message_whole(piece: int) -> None:
    """However the bytes come, and also those that were there before it listened."""
    sent = [{"kind": "beat", "number": number, "more": "x" * (number % 90)} for number in range(100)]
    taken: list[dict[str, Any]] = []
    over = asyncio.Event()

    async def listen(channel: Channel) -> None:
        taken.append(await channel.receive())
        await asyncio.sleep(0)  # whatever is under way comes into the stream meanwhile
        await channel.deliver(taken.append)
        over.set()

    async def client(port: int) -> None:
        channel = await connect("127.0.0.1", port, SECRET, {}, timeout_s=5.0)
        whole = b"".join(map(encode, sent))
        for at in range(0, len(whole), piece):
            channel.send_encoded(whole[at : at + piece])
            await channel.drain(1.0)
        await channel.close()
        await over.wait()

    assert serve(listen, client) == [] and taken == sent


def test_a_message_that_cannot_be_taken_ends_its_connection() -> None:
    async def listen(channel: Channel) -> None:
        def take(message: dict[str, Any]) -> None:
            raise KeyError(message["kind"])

        with contextlib.suppress(KeyError):
            await channel.deliver(take)

    async def client(port: int) -> None:
        channel = await connect("127.0.0.1", port, SECRET, {}, timeout_s=5.0)
        channel.send({"kind": "odd"})
        with pytest.raises(ChannelClosed):
            await channel.receive()

    assert serve(listen, client) == []


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_others_can_connect_at_either_kind_of_address(host: str) -> None:
    with listening_at(host) as server, socket.create_connection(server.getsockname()[:2]) as client:
        accepted, _ = server.accept()
        with accepted:
            accepted.sendall(b"here")
            assert client.recv(4) == b"here"


@settings(max_examples=20, deadline=None)
@given(st.binary(min_size=1, max_size=200))
def test_garbage_on_the_listener_closes_that_connection_and_nothing_else(garbage: bytes) -> None:
    async def client(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(garbage)
        writer.write_eof()
        await reader.read()
        writer.close()
        channel = await connect("127.0.0.1", port, SECRET, {}, timeout_s=5.0)
        channel.send({})
        assert (await channel.receive())["got"] == {}
        await channel.close()

    assert len(serve(echo, client)) == 1


def test_a_stranger_learns_nothing_and_is_refused() -> None:
    async def client(port: int) -> None:
        with pytest.raises(HandshakeRefused):
            await connect("127.0.0.1", port, OTHER, {}, timeout_s=5.0)

    assert len(serve(echo, client)) == 1


def test_the_blocking_side_speaks_the_same_handshake() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        identities: list[dict[str, Any]] = []

        def accept_two() -> None:
            for _ in range(2):
                sock, _ = server.accept()
                try:
                    identities.append(accept_socket(sock, SECRET, timeout_s=5.0))
                    FrameSocket(sock).send({"welcome": True})
                except ConnectionError:
                    continue

        thread = threading.Thread(target=accept_two)
        thread.start()
        address = ("127.0.0.1", server.getsockname()[1])
        with pytest.raises((HandshakeRefused, ConnectionError)):
            connect_socket(address, OTHER, {}, timeout_s=5.0)
        with connect_socket(address, SECRET, {"rank": 3}, timeout_s=5.0) as sock:
            assert FrameSocket(sock).receive() == {"welcome": True}
        thread.join(10.0)
    assert identities == [{"rank": 3}]


def test_a_secret_that_others_can_read_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "secret").chmod(0o600)
    assert len(read_secret(tmp_path)) == 32
    (tmp_path / "secret").chmod(0o640)
    with pytest.raises(ValueError, match="chmod 600"):
        read_secret(tmp_path)
