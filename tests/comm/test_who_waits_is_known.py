"""An endpoint tells whether its process waits in a collective, and for how long already."""

from __future__ import annotations

import time

import pytest
import torch
from one_process import all_reduce, world

from tm_slurm import comm


def waits(of: comm.Endpoint) -> tuple[int, int]:
    stats = of.stats()
    return stats["operations_in_flight"], stats["oldest_operation_ms"]


def test_who_waits_and_for_how_long() -> None:
    with world(3) as w:
        assert [waits(of) for of in w.endpoints] == [(0, 0)] * 3
        tensors = [torch.ones(50_000) for _ in w.ranks]
        began = time.monotonic()
        works = [w.backends[rank].allreduce([tensors[rank]]) for rank in (0, 2)]
        posted = time.monotonic()
        while time.monotonic() - posted < 0.15:
            time.sleep(0.01)
        pair = w.group([0, 1], "pair")
        works.append(pair[0].allreduce([torch.ones(4)]))
        counts, ages = zip(*[waits(of) for of in w.endpoints], strict=True)
        assert counts == (2, 0, 1)
        assert 150 <= ages[0] <= (time.monotonic() - began) * 1000
        assert ages[1] == 0 and ages[2] >= 150
        w.endpoints[0].interrupt(epoch=0)
        for work in (works[0], works[2]):
            with pytest.raises(comm.GroupInterrupted):
                work.wait()
        assert waits(w.endpoints[0]) == (0, 0)


def test_what_is_done_is_not_waited_for() -> None:
    with world(3) as w:
        all_reduce(w.backends, 100_000)
        assert [waits(of) for of in w.endpoints] == [(0, 0)] * 3
