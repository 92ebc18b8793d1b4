"""A transfer takes about as long as the same bytes through raw sockets; thousands of tensors cost little.

The limits are loose, because the machine that runs this may be busy; measured figures are beside them.
"""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from state_examples import connected

from tm_slurm.state import Receiver, Sender, StateError, capture, digest, raw_rate, receive_raw, send_raw

torch.set_num_threads(1)


def transfers(source: dict[str, Any], target: dict[str, Any], count: int) -> list[float]:
    """Seconds of each pause, capturing included, after one preparation."""
    seconds = []
    with connected() as (senders, receivers), ThreadPoolExecutor(1) as pool:
        sender, receiver = Sender(senders), Receiver(receivers, target)
        ready = pool.submit(receiver.prepare, timeout_s=30)
        sender.prepare(capture(source, 0), timeout_s=30)
        ready.result(30)
        for step in range(count):
            received = pool.submit(receiver.receive, timeout_s=30)
            began = time.perf_counter()
            assert sender.send(capture(source, step), timeout_s=30).prepared
            seconds.append(time.perf_counter() - began)
            assert received.result(30).step == step
    return seconds


def stepped(model: torch.nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.01)
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def test_a_hundred_megabytes_move_at_about_the_rate_of_raw_sockets() -> None:
    source, target = (
        stepped(torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)])) for _ in range(2)
    )
    size = capture(source, 0).nbytes
    ratios = []
    for _ in range(3):
        raw_s = size / raw_rate(size)
        ratios.append(min(transfers(source, target, 2)) / raw_s)
    assert digest(source) == digest(target)
    assert statistics.median(ratios) < 2.0, ratios  # measured: 1.15


def test_ten_megabytes_take_a_few_milliseconds() -> None:
    source, target = (
        stepped(torch.nn.Sequential(*[torch.nn.Linear(144, 144) for _ in range(42)])) for _ in range(2)
    )
    assert 9e6 < capture(source, 0).nbytes < 12e6
    seconds = transfers(source, target, 8)
    assert min(seconds) < 0.05, seconds  # measured: 0.006


def test_twenty_thousand_small_tensors_stay_fast() -> None:
    def many(value: float) -> dict[str, Any]:
        module = torch.nn.Module()
        for number in range(20_000):
            module.register_buffer(f"b{number}", torch.full((10,), value + number))
        return {"model": module}

    source, target = many(0.5), many(0.0)
    seconds = transfers(source, target, 3)
    assert digest(source) == digest(target)
    assert min(seconds) < 0.5, seconds  # measured: 0.05


def test_both_halves_of_the_raw_rate_agree_between_processes() -> None:
    with connected(2) as (senders, receivers), ThreadPoolExecutor(1) as pool:
        received = pool.submit(receive_raw, receivers, 8_000_001, timeout_s=20)
        sent_rate = send_raw(senders, 8_000_001, timeout_s=20)
        assert 1e6 < received.result(20) < 1e12 and 1e6 < sent_rate < 1e12
        with pytest.raises(StateError, match=r"the other half.*0\.1 s"):
            send_raw(senders, 1000, timeout_s=0.1)
