"""Getting ready for a replacement allocates no tensor, and a standby's warm-up never holds more than what a
rank of the job holds, also when it takes another role (TrainMover §5: no extra device memory)."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from allocations import counted
from gang import Member, gang
from one_process import all_reduce, peer, world
from replacement import Training
from test_a_recording_is_played_to_a_joiner import Replicated, named, recorded
from test_frameworks_go_on_with_a_replaced_member import Sharded, TensorParallel

from tm_slurm import comm
from tm_slurm.sandbox import Sandbox, find, forget_role, shadow_steps_of_another_role

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

STEPS = 3
LARGE = 1 << 22
"""Elements of what the ranks have reduced before: 32 MB each."""

SMALL_BYTES = 1 << 20
"""What sockets and tables for a few links may take; far less than one of those."""


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_preparing_allocates_no_tensor() -> None:
    with world(3) as made:
        all_reduce(made.backends, LARGE)
        joiner = made.joiner(2, epoch=1)
        before = resident_bytes()
        with counted() as prepared:
            for of in made.endpoints[:2]:
                of.prepare(epoch=1, changes={2: peer(joiner)})
            joiner.dial(epoch=1, ranks=[0, 1], timeout_s=10)
            assert all(of.wait_staged(epoch=1, ranks=[2], timeout_s=10) for of in made.endpoints[:2])
        assert prepared.nbytes == []
        assert resident_bytes() - before < SMALL_BYTES  # of all threads


def active(me: Member, kind: type[Training]) -> int:
    """The peak of a rank in its first steps."""
    size = me.join_world()
    with counted() as taken:
        training = kind(me.rank, size, False)
        for step in range(STEPS):
            training.step(step)
    return taken.peak


def standing_by(me: Member, kind: type[Training], size: int, directory: Path, ranks: list[int]) -> int:
    """The peak of warming up for one rank after the other."""
    me.hear()
    sandbox = Sandbox(me.endpoint)
    comm.register(me.endpoint)
    training: Any = None
    entries: dict[str, Any] = {}
    recordings = [find(directory, rank) for rank in ranks]
    with counted() as taken:
        for number, (rank, recording) in enumerate(zip(ranks, recordings, strict=True)):
            if number:
                training = None
                forget_role(entries)
            sandbox.enter(recording)
            me.endpoint.configure(rank=rank, epoch=0, term=1, peers={rank: comm.Peer("127.0.0.1", 1, 0)})
            dist.init_process_group("tm", store=dist.HashStore(), rank=rank, world_size=size)
            training = kind(rank, size, False)
            entries = {**named(training), "ddp": getattr(training, "ddp", None)}
            steps = shadow_steps_of_another_role(entries, STEPS) if number else STEPS
            for step in sandbox.shadow_steps(steps):
                training.step(step)
            if steps == 1:
                sandbox.rebuild_buckets(entries)
            assert sandbox.answers().missed == 0 and sandbox.answers().answered > 0
    return taken.peak


@pytest.mark.parametrize(("kind", "size"), [(Replicated, 2), (Sharded, 2), (TensorParallel, 4)])
def test_a_standby_never_holds_more_than_a_rank(kind: type[Training], size: int, tmp_path: Path) -> None:
    directory = tmp_path / "recordings"
    with gang() as members:
        for one in members.world(recorded, size, kind, directory):
            one.result()
    with gang() as members:
        most = max(one.result() for one in members.world(active, size, kind))
    with gang() as members:
        one = members.start(standing_by, 0, kind, size, directory, [size - 1, 0, size - 1])
        members.table([one])
        one.tell("begin")
        peak = one.result()
    assert 0 < peak <= most
