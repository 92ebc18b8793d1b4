"""What concerns none but the joiners of one batch is real while they warm up; whoever does not come, or comes
no further, keeps nobody from warming up."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gang import PATIENCE_S, Member, Process, gang
from replacement import Training, reference, replaced
from test_frameworks_go_on_with_a_replaced_member import TensorParallel

from tm_slurm import comm
from tm_slurm.comm._tm import Tape
from tm_slurm.sandbox import Sandbox

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

BATCH, SIZE = [2, 3], 4
SEVEN = torch.full((2,), 7.0)
SHORT_S = 0.3


def enter(me: Member, limit_s: float = 60.0) -> tuple[Any, Tape]:
    """The default group of SIZE and the batch's own one, in the sandbox; two steps were recorded."""
    peers = me.hear()
    me.endpoint.configure(rank=me.rank, epoch=0, term=0, peers=peers)
    tape = Tape.player(
        [(step, "tm:all_reduce", group, -1, -1, [SEVEN]) for step in (0, 1) for group in (0, 1)]
    )
    me.endpoint.sandbox = True
    me.endpoint.attach(tape)
    me.endpoint.share_sandbox(BATCH, limit_s=limit_s)
    comm.register(me.endpoint)
    dist.init_process_group("tm", store=dist.HashStore(), rank=me.rank, world_size=SIZE)
    tape.begin_step(0)
    return dist.new_group(BATCH), tape


def summed(group: Any = None) -> list[float]:
    tensor = torch.full((2,), float(dist.get_rank()))
    dist.all_reduce(tensor, group=group)
    return tensor.tolist()


def together(me: Member) -> None:
    pair, tape = enter(me)
    other = BATCH[0] + BATCH[1] - me.rank
    assert summed(pair) == [5.0, 5.0], "real"
    assert summed() == SEVEN.tolist(), "as it was recorded"
    told = torch.full((2,), float(me.rank))
    if me.rank == BATCH[0]:
        dist.send(told, other)
        dist.recv(told, other)
    else:
        heard = torch.zeros(2)
        dist.recv(heard, other)
        dist.send(heard + 10, other)
    assert told.tolist() == ([12.0, 12.0] if me.rank == BATCH[0] else [3.0, 3.0])
    dist.send(told, 0)  # to nobody
    dist.recv(told, 0)
    assert (tape.answered, tape.missed) == (1, 1) and not me.endpoint.why_alone
    assert me.endpoint.linked() == [other]


def with_one_that_does_not_come(me: Member) -> None:
    pair, tape = enter(me, SHORT_S)
    began = time.monotonic()
    works = [dist.all_reduce(torch.zeros(2), group=pair, async_op=True) for _ in range(2)]
    for work in works:
        work.wait()
    assert time.monotonic() - began >= SHORT_S and tape.answered == 1
    assert "all_reduce" in me.endpoint.why_alone
    tape.begin_step(1)
    began = time.monotonic()
    assert summed(pair) == SEVEN.tolist() and time.monotonic() - began < SHORT_S


def with_one_that_ends(me: Member) -> None:
    pair, _ = enter(me)
    assert summed(pair) == [5.0, 5.0]
    if me.rank == BATCH[1]:
        me.endpoint.close()
        return
    assert summed(pair) == SEVEN.tolist()
    assert me.endpoint.why_alone


def until_it_is_called_away(me: Member) -> None:
    pair, _ = enter(me)
    sandbox = Sandbox(me.endpoint)

    def call_away() -> None:
        while not me.endpoint.stats()["operations_in_flight"]:
            time.sleep(0.01)
        sandbox.leave_batch()

    calling = threading.Thread(target=call_away)
    calling.start()
    assert summed(pair) == SEVEN.tolist()
    calling.join(PATIENCE_S)
    assert "goes on with another batch" in sandbox.answers().why_alone


def begun(members: Any, worker: Any, ranks: list[int]) -> list[Process]:
    """Those of `ranks` are there; others of the batch have an address that nobody answers at."""
    started = [members.start(worker, rank) for rank in ranks]
    table = {rank: comm.Peer("127.0.0.1", 1, 0) for rank in BATCH} | members.table(started)
    for one in started:
        one.tell(table)
    return started


@pytest.mark.parametrize(
    ("worker", "ranks"),
    [
        (together, BATCH),
        (with_one_that_does_not_come, BATCH[:1]),
        (with_one_that_ends, BATCH),
        (until_it_is_called_away, BATCH[:1]),
    ],
)
def test_in_the_sandbox(worker: Any, ranks: list[int]) -> None:
    with gang() as members:
        for one in begun(members, worker, ranks):
            one.result()


class Pairs(TensorParallel):
    """Two replicas of two tensor parallel ranks: 2 and 3 share their layers."""


def batch_joiner(me: Member, kind: type[Training], linked: list[int]) -> tuple[str, bool]:
    """Warms up together with the other one, at epoch 0; then both take their ranks."""
    peers = me.hear()
    sandbox = Sandbox(me.endpoint)
    sandbox.enter(None, BATCH)
    me.endpoint.configure(rank=me.rank, epoch=0, term=0, peers={rank: peers[rank] for rank in BATCH})
    comm.register(me.endpoint)
    dist.init_process_group("tm", store=dist.HashStore(), rank=me.rank, world_size=len(peers))
    training = kind(me.rank, len(peers), True)
    for step in sandbox.shadow_steps(2):
        training.step(step)
    sandbox.leave_batch()
    assert not sandbox.answers().why_alone and me.endpoint.stats()["frames_sent"] > 0
    me.endpoint.configure(rank=me.rank, epoch=1, term=1, peers=peers)
    me.endpoint.dial(epoch=1, ranks=linked, timeout_s=20)
    me.tell("dialled")
    training.load(me.hear())
    sandbox.leave()
    for step in range(3, 6):
        training.step(step)
    return training.digest(), True


def test_they_take_their_ranks_afterwards() -> None:
    assert replaced(Pairs, SIZE, BATCH, batch_joiner) == reference(Pairs, SIZE)
