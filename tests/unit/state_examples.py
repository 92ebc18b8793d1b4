"""What the tests of tm_slurm.state share: connected ends, a transfer in one process, states to move."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from tm_slurm.state import Receiver, ReceiveReport, Sender, SendReport, capture

Ends = tuple[list[socket.socket], list[socket.socket]]


@contextlib.contextmanager
def connected(count: int = 1) -> Iterator[Ends]:
    """`count` TCP connections over loopback: the sender's sockets and the receiver's."""
    with socket.create_server(("127.0.0.1", 0), backlog=count) as server:
        senders = [socket.create_connection(server.getsockname(), timeout=5) for _ in range(count)]
        receivers = [server.accept()[0] for _ in range(count)]
    for sock in senders:
        sock.settimeout(None)
    try:
        yield senders, receivers
    finally:
        for sock in (*senders, *receivers):
            sock.close()


def move(
    source: Mapping[str, Any],
    target: Mapping[str, Any],
    *,
    step: int = 7,
    connections: int = 1,
    prepare: bool = True,
    timeout_s: float = 20.0,
) -> tuple[SendReport, ReceiveReport]:
    """Moves `source` into `target`, the receiving side in a thread of its own."""
    with connected(connections) as (senders, receivers), ThreadPoolExecutor(1) as pool:
        sender, receiver = Sender(senders), Receiver(receivers, target)
        if prepare:
            ready = pool.submit(receiver.prepare, timeout_s=timeout_s)
            sender.prepare(capture(source, step), timeout_s=timeout_s)
            ready.result(timeout_s)
        received = pool.submit(receiver.receive, timeout_s=timeout_s)
        sent = sender.send(capture(source, step), timeout_s=timeout_s)
        return sent, received.result(timeout_s)


def training(seed: int, steps: int, make_optimizer: Any = None, width: int = 24) -> dict[str, Any]:
    """A small model with dropout and running statistics, optimizer, schedule and generator, after steps."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(width, 2 * width),
        torch.nn.BatchNorm1d(2 * width),
        torch.nn.GELU(),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(2 * width, width),
    )
    optimizer = (make_optimizer or torch.optim.AdamW)(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    state = {
        "model": model,
        "optimizer": optimizer,
        "schedule": schedule,
        "noise": torch.Generator().manual_seed(seed),
        "name": "not state",
    }
    for _ in range(steps):
        train(state)
    return state


def train(state: Mapping[str, Any]) -> float:
    """One step on random data, drawn from two generators."""
    model, optimizer = state["model"], state["optimizer"]
    width = next(model.parameters()).shape[1]
    data = torch.randn(8, width, generator=state["noise"]) + torch.randn(8, width)
    optimizer.zero_grad()
    loss = (model(data) - data).square().mean()
    loss.backward()
    optimizer.step()
    state["schedule"].step()
    return float(loss.detach())


def same(left: Any, right: Any) -> bool:
    """Equal in type and in every bit, all the way down."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return struct.pack("d", left) == struct.pack("d", right)
    if isinstance(left, complex):
        return struct.pack("dd", left.real, left.imag) == struct.pack("dd", right.real, right.imag)
    if isinstance(left, np.ndarray | np.generic):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, torch.Tensor):
        same_kind = left.dtype == right.dtype and left.shape == right.shape
        return same_kind and _bits(left) == _bits(right)
    if isinstance(left, OrderedDict | dict | Counter):
        return len(left) == len(right) and all(
            same(a, b) and same(left[a], right[b]) for a, b in zip(left, right, strict=True)
        )
    if isinstance(left, deque) and left.maxlen != right.maxlen:
        return False
    if isinstance(left, list | tuple | deque):
        return same_items(left, right)
    return bool(left == right)


def same_items(left: Sequence[Any] | deque[Any], right: Sequence[Any] | deque[Any]) -> bool:
    return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
