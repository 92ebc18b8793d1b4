"""Nothing waits for ever: interrupts, timeouts, frozen, silent, dead, disagreeing peers, no descriptors."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from gang import Member, gang
from one_process import all_reduce, backend, peer, world

from tm_slurm import comm


def interrupted_in_a_large_collective(me: Member) -> list[float]:
    me.join_world()
    big = torch.ones(16 << 20)
    dist.all_reduce(big)  # warm
    dist.barrier()
    if me.rank == 2:
        me.tell("freeze me")
        threading.Event().wait(0.3)  # it is stopped in here, and goes on in an epoch that is over
        threading.Timer(0.7, me.endpoint.interrupt, kwargs={"epoch": 0}).start()
    work = dist.all_reduce(big, async_op=True)
    if me.rank != 2:
        me.tell("in flight")
        me.hear()
        delays = []
        start = time.perf_counter()
        me.endpoint.interrupt(epoch=0)
        with pytest.raises(comm.GroupInterrupted):
            work.wait()
        delays.append(time.perf_counter() - start)
    else:
        with pytest.raises((comm.GroupInterrupted, comm.PeerLost)):
            work.wait()
        delays = [0.0]
    me.hear()
    me.endpoint.switch(epoch=1)
    tensor = torch.full((1 << 20,), float(me.rank + 1))
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((1 << 20,), 6.0))
    return delays


def test_an_interrupt_takes_milliseconds_although_a_peer_is_frozen() -> None:
    with gang() as members:
        world_ = members.world(interrupted_in_a_large_collective, 3, keepalive_s=0.0)
        assert world_[2].hear() == "freeze me"
        world_[2].freeze()
        for member in world_[:2]:
            assert member.hear() == "in flight"
        time.sleep(0.2)  # until buffers are full and everybody is stuck in the middle of a frame
        for member in world_[:2]:
            member.tell("interrupt")
            member.tell("switch")
        time.sleep(0.2)  # they are in the next epoch's collective when the frozen one thaws in the old one
        os.kill(world_[2].process.pid, signal.SIGCONT)
        world_[2].tell("switch")
        delays = [max(member.result()) for member in world_[:2]]
    assert max(delays) < 0.05


def hears_silence(me: Member) -> float:
    me.join_world()
    dist.barrier()
    if me.rank == 1:
        me.tell("freeze me")
        threading.Event().wait(30)
    work = dist.all_reduce(torch.ones(3), async_op=True)
    start = time.perf_counter()
    with pytest.raises(comm.PeerLost, match="silent for more than 400 ms") as lost:
        work.wait()
    assert lost.value.rank == 1
    return time.perf_counter() - start


def test_a_silent_peer_is_lost_after_the_keepalive() -> None:
    with gang() as members:
        world_ = members.world(hears_silence, 2, keepalive_s=0.4)
        assert world_[1].hear() == "freeze me"
        world_[1].freeze()
        assert 0.1 < world_[0].result() < 2.0
        world_[1].kill()


def dies(me: Member) -> float:
    me.join_world()
    dist.barrier()
    if me.rank == 1:
        os._exit(1)
    start = time.perf_counter()
    with pytest.raises(comm.PeerLost):
        dist.all_reduce(torch.ones(10))
    return time.perf_counter() - start


def test_a_dead_peer_is_noticed_at_once() -> None:
    with gang() as members:
        world_ = members.world(dies, 2)
        assert world_[0].result() < 1.0


def test_a_send_that_finds_the_link_broken_fails() -> None:
    """Before the thread that reads from it has seen that: once in a few of these."""
    for _ in range(20):
        with world(2) as w:
            all_reduce(w.backends, 10)
            closes = threading.Thread(target=w.endpoints[1].close)
            closes.start()
            with pytest.raises(comm.PeerLost):
                while True:
                    w.backends[0].send([torch.ones(4)], 1, 5).wait()
            closes.join()


def test_a_forked_process_holds_no_link_open() -> None:
    """As the workers of a DataLoader do not, which have every descriptor that was open before them."""
    with world(2) as w:
        all_reduce(w.backends, 10)
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
        try:
            receives = w.backends[0].recv([torch.ones(4)], 1, 5)
            w.endpoints[1].close()
            start = time.perf_counter()
            with pytest.raises(comm.PeerLost):
                receives.wait()
            assert time.perf_counter() - start < 5.0, "its default timeout is 20 s"
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_an_idle_link_stays() -> None:
    with world(2, keepalive_s=0.2) as w:
        all_reduce(w.backends, 10)
        time.sleep(0.8)
        assert [of.stats()["links_lost"] for of in w.endpoints] == [0, 0]
        all_reduce(w.backends, 10)


def test_a_timeout_says_who_is_missing() -> None:
    with world(3) as w:
        all_reduce(w.backends, 10)
        groups = w.group([0, 1, 2], "impatient", timeout_s=0.2)
        said = r"all_reduce in group impatient timed out on rank 0 at 127.* epoch 0: receiving from rank 1 at"
        with pytest.raises(comm.CollectiveTimeout, match=said):
            groups[0].allreduce([torch.ones(5)]).wait()
        all_reduce(w.backends, 10)  # other groups do not mind


def test_a_timeout_tells_of_a_link_that_cannot_be_opened() -> None:
    with world(2) as w:
        w.endpoints[0].close()
        group = backend(w.endpoints[1], 1, [0, 1], "g", timeout_s=0.3)
        with pytest.raises(comm.CollectiveTimeout, match=r"no link: Connection refused"):
            group.allreduce([torch.ones(5)]).wait()


def test_set_timeout_and_the_option_of_one_call() -> None:
    with world(2) as w:
        options = dist.AllreduceOptions()
        options.timeout = timedelta(milliseconds=100)
        with pytest.raises(comm.CollectiveTimeout):
            w.backends[0].allreduce([torch.ones(5)], options).wait()


def test_ranks_that_disagree_on_a_size_are_told_so() -> None:
    with world(2) as w:
        works = [w.backends[0].allreduce([torch.ones(5)]), w.backends[1].allreduce([torch.ones(6)])]
        for work in works:
            with pytest.raises(RuntimeError, match=r"sent \d+ bytes where \d+ were expected"):
                work.wait()


def test_no_descriptor_left_is_a_clear_error() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with world(6) as w:
        used = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 3, hard))
        try:
            works = [of.allreduce([torch.ones(50_000)]) for of in w.group(w.ranks, "hungry", timeout_s=1.0)]
            failures = []
            for work in works:
                with pytest.raises(RuntimeError) as failure:
                    work.wait()
                failures.append(str(failure.value))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert any("no file descriptor left" in text and f"limit {used + 3}" in text for text in failures)


def test_monitored_barrier_names_whoever_does_not_come() -> None:
    with world(3) as w:
        options = dist.BarrierOptions()
        options.timeout = timedelta(milliseconds=200)
        threads = [
            threading.Thread(target=of.monitored_barrier, args=(timedelta(seconds=5), True))
            for of in w.backends[1:]
        ]
        for thread in threads:
            thread.start()
        w.backends[0].monitored_barrier(timedelta(seconds=5), True)
        for thread in threads:
            thread.join(5)
            assert not thread.is_alive()
        with pytest.raises(comm.CollectiveTimeout, match=r"rank 1.*rank 2"):
            w.backends[0].monitored_barrier(timedelta(milliseconds=200), True)


def waits_for_nobody(me: Member) -> float:
    me.join_world()
    group = dist.new_group([0, 1])
    waited = 0.0
    if me.rank == 0:
        began = time.monotonic()
        with pytest.raises(comm.CollectiveTimeout):
            dist.all_reduce(torch.zeros(1), group=group)
        waited = time.monotonic() - began
        me.tell("waited")
    me.hear()
    return waited


def test_a_group_without_a_timeout_of_its_own_has_the_endpoints() -> None:
    """Torch fills in 30 minutes where a group is made without one."""
    with gang() as members:
        world_ = members.world(waits_for_nobody, 2, timeout_s=0.5)
        assert world_[0].hear() == "waited"
        for member in world_:
            member.tell("go on")
        assert 0.4 < world_[0].result() < 10.0


def test_a_receive_that_was_early_asks_again_for_the_link() -> None:
    """The higher rank opens the link; the lower one refuses it until it knows the epoch. A receive that waits
    for whatever comes first is a reason to try again like any other."""
    with world(2) as w:
        joiner = w.joiner(1, 1)
        received = torch.zeros(4)
        group = backend(joiner, 1, [0, 1], "world")
        waiting = group.recv([received], 0, 0)
        deadline = time.monotonic() + 5.0
        while not w.endpoints[0].stats()["refused_early"] and time.monotonic() < deadline:
            time.sleep(0.001)
        assert w.endpoints[0].stats()["refused_early"] > 0
        w.endpoints[0].prepare(epoch=1, changes={1: peer(joiner)})
        w.endpoints[0].switch(epoch=1)
        w.backends[0].send([torch.arange(4.0)], 1, 0).wait(timedelta(seconds=5))
        waiting.wait(timedelta(seconds=5))
        assert torch.equal(received, torch.arange(4.0))


def test_messages_of_one_sender_keep_their_order() -> None:
    """Also when many are sent at once, large and small ones: they are matched by their order."""
    with world(2) as w:
        sizes = [1, 40_000, 1, 3, 20_000, 1, 30_000] * 20
        sends = [w.backends[0].send([torch.full((n,), float(i))], 1, 0) for i, n in enumerate(sizes)]
        for i, n in enumerate(sizes):
            received = torch.zeros(n)
            w.backends[1].recv([received], 0, 0).wait(timedelta(seconds=10))
            assert torch.equal(received, torch.full((n,), float(i)))
        for send in sends:
            send.wait(timedelta(seconds=10))
