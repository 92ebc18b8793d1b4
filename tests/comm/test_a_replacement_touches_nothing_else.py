"""prepare, dial, switch, cancel and interrupt: what stays, what goes, in which order things may happen."""

from __future__ import annotations

import os
import resource
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from one_process import World, all_reduce, backend, peer, world

from tm_slurm import comm

SIZES = [1, 1000, 300_000]  # small, one frame, many frames


@pytest.mark.parametrize("elements", SIZES)
def test_frames_of_the_next_epoch_wait_for_the_switch(elements: int) -> None:
    with world(3) as w:
        all_reduce(w.backends, elements)
        joiner = w.joiner(2, epoch=1)
        for of in w.endpoints[:2]:
            of.prepare(epoch=1, changes={2: peer(joiner)})
        joiner.dial(epoch=1, ranks=[0, 1], timeout_s=5)
        of_joiner = backend(joiner, 2, w.ranks, "world")
        tensors = [torch.full((elements,), float(rank + 1)) for rank in w.ranks]
        works = [of_joiner.allreduce([tensors[2]])]  # the joiner is first
        w.endpoints[0].switch(epoch=1)
        works.append(w.backends[0].allreduce([tensors[0]]))
        all_at_old = torch.ones(elements)  # rank 1 is still at epoch 0; nothing of epoch 1 may reach it
        pending = w.backends[1].recv([all_at_old], 0, 5)
        time.sleep(0.05)
        assert not pending.is_completed()
        w.endpoints[1].switch(epoch=1)
        with pytest.raises(comm.GroupInterrupted):
            pending.wait()
        works.append(w.backends[1].allreduce([tensors[1]]))
        for work in works:
            work.wait()
        for tensor in tensors:
            assert torch.equal(tensor, torch.full((elements,), 6.0))


def test_only_links_to_the_leaver_are_replaced() -> None:
    with world(4) as w:
        all_reduce(w.backends, 50_000)
        before = [of.stats()["links_opened"] for of in w.endpoints]
        w.replace(3, epoch=1)
        all_reduce(w.backends, 50_000)
        after = [of.stats()["links_opened"] for of in w.endpoints]
        assert [now - then for now, then in zip(after[:3], before[:3], strict=True)] == [1, 1, 1]


def test_several_groups_go_on_over_the_same_links() -> None:
    with world(4) as w:
        groups = [w.group([0, 1], "a"), w.group([1, 2, 3], "b"), w.group([3, 0], "c")]
        for of in groups:
            all_reduce(of, 20_000)
        w.replace(3, epoch=1)
        groups[1][2] = backend(w.endpoints[3], 3, [1, 2, 3], "b")
        groups[2][0] = backend(w.endpoints[3], 3, [3, 0], "c")
        for of in groups:
            all_reduce(of, 20_000)
            all_reduce(of, 10)
        assert set(w.endpoints[1].linked()) <= {0, 2, 3}


def test_two_leavers_at_once() -> None:
    with world(4) as w:
        all_reduce(w.backends, 1000)
        joiners = {rank: w.joiner(rank, epoch=1) for rank in (1, 3)}
        changes = {rank: peer(of) for rank, of in joiners.items()}
        for rank, of in joiners.items():
            of.configure(rank=rank, epoch=1, term=1, peers={**w.table(), **changes})
        for rank in (0, 2):
            w.endpoints[rank].prepare(epoch=1, changes=changes)
        dials = [
            threading.Thread(target=of.dial, kwargs={"epoch": 1, "ranks": [0, 1, 2, 3], "timeout_s": 10})
            for of in joiners.values()
        ]
        for dial in dials:
            dial.start()
        for dial in dials:
            dial.join(10)
        for rank in (0, 2):
            assert w.endpoints[rank].wait_staged(epoch=1, ranks=[1, 3], timeout_s=10)
            w.endpoints[rank].switch(epoch=1)
        for rank, of in joiners.items():
            w.endpoints[rank] = of
            w.backends[rank] = backend(of, rank, w.ranks, "world")
        all_reduce(w.backends, 100_000)


def test_a_joiner_nobody_staged_is_linked_on_first_use() -> None:
    with world(3) as w:
        all_reduce(w.backends, 1000)
        w.replace(0, epoch=1, dial=False)
        all_reduce(w.backends, 1000)


def test_cancel_leaves_the_old_member_in_place() -> None:
    with world(3) as w:
        all_reduce(w.backends, 1000)
        joiner = w.joiner(2, epoch=1)
        for of in w.endpoints[:2]:
            of.prepare(epoch=1, changes={2: peer(joiner)})
        joiner.dial(epoch=1, ranks=[0, 1], timeout_s=5)
        for of in w.endpoints[:2]:
            of.cancel(epoch=1)
        assert not w.endpoints[0].wait_staged(epoch=1, ranks=[2], timeout_s=1)
        all_reduce(w.backends, 100_000)
        w.replace(2, epoch=2)
        all_reduce(w.backends, 100_000)


def test_a_standby_may_be_made_ready_for_one_rank_and_take_another() -> None:
    with world(3) as w:
        all_reduce(w.backends, 1000)
        standby = w.joiner(1, epoch=1)
        for rank in (0, 2):
            w.endpoints[rank].prepare(epoch=1, changes={1: peer(standby)})
        standby.dial(epoch=1, ranks=[0, 2], timeout_s=5)
        for rank in (0, 2):
            w.endpoints[rank].cancel(epoch=1)
        standby.configure(rank=2, epoch=2, term=2, peers={**w.table(), 2: peer(standby)})
        assert standby.linked() == []
        for rank in (0, 1):
            w.endpoints[rank].prepare(epoch=2, changes={2: peer(standby)})
        standby.dial(epoch=2, ranks=[0, 1], timeout_s=5)
        for rank in (0, 1):
            w.endpoints[rank].switch(epoch=2)
        all_reduce([*w.backends[:2], backend(standby, 2, w.ranks, "world")], 100_000)


def test_a_rank_whose_address_changed_is_found_after_an_update() -> None:
    with world(2) as w:
        moved = w.joiner(0, epoch=0)
        w.endpoints[0].close()
        work = w.backends[1].allreduce([torch.ones(10)])  # dials the closed one until it learns better
        w.endpoints[1].update(epoch=0, peers={0: peer(moved)})
        there = backend(moved, 0, w.ranks, "world")
        other = there.allreduce([torch.ones(10)])
        work.wait()
        other.wait()


def test_a_joiner_that_dies_while_preparing_harms_nobody() -> None:
    with world(3) as w:
        all_reduce(w.backends, 1000)
        joiner = w.joiner(2, epoch=1)
        for of in w.endpoints[:2]:
            of.prepare(epoch=1, changes={2: peer(joiner)})
        joiner.dial(epoch=1, ranks=[0, 1], timeout_s=5)
        joiner.close()
        all_reduce(w.backends, 100_000)
        for of in w.endpoints[:2]:
            while of.stats()["links_staged"]:
                time.sleep(0.001)
            assert not of.wait_staged(epoch=1, ranks=[2], timeout_s=0)
        second = w.joiner(2, epoch=1, incarnation=2)
        for of in w.endpoints[:2]:
            of.prepare(epoch=1, changes={2: peer(second)})
        second.dial(epoch=1, ranks=[0, 1], timeout_s=5)
        for of in w.endpoints[:2]:
            assert of.wait_staged(epoch=1, ranks=[2], timeout_s=5)
            of.switch(epoch=1)
        w.endpoints[2].close()
        all_reduce([*w.backends[:2], backend(second, 2, w.ranks, "world")], 100_000)


def test_a_joiner_that_dies_during_the_switch_is_replaced_at_the_next_epoch() -> None:
    with world(3) as w:
        all_reduce(w.backends, 1000)
        w.replace(2, epoch=1)
        w.endpoints[2].close()
        works = [of.allreduce([torch.ones(1000)]) for of in w.backends[:2]]
        with pytest.raises(comm.PeerLost):
            works[1].wait()  # rank 1 talks to the dead one; rank 0 waits for rank 1
        for of in w.endpoints[:2]:
            of.interrupt(epoch=1)
        with pytest.raises(comm.GroupInterrupted):
            works[0].wait()
        w.replace(2, epoch=2)
        all_reduce(w.backends, 100_000)


def test_a_leaver_may_leave_when_nothing_more_is_needed_from_it() -> None:
    """Its last words are heard although its link is closed by the time they are asked for."""
    with world(2) as w:
        word = torch.arange(1000.0)
        w.backends[1].send([word], 0, 3).wait()
        w.backends[1].broadcast([torch.full((10,), 7.0)], _root(1)).wait()
        w.endpoints[1].close()
        while w.endpoints[0].linked():
            time.sleep(0.001)
        heard, shared = torch.empty(1000), torch.empty(10)
        w.backends[0].recv([heard], 1, 3).wait()
        w.backends[0].broadcast([shared], _root(1)).wait()
        assert torch.equal(heard, word)
        assert torch.equal(shared, torch.full((10,), 7.0))
        with pytest.raises(comm.PeerLost) as lost:
            w.backends[0].allreduce([torch.ones(1)]).wait()
        assert lost.value.rank == 1


def test_a_leaver_that_is_gone_after_the_switch_is_not_missed() -> None:
    with world(3) as w:
        all_reduce(w.backends, 1000)
        for epoch in range(1, 4):
            w.replace(1, epoch=epoch)  # closes the old endpoint
            all_reduce(w.backends, 1000)
            assert w.endpoints[0].stats()["links_lost"] == 0


def _root(rank: int) -> Any:
    options = torch.distributed.BroadcastOptions()
    options.rootRank = rank
    return options


def _interrupted(w: World, works: list[Any], epoch: int) -> float:
    start = time.perf_counter()
    for of in w.endpoints:
        of.interrupt(epoch=epoch)
    for work in works:
        with pytest.raises(comm.GroupInterrupted):
            work.wait()
    return time.perf_counter() - start


def test_interrupt_in_the_middle_of_large_frames_leaves_the_links_usable() -> None:
    """Every other rank's collective is never posted, so the rest are stuck half-way, in both directions."""
    with world(4) as w:
        all_reduce(w.backends, 1000)
        links = [of.stats()["links_opened"] for of in w.endpoints]
        for epoch in range(5):
            big = [torch.ones(2_000_000) for _ in w.ranks]
            works = [of.allreduce([tensor]) for of, tensor in zip(w.backends[:3], big[:3], strict=True)]
            incoming = torch.empty(500_000)
            works.append(w.backends[0].recv([incoming], 3, 1))
            time.sleep(0.01 * epoch)
            assert _interrupted(w, works, epoch) < 1.0
            with pytest.raises(comm.GroupInterrupted):  # and what is posted later
                w.backends[0].allreduce([torch.ones(1)]).wait()
            for of in w.endpoints:
                of.switch(epoch=epoch + 1)
            all_reduce(w.backends, 300_000)
            all_reduce(w.backends, 3)
        assert [of.stats()["links_lost"] for of in w.endpoints] == [0, 0, 0, 0]
        opened = [of.stats()["links_opened"] for of in w.endpoints]
        assert all(now - then <= 1 for now, then in zip(opened, links, strict=True))


def test_an_interrupt_of_an_epoch_gone_by_does_nothing() -> None:
    with world(2) as w:
        for of in w.endpoints:
            of.switch(epoch=3)
        w.endpoints[0].interrupt(epoch=2)
        all_reduce(w.backends, 10)


def test_switching_back_is_refused() -> None:
    with world(2) as w:
        w.endpoints[0].switch(epoch=3)
        w.endpoints[0].switch(epoch=3)
        with pytest.raises(RuntimeError, match="before the current epoch 3"):
            w.endpoints[0].switch(epoch=2)
        with pytest.raises(RuntimeError, match="not after the current epoch 3"):
            w.endpoints[0].prepare(epoch=3, changes={})


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_a_thousand_replacements_leave_nothing_behind() -> None:
    with world(3) as w:
        all_reduce(w.backends, 1000)
        w.replace(0, epoch=1)
        all_reduce(w.backends, 1000)
        before, threads = descriptors(), len(os.listdir("/proc/self/task"))
        for epoch in range(2, 1002):
            w.replace(epoch % 3, epoch=epoch)
            all_reduce(w.backends, 1000)
            w.everyone = list(w.endpoints)
            if epoch == 100:
                memory = resident_bytes()
        assert resident_bytes() - memory < 8 << 20
        deadline = time.monotonic() + 5
        while descriptors() > before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert descriptors() <= before
        assert len(os.listdir("/proc/self/task")) <= threads
