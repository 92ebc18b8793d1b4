"""A joiner takes its state from several replicas at once, each giving its share; any that fails is named."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from state_examples import connected, train, training

from tm_slurm.state import (
    Receiver,
    ReceiveReport,
    Sender,
    SendReport,
    StateError,
    StateRefused,
    capture,
    digest,
)
from tm_slurm.state.blocks import BLOCK_BYTES, plan_streams

torch.set_num_threads(1)

State = dict[str, Any]
Ends = list[tuple[list[socket.socket], list[socket.socket]]]


@contextlib.contextmanager
def several(sources: int, connections: int = 1) -> Iterator[Ends]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(connected(connections)) for _ in range(sources)]


def start(
    pool: ThreadPoolExecutor, ends: Ends, sources: list[State], target: State, steps: list[int]
) -> tuple[list[Future[SendReport]], Future[ReceiveReport]]:
    count = len(sources)
    names = [f"rank {number}" for number in range(count)]
    receiver = Receiver.of_sources([end[1] for end in ends], target, names=names)
    sent = [
        pool.submit(Sender(end[0], share=(number, count)).send, capture(state, step), timeout_s=15)
        for number, (end, state, step) in enumerate(zip(ends, sources, steps, strict=True))
    ]
    return sent, pool.submit(receiver.receive, timeout_s=15)


def large(seed: int) -> State:
    """A few megabytes: one tensor of many blocks, and many small ones."""
    state = training(seed, 1)
    torch.manual_seed(seed)
    model = torch.nn.ModuleList([torch.nn.Linear(1500, 1000), *[torch.nn.Linear(8, 8) for _ in range(50)]])
    return state | {"large": model}


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("connections", [1, 2])
def test_the_state_is_whole_and_everyone_gives_a_share(count: int, connections: int) -> None:
    sources, target = [large(1) for _ in range(count)], large(2)
    with several(count, connections) as ends, ThreadPoolExecutor(count + 1) as pool:
        sent, received = start(pool, ends, sources, target, [7] * count)
        report = received.result(20)
        shares = [future.result(20).bytes for future in sent]
    assert report.step == 7 and report.acknowledged and report.connections == count * connections
    assert sum(shares) == report.bytes == capture(sources[0], 0).nbytes
    assert max(shares) - min(shares) <= 2 * BLOCK_BYTES
    assert digest(target) == digest(sources[0])


def test_what_is_private_comes_from_the_first_source() -> None:
    sources, target = [training(1, 2), training(1, 2)], training(2, 0)
    sources[1]["noise"].manual_seed(99)
    first = digest(sources[0])
    with several(2) as ends, ThreadPoolExecutor(3) as pool:
        ends.reverse()  # whoever was accepted first
        names = ["rank 1", "rank 0"]
        receiver = Receiver.of_sources([end[1] for end in ends], target, names=names)
        for number, state in enumerate(sources):
            pool.submit(Sender(ends[1 - number][0], share=(number, 2)).send, capture(state, 3), timeout_s=15)
        assert receiver.receive(timeout_s=15).step == 3
    assert digest(target) == first != digest(sources[1])


def test_tensors_that_do_not_lie_in_a_row_are_put_together_from_all_shares() -> None:
    def build(value: float) -> State:
        module = torch.nn.Module()
        big = torch.arange(3_000_000.0).mul(value).reshape(1500, 2000)
        module.register_buffer("gaps", torch.cat([big, big], 1)[:, ::2])
        module.register_buffer("spread", torch.full((1, 3), value).expand(400, 3))
        return {"module": module}

    sources, target = [build(1.5), build(1.5), build(1.5)], build(0.5)
    with several(3) as ends, ThreadPoolExecutor(4) as pool:
        _, received = start(pool, ends, sources, target, [1, 1, 1])
        received.result(20)
    assert digest(target) == digest(sources[0])


def test_the_layout_is_agreed_on_with_all_before_the_pause() -> None:
    sources, target = [training(1, 1), training(1, 1)], training(2, 1)
    with several(2) as ends, ThreadPoolExecutor(3) as pool:
        senders = [Sender(end[0], share=(number, 2)) for number, end in enumerate(ends)]
        receiver = Receiver.of_sources([end[1] for end in ends], target)
        ready = pool.submit(receiver.prepare, timeout_s=15)
        prepared = [
            pool.submit(sender.prepare, capture(state, 0), timeout_s=15)
            for sender, state in zip(senders, sources, strict=True)
        ]
        for future in (ready, *prepared):
            future.result(20)
        train(target)  # a shadow step
        for step in (1, 2):
            received = pool.submit(receiver.receive, timeout_s=15)
            sent = [
                pool.submit(sender.send, capture(state, step), timeout_s=15)
                for sender, state in zip(senders, sources, strict=True)
            ]
            assert all(future.result(20).prepared for future in sent)
            assert received.result(20).prepared and received.result().step == step
            assert digest(target) == digest(sources[0])


def test_a_layout_that_changed_at_all_of_them_is_agreed_on_again() -> None:
    sources, target = [training(1, 0), training(1, 0)], training(2, 0)
    with several(2) as ends, ThreadPoolExecutor(3) as pool:
        senders = [Sender(end[0], share=(number, 2)) for number, end in enumerate(ends)]
        receiver = Receiver.of_sources([end[1] for end in ends], target)
        ready = pool.submit(receiver.prepare, timeout_s=15)
        for sender, state in zip(senders, sources, strict=True):
            pool.submit(sender.prepare, capture(state, 0), timeout_s=15)
        ready.result(20)
        generators = torch.get_rng_state()
        for state in sources:
            torch.set_rng_state(generators)
            train(state)  # now there is optimizer state
        received = pool.submit(receiver.receive, timeout_s=15)
        for sender, state in zip(senders, sources, strict=True):
            pool.submit(sender.send, capture(state, 1), timeout_s=15)
        assert received.result(20).step == 1
    assert digest(target) == digest(sources[0])


def test_sources_that_are_no_replicas_are_refused() -> None:
    cases = [
        ([training(1, 1), training(1, 0)], [1, 1], r"rank 1: its layout is not that of rank 0"),
        ([training(1, 1), training(1, 1)], [1, 2], r"rank 1: it is at step 2, rank 0 is at 1"),
    ]
    for sources, steps, what in cases:
        with several(2) as ends, ThreadPoolExecutor(3) as pool:
            sent, received = start(pool, ends, sources, training(2, 1), steps)
            with pytest.raises(StateError, match=what):
                received.result(20)
            for future in sent:
                with pytest.raises(StateRefused, match="rank 1"):
                    future.result(20)


@pytest.mark.parametrize(
    ("shares", "what"),
    [
        ([(0, 2), (0, 2)], "same share"),
        ([(0, 2), (1, 3)], "rank 1: the sender is one of 3"),
        ([(0, 1)] * 2, "one of 1"),
    ],
)
def test_shares_that_do_not_make_a_whole_are_refused(shares: list[tuple[int, int]], what: str) -> None:
    state, target = training(1, 1), training(2, 1)
    before = digest(target)
    with several(2) as ends, ThreadPoolExecutor(3) as pool:
        receiver = Receiver.of_sources([end[1] for end in ends], target, names=["rank 0", "rank 1"])
        sent = [
            pool.submit(Sender(end[0], share=share).send, capture(state, 1), timeout_s=15)
            for end, share in zip(ends, shares, strict=True)
        ]
        with pytest.raises(StateError, match=what):
            receiver.receive(timeout_s=15)
        for future in sent:
            with pytest.raises(StateError):
                future.result(20)
    assert digest(target) == before


def test_nonsense_is_a_value_error() -> None:
    with connected() as (senders, receivers):
        for share in ((1, 1), (-1, 2), (0, 0), (0, 65)):
            with pytest.raises(ValueError, match="share"):
                Sender(senders, share=share)
        with pytest.raises(ValueError, match="0 sources"):
            Receiver.of_sources([], {})
        with pytest.raises(ValueError, match="give each one name"):
            Receiver.of_sources([receivers], {}, names=["a", "b"])


class Through:
    """A connection with somebody in the middle who breaks off after so many bytes of the sender's."""

    def __init__(self, after: int) -> None:
        self.stack = contextlib.ExitStack()
        (self.near, near), (far, self.far) = (self.stack.enter_context(connected()) for _ in range(2))
        self.threads = [
            threading.Thread(target=self.pump, args=(near[0], far[0], after)),
            threading.Thread(target=self.pump, args=(far[0], near[0], 1 << 60)),
        ]
        for thread in self.threads:
            thread.start()

    @staticmethod
    def pump(source: socket.socket, sink: socket.socket, after: int) -> None:
        with contextlib.suppress(OSError):
            while after > 0 and (part := source.recv(min(after, 1 << 16))):
                sink.sendall(part)
                after -= len(part)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.stack.close()
        for thread in self.threads:
            thread.join(10)


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_a_source_that_dies_in_the_middle_is_named(dead: int) -> None:
    sources, target = [large(1) for _ in range(3)], large(2)
    through = Through(after=1_000_000)
    try:
        with several(3) as ends, ThreadPoolExecutor(4) as pool:
            ends[dead] = (through.near, through.far)
            began = time.monotonic()
            sent, received = start(pool, ends, sources, target, [1, 1, 1])
            with pytest.raises(StateError, match=rf"^rank {dead}: .*(closed|broke)"):
                received.result(20)
            for number, future in enumerate(sent):
                with pytest.raises(StateError) as error:
                    future.result(20)
                if number != dead:
                    assert f"rank {dead}: " in str(error.value)
            assert time.monotonic() - began < 10
        with several(2) as ends, ThreadPoolExecutor(3) as pool:  # again, from those who are left
            rest = [state for number, state in enumerate(sources) if number != dead]
            _, received = start(pool, ends, rest, target, [1, 1])
            assert received.result(20).step == 1
        assert digest(target) == digest(sources[0])
    finally:
        through.close()


def test_a_source_that_falls_silent_is_named_at_the_limit() -> None:
    state, target = training(1, 1), training(2, 1)
    with several(2) as ends, ThreadPoolExecutor(1) as pool:
        sender = Sender(ends[0][0], share=(0, 2))
        pool.submit(sender.send, capture(state, 1), timeout_s=15)
        greeting = Sender(ends[1][0], share=(1, 2))
        with pytest.raises(StateError):
            greeting.prepare(capture(state, 1), timeout_s=0.01)
        receiver = Receiver.of_sources([end[1] for end in ends], target, names=["rank 4", "rank 6"])
        began = time.monotonic()
        with pytest.raises(StateError, match=r"^rank 6: "):
            receiver.receive(timeout_s=0.5)
        assert time.monotonic() - began < 5


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.one_of(st.integers(0, 200), st.integers(0, 8 << 20)), max_size=30),
    sources=st.integers(1, 6),
    streams=st.integers(1, 4),
)
def test_shares_cover_every_byte_once_and_evenly(sizes: list[int], sources: int, streams: int) -> None:
    plans = [plan_streams(sizes, streams, (number, sources)) for number in range(sources)]
    blocks = [block for plan in plans for stream in plan for block in stream]
    assert blocks == [block for stream in plan_streams(sizes, 1) for block in stream]
    carried = [sum(block.nbytes for block in stream) for plan in plans for stream in plan]
    assert sum(carried) == sum(sizes)
    assert max(carried) - sum(sizes) / len(carried) <= BLOCK_BYTES
