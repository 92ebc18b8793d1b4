"""A transfer that goes wrong is a StateError on both sides, in time, and allocates nothing unchecked."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
import tracemalloc
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from state_examples import connected, move, training

from tm_slurm.state import Receiver, Sender, StateError, StateRefused, capture, receive, send
from tm_slurm.state.blocks import plan_streams
from tm_slurm.state.connection import LAYOUT, STATE
from tm_slurm.state.layout import layout_of, read_layout

torch.set_num_threads(1)

GREETING = struct.pack(">8sIIII", b"tmstate\x02", 0, 1, 0, 1)


def model(width: int = 8) -> dict[str, Any]:
    return {"model": torch.nn.Linear(width, width)}


def message(kind: int, content: Any, size: int | None = None) -> bytes:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return struct.pack(">BI", kind, len(text) if size is None else size) + text


class Through:
    """A connection with somebody in the middle, who passes `change(sender's bytes so far, part)` on."""

    def __init__(self, change: Callable[[int, bytearray], bytes | None]) -> None:
        self._change = change

    def run(self, source: Mapping[str, Any], target: Mapping[str, Any]) -> tuple[Future[Any], Future[Any]]:
        with connected() as (senders, near), connected() as (far, receivers), ThreadPoolExecutor(4) as pool:
            sent = pool.submit(send, senders, capture(source, 1), timeout_s=10)
            received = pool.submit(receive, receivers, target, timeout_s=10)
            pool.submit(self._pump, near[0], far[0], self._change)
            pool.submit(self._pump, far[0], near[0], lambda _, part: bytes(part))
            for future in (sent, received):
                future.exception(15)
        return sent, received

    @staticmethod
    def _pump(
        source: socket.socket, sink: socket.socket, change: Callable[[int, bytearray], bytes | None]
    ) -> None:
        done = 0
        while part := source.recv(1 << 16):
            changed = change(done, bytearray(part))
            done += len(part)
            if changed is None:
                break
            sink.sendall(changed)
        for sock in (source, sink) if part else (sink,):
            sock.shutdown(socket.SHUT_WR)


def test_a_flipped_bit_is_found_and_both_sides_hear_of_it() -> None:
    source, target = model(512), model(512)  # a megabyte of weights: past all headers

    def flip(done: int, part: bytearray) -> bytes:
        if done <= 500_000 < done + len(part):
            part[500_000 - done] ^= 0x10
        return bytes(part)

    sent, received = Through(flip).run(source, target)
    assert isinstance(received.exception(), StateError)
    assert "model/weight" in str(received.exception()) and "checksum" in str(received.exception())
    assert isinstance(sent.exception(), StateRefused) and "checksum" in str(sent.exception())


def test_a_flipped_bit_in_a_small_tensor_is_found() -> None:
    source, target = model(4), model(4)

    def flip(done: int, part: bytearray) -> bytes:
        place = part.find(capture(source, 0).tensors[0].local.detach().numpy().tobytes())
        if place >= 0:
            part[place + 3] ^= 1
        return bytes(part)

    sent, received = Through(flip).run(source, target)
    assert "2 small tensors" in str(received.exception())
    assert isinstance(sent.exception(), StateRefused)


def test_a_stream_that_ends_early_is_an_error_at_once() -> None:
    began = time.monotonic()
    sent, received = Through(lambda done, part: bytes(part) if done < 500_000 else None).run(
        model(512), model(512)
    )
    assert "closed the connection" in str(received.exception())
    assert isinstance(sent.exception(), StateError)
    assert time.monotonic() - began < 5


def test_a_silent_sender_is_an_error_after_the_timeout() -> None:
    with connected() as (_, receivers):
        began = time.monotonic()
        with pytest.raises(StateError, match=r"0\.2 s"):
            receive(receivers, model(), timeout_s=0.2)
        assert 0.2 <= time.monotonic() - began < 2


def test_a_trickling_sender_is_an_error_after_the_timeout() -> None:
    with connected() as (senders, receivers), ThreadPoolExecutor(1) as pool:
        received = pool.submit(receive, receivers, model(), timeout_s=0.3)
        senders[0].sendall(GREETING + message(LAYOUT, b"", size=10_000))
        began = time.monotonic()
        while not received.done() and time.monotonic() - began < 5:
            with contextlib.suppress(OSError, TimeoutError):
                senders[0].send(b"t")  # each byte comes in time, the message never does
                received.exception(0.02)
        with pytest.raises(StateError, match=r"0\.3 s"):
            received.result(5)
        assert time.monotonic() - began < 2


def test_a_receiver_that_does_not_read_is_an_error_after_the_timeout() -> None:
    with connected() as (senders, _):
        began = time.monotonic()
        with pytest.raises(StateError, match=r"0\.2 s"):
            send(senders, capture(model(), 1), timeout_s=0.2)
        assert time.monotonic() - began < 3


def test_a_sender_that_vanishes_after_the_data_does_no_harm() -> None:
    source, target = model(), model()
    with connected() as (senders, receivers), ThreadPoolExecutor(1) as pool:
        received = pool.submit(receive, receivers, target, timeout_s=10)
        peer = senders[0]
        layout = layout_of(capture(source, 3))
        peer.sendall(GREETING + message(LAYOUT, layout.text))
        assert peer.recv(5)[0] == 2
        snapshot = capture(source, 3)
        content = {"fingerprint": layout.fingerprint, "step": 3, "tree": snapshot.tree, "generators": None}
        data = b"".join(named.local.detach().numpy().tobytes() for named in snapshot.tensors)
        peer.sendall(message(STATE, content) + data + xxhash.xxh3_64_digest(data))
        peer.recv(100)
        peer.shutdown(socket.SHUT_WR)
        report = received.result(10)
    assert report.step == 3 and not report.acknowledged
    assert torch.equal(source["model"].weight, target["model"].weight)


HUGE = 1 << 40


@pytest.mark.parametrize(
    "row",
    [
        ["optimizer/state.0.x", "float32", [HUGE], None, 1, "cpu", "", 0],
        ["optimizer/state.0.x", "float32", [1 << 20, 1 << 20], None, 1, "cpu", "", 0],
        ["optimizer/state.0.x", "float32", [1 << 47, 1 << 47, 1 << 47], None, 1, "cpu", "", 0],
        ["optimizer/state.0.x", "float32", [-1], None, 1, "cpu", "", 0],
        ["optimizer/state.0.x", "float32", [2, 2], [1 << 40, 1], 1, "cpu", "", 0],
        ["optimizer/state.0.x", "float32", [2, 2], [0, 1], 1, "cpu", "", 0],
        ["optimizer/state.0.x", "float32", [1.5], None, 1, "cpu", "", 0],
        ["optimizer/state.0.x", "float32", "12", None, 1, "cpu", "", 0],
        ["optimizer/state.0.x", "float32", [True], None, 1, "cpu", "", 0],
        ["optimizer/state.0.x", "qint8", [2], None, 1, "cpu", "", 0],
        ["optimizer/state.0.x", "object", [2], None, 1, "cpu", "", 0],
        ["optimizer/state.0.x", ["float32"], [2], None, 1, "cpu", "", 0],
        ["optimizer/state.0.x", "float32", [2], None, 9, "cpu", "", 0],
        ["optimizer/state.0.x", "float32", [2], None, -1, "cpu", "", 0],
        ["optimizer/state.0.x", "float32", [2], None, 1, "cpu", "Fancy", 0],
        ["optimizer/state.0.x", "float32", [2], None, 1, "cpu", "dtensor", 0],
        [7, "float32", [2], None, 1, "cpu", "", 0],
        ["optimizer/state.0.x", "float32", [2]],
        ["model/0.weight", "float64", [48, 24], None, 0, "cpu", "", -1],
        ["model/other", "float32", [48, 24], None, 0, "cpu", "", -1],
        ["data/x", "uint8", [HUGE], None, 3, "cpu", "", -1],
        "row",
        None,
    ],
    ids=lambda row: json.dumps(row)[:60],
)
def test_a_hostile_layout_allocates_nothing_and_is_refused(row: Any) -> None:
    target = training(2, 0)
    layout = json.loads(layout_of(capture(target, 0)).text)
    layout["pieces"].append(row)
    refused_without_allocation(target, message(LAYOUT, layout))


@pytest.mark.parametrize(
    "raw",
    [
        message(LAYOUT, b"", size=0xFFFFFFFF),
        message(STATE, b"", size=0xFFFFFFFF),
        message(99, b"{}"),
        message(LAYOUT, b"not json"),
        message(LAYOUT, b"[" * 200_000),
        message(LAYOUT, b"[]"),
        message(LAYOUT, {}),
        message(LAYOUT, {"kinds": {}, "pieces": [], "aliases": []}),
        message(LAYOUT, {"kinds": [], "pieces": {}, "aliases": 3}),
        message(LAYOUT, {"kinds": {"model": "pickle"}, "pieces": [], "aliases": []}),
        message(LAYOUT, b'{"kinds": {"model": ' + b"9" * 10_000 + b"}}"),
        message(STATE, {"fingerprint": "0" * 32, "step": 1, "tree": {}}),
        message(2, b"ready"),
        b"\x80\x04\x95" + b"\0" * 64,
    ],
    ids=lambda raw: repr(raw[:40]),
)
def test_hostile_messages_are_refused(raw: bytes) -> None:
    refused_without_allocation(training(2, 0), raw)


def refused_without_allocation(target: dict[str, Any], raw: bytes) -> None:
    before = [(named.name, named.local.detach().clone()) for named, _ in capture(target, 0).all_tensors()]
    with connected() as (senders, receivers), ThreadPoolExecutor(1) as pool:
        received = pool.submit(receive, receivers, target, timeout_s=5)
        tracemalloc.start()
        senders[0].sendall(GREETING + raw)
        senders[0].shutdown(socket.SHUT_WR)
        error = received.exception(10)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert isinstance(error, StateError)
    assert peak < 32 << 20
    for (name, value), (named, _) in zip(before, capture(target, 0).all_tensors(), strict=True):
        assert name == named.name and torch.equal(value, named.local)


def test_another_protocol_is_refused() -> None:
    with connected() as (senders, receivers):
        senders[0].sendall(b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n")
        with pytest.raises(StateError, match="not a state transfer"):
            receive(receivers, model(), timeout_s=5)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(st.sampled_from(["kinds", "pieces", "aliases", "model"]), inner)
        ),
        max_leaves=12,
    )
)
@settings(max_examples=300, deadline=None)
def test_any_json_as_a_layout_is_a_layout_or_a_state_error(content: Any) -> None:
    with contextlib.suppress(StateError):
        read_layout(json.dumps(content).encode())


def test_what_may_be_allocated_has_a_limit() -> None:
    source, target = training(1, 1), training(2, 0)
    needed = capture(source, 0).nbytes - capture(target, 0).nbytes
    with connected() as (senders, receivers), ThreadPoolExecutor(1) as pool:
        received = pool.submit(receive, receivers, target, timeout_s=5, max_bytes=needed - 1)
        with pytest.raises(StateRefused, match="max_bytes"):
            send(senders, capture(source, 1), timeout_s=5)
        assert isinstance(received.exception(5), StateError)
    with connected() as (senders, receivers), ThreadPoolExecutor(1) as pool:
        received = pool.submit(receive, receivers, target, timeout_s=5, max_bytes=needed)
        send(senders, capture(source, 1), timeout_s=5)
        assert received.result(5).allocated_bytes == needed


def linear(*shape: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return {"model": torch.nn.Linear(*shape, dtype=dtype)}


def optimized(groups: int) -> dict[str, Any]:
    layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(2))
    parts = [{"params": layer.parameters()} for layer in layers] if groups == 2 else layers.parameters()
    return {"model": layers, "optimizer": torch.optim.SGD(parts, lr=0.1)}


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (linear(3, 4), linear(4, 3), r"model/weight: float32 \[4, 3\] at the sender, float32 \[3, 4\] here"),
        (linear(3, 4), linear(3, 4, dtype=torch.float64), r"model/weight: float32 .* float64"),
        (linear(3, 4), {"model": torch.nn.Linear(3, 4, bias=False)}, r"model/bias: the sender has it"),
        ({"model": torch.nn.Linear(3, 4, bias=False)}, linear(3, 4), r"model/bias: this rank has it"),
        (
            linear(3, 4),
            linear(3, 4) | {"extra": torch.Generator()},
            r"'extra': nothing at the sender, generator here",
        ),
        (
            linear(3, 4) | {"x": torch.Generator()},
            linear(3, 4) | {"x": torch.nn.ReLU()},
            r"'x': generator at the",
        ),
        (
            optimized(2),
            optimized(1),
            r"optimizer: parameters per group are \[2, 2\] at the sender, \[4\] here",
        ),
    ],
)
def test_different_objects_are_refused_by_name(source: Any, target: Any, expected: str) -> None:
    with pytest.raises(StateRefused, match=expected):
        move(source, target)


class Broken:
    def state_dict(self) -> dict[str, int]:
        return {"position": 1}

    def load_state_dict(self, state: Any) -> None:
        raise OverflowError("no such position")


def test_an_object_that_refuses_its_state_is_named_on_both_sides() -> None:
    with pytest.raises(
        StateRefused, match=r"data: its load_state_dict\(\) failed with OverflowError: no such"
    ):
        move({"data": Broken()}, {"data": Broken()})


def test_a_different_number_of_connections_is_refused() -> None:
    with connected(2) as (senders, receivers), ThreadPoolExecutor(1) as pool:
        sender = pool.submit(Sender(senders).prepare, capture(model(), 1), timeout_s=3)
        with pytest.raises(StateError, match="the sender uses 2 connections, 1 given here"):
            Receiver(receivers[:1], model()).prepare(timeout_s=3)
        assert isinstance(sender.exception(5), StateError)


@given(
    st.lists(st.one_of(st.integers(0, 100), st.integers(0, 1 << 16), st.integers(0, 9 << 20))),
    st.integers(1, 8),
)
@settings(deadline=None)
def test_every_byte_is_in_exactly_one_block(sizes: list[int], streams: int) -> None:
    spread = plan_streams(sizes, streams)
    covered = [0] * len(sizes)
    for block in (block for blocks in spread for block in blocks):
        if len(block.pieces) > 1:
            assert (block.start, block.stop) == (0, sum(sizes[piece] for piece in block.pieces))
            for piece in block.pieces:
                assert covered[piece] == 0
                covered[piece] = sizes[piece]
        else:
            assert covered[block.pieces[0]] == block.start
            covered[block.pieces[0]] = block.stop
    assert len(spread) == streams and covered == sizes
    loads = [sum(block.nbytes for block in blocks) for blocks in spread]
    assert max(loads) - min(loads) <= 4 << 20
