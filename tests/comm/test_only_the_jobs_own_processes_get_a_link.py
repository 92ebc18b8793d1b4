"""Strangers, other jobs, wrong ranks, fenced-off leavers are refused; early joiners wait for their turn."""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
import threading

import pytest
from one_process import JOB, SECRET, all_reduce, endpoint, peer, world

from tm_slurm import comm


def dialling(as_rank: int, to: comm.Endpoint, **options: object) -> comm.Endpoint:
    """An endpoint that claims to be `as_rank` of a world of two in which `to` is rank 0."""
    of = endpoint(**options)
    of.configure(rank=as_rank, epoch=0, term=1, peers={0: peer(to), as_rank: peer(of)})
    return of


@pytest.mark.parametrize(
    ("options", "rank", "reason"),
    [
        ({"secret": b"another secret of 32 bytes ......"}, 1, "secret"),
        ({"job": "job-2"}, 1, "another job"),
        ({"incarnation": 3}, 1, "stale"),
        ({"incarnation": 5}, 7, "no such rank"),
        ({"incarnation": 6}, 1, "stale"),  # not a newcomer: it speaks of no newer epoch
    ],
)
def test_the_wrong_process_is_refused_and_told_why(
    options: dict[str, object], rank: int, reason: str
) -> None:
    acceptor = endpoint()
    claimant = dialling(rank, acceptor, **options)
    try:
        acceptor.configure(
            rank=0, epoch=0, term=1, peers={0: peer(acceptor), 1: comm.Peer("127.0.0.1", 1, 5)}
        )
        with pytest.raises(comm.HandshakeRefused, match=reason) as refusal:
            claimant.dial(epoch=0, ranks=[0], timeout_s=0.5)
        assert f"rank 0 at 127.0.0.1:{acceptor.port}" in str(refusal.value)
        assert acceptor.linked() == []
    finally:
        acceptor.close()
        claimant.close()


def test_a_joiner_that_is_early_waits_until_the_stayer_prepares() -> None:
    with world(2) as w:
        joiner = w.joiner(1, epoch=1)
        dialled = threading.Thread(target=joiner.dial, kwargs={"epoch": 1, "ranks": [0], "timeout_s": 10})
        dialled.start()
        while w.endpoints[0].stats()["refused_early"] == 0:
            dialled.join(0.001)
        w.endpoints[0].prepare(epoch=1, changes={1: peer(joiner)})
        assert w.endpoints[0].wait_staged(epoch=1, ranks=[1], timeout_s=5)
        dialled.join(5)
        assert not dialled.is_alive()
        all_reduce(w.backends, 100)  # epoch 0 goes on meanwhile


def test_a_leaver_that_comes_back_is_refused_and_its_collectives_fail() -> None:
    with world(2) as w:
        all_reduce(w.backends, 10)
        old, old_backend = w.endpoints[1], w.backends[1]
        joiner = w.joiner(1, epoch=1)
        w.endpoints[0].prepare(epoch=1, changes={1: peer(joiner)})
        joiner.dial(epoch=1, ranks=[0], timeout_s=5)
        w.endpoints[0].switch(epoch=1)
        import torch

        with pytest.raises(comm.PeerLost) as lost:
            old_backend.allreduce([torch.ones(3)]).wait()
        assert lost.value.rank == 0
        with pytest.raises(comm.HandshakeRefused, match="stale"):
            old.dial(epoch=0, ranks=[0], timeout_s=2)


def test_garbage_on_the_listener_closes_only_that_connection() -> None:
    with world(2) as w:
        all_reduce(w.backends, 10)
        for garbage in (os.urandom(4096), b"GET / HTTP/1.1\r\n\r\n" * 10, b"\x00" * 40, b"\xff" * 1000):
            with socket.create_connection(("127.0.0.1", w.endpoints[0].port)) as stranger:
                stranger.settimeout(5)
                try:
                    stranger.sendall(garbage)
                    while stranger.recv(4096):
                        pass
                except ConnectionError:
                    pass
        assert w.endpoints[0].stats()["refused_secret"] == 4
        with socket.create_connection(("127.0.0.1", w.endpoints[0].port)) as silent:
            silent.send(b"x")
            all_reduce(w.backends, 1000)
        all_reduce(w.backends, 100_000)


def test_a_flood_of_silent_connections_keeps_nobody_out() -> None:
    with world(2) as w:
        strangers = [socket.create_connection(("127.0.0.1", w.endpoints[0].port)) for _ in range(400)]
        all_reduce(w.backends, 1000)
        assert w.endpoints[0].stats()["greetings"] <= 256
        for stranger in strangers:
            stranger.close()


class RawLink:
    """Speaks the handshake by itself, to send what no endpoint would."""

    def __init__(self, to: comm.Endpoint, rank: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", to.port))
        self.socket.settimeout(5)
        magic = b"TMlink01"
        nonce = os.urandom(32)
        self.socket.sendall(magic + nonce)
        answer = self._exactly(40)
        assert answer[:8] == magic
        nonces = nonce + answer[8:]
        job = hashlib.sha256(JOB.encode()).digest()
        identity = job + struct.pack("<iiQQII", rank, 0, 0, 1, 0, 0)
        proof = hmac.digest(SECRET, b"tm dialler" + nonces + identity, "sha256")
        self.socket.sendall(identity + proof)
        verdict = self._exactly(4 + 64 + 32)
        expected = hmac.digest(SECRET, b"tm acceptor" + nonces + identity + verdict[:68], "sha256")
        assert hmac.compare_digest(expected, verdict[68:])  # the acceptor proves itself too
        assert verdict[:4] == b"\0\0\0\0"

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = self.socket.recv(count - len(data))
            assert piece, "closed"
            data += piece
        return data

    def closed_by_the_other_side(self) -> bool:
        try:
            while self.socket.recv(4096):
                pass
        except ConnectionError:
            pass
        return True


def frame(kind: int, length: int, total: int, magic: int = 0x314D5431, tag: int = 0) -> bytes:
    return struct.pack("<IB3xIIQQQ", magic, kind, 0, length, 1, tag, total)


@pytest.mark.parametrize(
    "bad",
    [
        frame(1, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF),  # an oversized length
        frame(1, 300_000, 300_000),
        frame(1, 10, 5),
        frame(1, 10, 100),  # a small message in pieces
        frame(9, 0, 0),
        frame(2, 8, 8),
        frame(3, 0, 1 << 40),  # an offer that is not point-to-point
        frame(1, 0, 1 << 62),
        frame(1, 0, 0, magic=0),
    ],
)
def test_a_bad_frame_closes_that_link_and_nothing_else(bad: bytes) -> None:
    acceptor = endpoint()
    try:
        acceptor.configure(
            rank=0, epoch=0, term=1, peers={0: peer(acceptor), 1: comm.Peer("127.0.0.1", 1, 0)}
        )
        link = RawLink(acceptor, rank=1)
        link.socket.sendall(frame(4, 0, 0))  # a ping is welcome
        link.socket.sendall(bad)
        assert link.closed_by_the_other_side()
        assert acceptor.stats()["bad_frames"] == 1
        assert acceptor.linked() == []
    finally:
        acceptor.close()
