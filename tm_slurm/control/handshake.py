"""Mutual proof of the job's secret, without sending it: an HMAC-SHA-256 challenge in three frames.

    dialler  → {v, identity…, nonce}
    acceptor → {nonce, proof}      proof over both nonces and the dialler's first frame, labelled "acceptor"
    dialler  → {proof}             the same, labelled "dialler"

The labels keep one side's proof from being played back as the other's; the nonces keep an old proof from
being used again. The steps here know nothing of sockets or asyncio; `connect_socket` and `accept_socket`
drive them over blocking sockets, `tm_slurm.control.channel` over asyncio.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
from pathlib import Path

from tm_slurm.control.frames import MAX_HELLO_BYTES, FrameError, FrameSocket, Message

PROTOCOL_VERSION = 1
SECRET_BYTES = 32
_NONCE_BYTES = 32


class HandshakeRefused(ConnectionError):
    """The peer does not know the job's secret, or speaks another version of the protocol."""


def read_secret(job_dir: Path) -> bytes:
    """The job's secret. ValueError when the file is readable by others or too short to be one."""
    path = job_dir / "secret"
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise ValueError(f"{path} has mode {mode:04o}: others could read it. Run: chmod 600 {path}")
    secret = path.read_bytes()
    if len(secret) < SECRET_BYTES:
        raise ValueError(
            f"{path} holds {len(secret)} bytes, expected {SECRET_BYTES}: remove it and submit again"
        )
    return secret


def _proof(secret: bytes, label: str, hello: Message, acceptor_nonce: str) -> str:
    text = json.dumps([label, hello, acceptor_nonce], sort_keys=True, separators=(",", ":"))
    return hmac.new(secret, text.encode(), "sha256").hexdigest()


def _same(expected: str, claimed: object) -> bool:
    return hmac.compare_digest(expected.encode(), str(claimed).encode(errors="surrogatepass"))


class Dialler:
    """The side that opened the connection. `identity` is what it says about itself; the proof covers it."""

    def __init__(self, secret: bytes, identity: Message) -> None:
        self._secret = secret
        self.hello: Message = {**identity, "v": PROTOCOL_VERSION, "nonce": secrets.token_hex(_NONCE_BYTES)}

    def answer(self, challenge: Message) -> Message:
        """The third frame, once the acceptor has proved itself; HandshakeRefused when it has not."""
        if "refused" in challenge:
            raise HandshakeRefused(f"the peer refused: {str(challenge['refused'])[:200]}")
        nonce = str(challenge.get("nonce", ""))
        expected = _proof(self._secret, "acceptor", self.hello, nonce)
        if not _same(expected, challenge.get("proof")):
            raise HandshakeRefused("the peer does not know this job's secret")
        return {"proof": _proof(self._secret, "dialler", self.hello, nonce)}


class Acceptor:
    """The side that was connected to."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._nonce = secrets.token_hex(_NONCE_BYTES)
        self._hello: Message = {}

    def challenge(self, hello: Message) -> Message:
        """The second frame. HandshakeRefused when the peer speaks another version."""
        if hello.get("v") != PROTOCOL_VERSION:
            raise HandshakeRefused(
                f"the peer speaks protocol version {hello.get('v')!r}, this side {PROTOCOL_VERSION}: "
                "use the same tm_slurm on all nodes"
            )
        self._hello = hello
        return {"nonce": self._nonce, "proof": _proof(self._secret, "acceptor", hello, self._nonce)}

    def verify(self, answer: Message) -> Message:
        """The identity that the peer has proved; HandshakeRefused when the proof is wrong."""
        expected = _proof(self._secret, "dialler", self._hello, self._nonce)
        if not _same(expected, answer.get("proof")):
            raise HandshakeRefused("the peer does not know this job's secret")
        return {key: value for key, value in self._hello.items() if key not in {"v", "nonce"}}


def connect_socket(
    address: tuple[str, int], secret: bytes, identity: Message, *, timeout_s: float
) -> socket.socket:
    """A connected, mutually proved blocking socket. HandshakeRefused, OSError or TimeoutError otherwise."""
    sock = socket.create_connection(address, timeout=timeout_s)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        frames = FrameSocket(sock)
        dialler = Dialler(secret, identity)
        frames.send(dialler.hello)
        frames.send(dialler.answer(frames.receive(MAX_HELLO_BYTES)))
    except BaseException:
        sock.close()
        raise
    return sock


def accept_socket(sock: socket.socket, secret: bytes, *, timeout_s: float) -> Message:
    """Make the dialler on `sock` prove itself and return its identity; the socket is closed when it does
    not."""
    try:
        sock.settimeout(timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        frames = FrameSocket(sock)
        acceptor = Acceptor(secret)
        try:
            frames.send(acceptor.challenge(frames.receive(MAX_HELLO_BYTES)))
            return acceptor.verify(frames.receive(MAX_HELLO_BYTES))
        except (HandshakeRefused, FrameError) as error:
            raise HandshakeRefused(str(error)) from None
    except BaseException:
        sock.close()
        raise
