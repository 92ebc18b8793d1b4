"""A process that computes for long sees between collectives who is gone, and takes no switch for that."""

from __future__ import annotations

import time

from one_process import all_reduce, world

from tm_slurm.runtime.link_watch import LinkWatch

LIMIT_S = 10.0


def test_each_that_was_linked_sees_it_once() -> None:
    with world(3) as w:
        all_reduce(w.backends, 100_000)
        watches = [LinkWatch(of) for of in w.endpoints[:2] if 2 in of.linked()]
        assert watches and all(watch.look() == (0, []) for watch in watches)
        w.endpoints[2].close()
        for watch in watches:
            deadline = time.monotonic() + LIMIT_S
            while (seen := watch.look()) == (0, []):
                assert time.monotonic() < deadline
            assert seen == (0, [2]) and watch.look() == (0, [])


def test_a_planned_replacement_is_no_such_end() -> None:
    with world(3) as w:
        all_reduce(w.backends, 100_000)
        watches = [LinkWatch(of) for of in w.endpoints[:2]]
        for epoch in range(1, 4):
            assert all(watch.look()[1] == [] for watch in watches)
            w.replace(2, epoch=epoch)  # closes the old endpoint
            assert [watch.look() for watch in watches] == [(epoch, [])] * 2
            all_reduce(w.backends, 100_000)
