"""How fast plain sockets are here and now: the floor that a transfer is measured against."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

import numpy as np

from tm_slurm.control import listening_at
from tm_slurm.state.blocks import BLOCK_BYTES
from tm_slurm.state.connection import Connection, Deadline
from tm_slurm.state.streams import in_parallel


def raw_rate(
    total_bytes: int, *, host: str = "127.0.0.1", connections: int = 1, timeout_s: float = 60.0
) -> float:
    """Bytes a second from memory to memory over TCP inside this host, over `connections` sockets at once."""
    with listening_at(host, backlog=connections) as server:
        server.settimeout(timeout_s)
        senders = [socket.create_connection(server.getsockname()[:2], timeout_s) for _ in range(connections)]
        receivers = [server.accept()[0] for _ in range(connections)]
    try:
        source, target = _memory(total_bytes), _memory(total_bytes)
        deadline = Deadline.after(timeout_s)
        sides = [Connection(sock) for sock in (*senders, *receivers)]

        def move(index: int, side: Connection) -> None:
            if index < connections:
                _send(side, _share(source, index, connections), deadline)
            else:
                _receive(side, _share(target, index - connections, connections), deadline)

        began = time.perf_counter()
        in_parallel(lambda index: move(index, sides[index]), sides)
        return total_bytes / (time.perf_counter() - began)
    finally:
        for sock in (*senders, *receivers):
            sock.close()


def send_raw(sockets: Sequence[socket.socket], total_bytes: int, *, timeout_s: float) -> float:
    """The sending half between two processes: sends, waits for the other half, answers bytes a second."""
    source, deadline = _memory(total_bytes), Deadline.after(timeout_s)
    sides = [Connection(sock) for sock in sockets]
    ready = bytearray(1)
    sides[0].receive_into(memoryview(ready), deadline, "the other half")
    began = time.perf_counter()
    in_parallel(lambda index: _send(sides[index], _share(source, index, len(sides)), deadline), sides)
    sides[0].receive_into(memoryview(ready), deadline, "the other half")
    return total_bytes / (time.perf_counter() - began)


def receive_raw(sockets: Sequence[socket.socket], total_bytes: int, *, timeout_s: float) -> float:
    """The receiving half between two processes: answers bytes a second."""
    target, deadline = _memory(total_bytes), Deadline.after(timeout_s)
    sides = [Connection(sock) for sock in sockets]
    sides[0].send(b"r", deadline, "the other half")
    began = time.perf_counter()
    in_parallel(lambda index: _receive(sides[index], _share(target, index, len(sides)), deadline), sides)
    seconds = time.perf_counter() - began
    sides[0].send(b"d", deadline, "the other half")
    return total_bytes / seconds


def _memory(total_bytes: int) -> memoryview:
    return np.ones(total_bytes, dtype=np.uint8).data  # written once, so that no page fault is timed


def _share(memory: memoryview, index: int, count: int) -> memoryview:
    return memory[len(memory) * index // count : len(memory) * (index + 1) // count]


def _send(connection: Connection, memory: memoryview, deadline: Deadline) -> None:
    for start in range(0, len(memory), BLOCK_BYTES):
        connection.send(memory[start : start + BLOCK_BYTES], deadline, "raw bytes")


def _receive(connection: Connection, memory: memoryview, deadline: Deadline) -> None:
    for start in range(0, len(memory), BLOCK_BYTES):
        connection.receive_into(memory[start : start + BLOCK_BYTES], deadline, "raw bytes")
