"""Strangers on the leaver's hand-over port, silent or talking nonsense, do not keep the joiner out."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest
import torch

from tm_slurm.control import FrameSocket
from tm_slurm.control.handshake import PROTOCOL_VERSION
from tm_slurm.runtime import handover
from tm_slurm.runtime.handover import Incoming, Outgoing
from tm_slurm.runtime.limits import TransferLimits
from tm_slurm.state import capture

SECRET = b"s" * 32


def build() -> dict[str, Any]:
    return {"model": torch.nn.Linear(3, 2)}


def silent(address: tuple[str, int]) -> socket.socket:
    return socket.create_connection(address, timeout=5.0)


def nonsense(address: tuple[str, int]) -> socket.socket:
    sock = socket.create_connection(address, timeout=5.0)
    frames = FrameSocket(sock)
    frames.send({"v": PROTOCOL_VERSION, "nonce": "é"})
    frames.receive()
    frames.send({"proof": "é"})
    return sock


@pytest.mark.parametrize("stranger", [silent, nonsense])
def test_a_stranger_does_not_keep_the_joiner_out(stranger: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "HANDSHAKE_TIMEOUT_S", 0.3)
    ours, theirs = build(), build()
    outgoing = Outgoing(host="127.0.0.1", secret=SECRET, rank=1, epoch=4, limits=TransferLimits())
    outgoing.give_layout(capture(ours, 9))
    address = ("127.0.0.1", outgoing.source[1])
    with stranger(address):
        incoming = Incoming(
            sources=[address], secret=SECRET, rank=1, epoch=4, state=theirs, limits=TransferLimits()
        )
        incoming.prepare()
        sending = threading.Thread(target=lambda: outgoing.send(capture(ours, 9)))
        sending.start()
        assert incoming.receive().step == 9
        sending.join(10.0)
    assert torch.equal(ours["model"].weight, theirs["model"].weight)
    incoming.close()
    outgoing.close()
