"""The tape is attached in the first steps only. Afterwards a collective costs what it costs in a process that
never had one."""

from __future__ import annotations

import statistics
import time

import torch
from one_process import World, all_reduce, world

from tm_slurm.comm._tm import Tape

CALLS, ROUNDS = 400, 30
ALLOWED = 1.05


def seconds_a_call(of: World, tensor: torch.Tensor) -> float:
    began = time.perf_counter()
    for _ in range(CALLS):
        of.backends[0].allreduce([tensor]).wait()
    return (time.perf_counter() - began) / CALLS


def test_what_was_recorded_is_the_outputs_in_order() -> None:
    with world(2) as pair:
        tape = Tape.recorder(1 << 20)
        pair.endpoints[0].attach(tape)
        assert pair.endpoints[0].has_tape and not pair.endpoints[1].has_tape
        first = all_reduce(pair.backends, 5)[0]
        tape.begin_step(0)
        second = all_reduce(pair.backends, 7)[0]
        pair.endpoints[0].attach(None)
        assert not pair.endpoints[0].has_tape
        all_reduce(pair.backends, 9)
        calls = tape.take()
    assert [(call[0], call[1], call[2], call[3]) for call in calls] == [
        (-1, "tm:all_reduce", 0, -1),
        (0, "tm:all_reduce", 0, -1),
    ]
    assert torch.equal(calls[0][5][0], first) and torch.equal(calls[1][5][0], second)
    assert calls[0][5][0].data_ptr() != first.data_ptr()


def test_one_that_grows_too_big_is_dropped_and_training_goes_on() -> None:
    with world(2) as pair:
        tape = Tape.recorder(100)
        pair.endpoints[0].attach(tape)
        all_reduce(pair.backends, 5)
        assert not tape.overflowed and tape.held_bytes == 40
        all_reduce(pair.backends, 50)
        assert tape.overflowed
        all_reduce(pair.backends, 5)
        assert tape.take() == []


def test_a_call_costs_what_it_costs_without() -> None:
    with world(1) as never, world(1) as once:
        tape = Tape.recorder(1 << 20)
        once.endpoints[0].attach(tape)
        tensor = torch.zeros(16)
        seconds_a_call(once, tensor)
        once.endpoints[0].attach(None)
        assert len(tape.take()) == CALLS
        pairs = [(seconds_a_call(never, tensor), seconds_a_call(once, tensor)) for _ in range(ROUNDS)]
    without, after = (min(pair[side] for pair in pairs) for side in (0, 1))
    ratio = statistics.median(pair[1] / pair[0] for pair in pairs)
    assert after <= without * ALLOWED or ratio <= ALLOWED, (
        f"{after * 1e6:.2f} us, {without * 1e6:.2f} without"
    )
