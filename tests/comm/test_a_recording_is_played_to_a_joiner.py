"""What one rank's collectives answered in the first steps, played to a process that is alone, makes it go
through the same steps to the same bits: DDP, FSDP2, tensor parallel, a pipeline that tells shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gang import Member, gang
from replacement import Training
from test_frameworks_go_on_with_a_replaced_member import Net, Pipeline, Sharded, TensorParallel
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel

from tm_slurm import comm
from tm_slurm.comm._tm import Tape
from tm_slurm.sandbox import Recorder, RecordingError, Sandbox, find, forget_groups, role_class_of

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

RECORDED = 2
RECORDED_STATIC = 3
"""With a static graph DDP rebuilds its buckets one step later."""


def steps_of(kind: type[Training]) -> int:
    return RECORDED_STATIC if kind is StaticGraph else RECORDED


class Replicated(Training):
    """DDP in several buckets, whose order is told by rank 0 before the second forward."""

    def build(self) -> None:
        model = Net()
        self.ddp = DistributedDataParallel(model, bucket_cap_mb=0.02)
        self.modules = [model]
        self.optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3)]

    def step(self, step: int) -> None:
        inputs, targets = self.data(step, self.rank)
        self.optimizers[0].zero_grad()
        (self.ddp(inputs) - targets).square().mean().backward()
        self.optimizers[0].step()


class StaticGraph(Replicated):
    """DDP that works out in its first step what it does in all."""

    def build(self) -> None:
        model = Net()
        self.ddp = DistributedDataParallel(model, bucket_cap_mb=0.02, static_graph=True)
        self.modules = [model]
        self.optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3)]


class ShapesTold(Pipeline):
    """1F1B whose stages find out their shapes from each other, in pickles."""

    def build(self) -> None:
        widths = [64, *([32] * (self.size - 1)), 8]
        model = nn.Sequential(nn.Linear(widths[self.rank], widths[self.rank + 1]), nn.Tanh())
        self.train_stage(model, PipelineStage(model, self.rank, self.size, torch.device("cpu")))


def named(training: Training) -> dict[str, Any]:
    """The training as `build` would return it."""
    state: dict[str, Any] = {f"m{number}": module for number, module in enumerate(training.modules)}
    return {**state, "stage": getattr(training, "stage", None)}


def recorded(me: Member, kind: type[Training], directory: Path) -> tuple[str, list[str], Any]:
    """A member of the job in its first steps; returns its digest after each, and what was told in the end."""
    told: list[Any] = []
    steps = steps_of(kind)
    recorder = Recorder(me.endpoint, steps=steps, limit_bytes=1 << 26, directory=directory, tell=told.append)
    size = me.join_world()
    training = kind(me.rank, size, False)
    role_class = role_class_of(named(training))
    designated = recorder.is_designated(role_class, me.rank, size)
    digests = []
    for step in range(steps):
        if designated:
            recorder.begin_step()
        training.step(step)
        digests.append(training.digest())
        if designated:
            assert recorder.step_ended() == (step + 1 < steps)
    assert me.endpoint.has_tape == designated
    if designated:
        recorder.finish().join(20)
    assert not me.endpoint.has_tape
    training.step(steps)
    return role_class, digests, told[0] if told else None


def played(me: Member, kind: type[Training], size: int, directory: Path, steps: int) -> tuple[list[str], Any]:
    """A process without a peer: its digest after each shadow step, and what it was answered with."""
    me.hear()
    me.endpoint.configure(rank=me.rank, epoch=0, term=1, peers={me.rank: comm.Peer("127.0.0.1", 1, 0)})
    sandbox = Sandbox(me.endpoint)
    recording = find(directory, me.rank)
    assert recording is not None
    sandbox.enter(recording)
    comm.register(me.endpoint)
    dist.init_process_group("tm", store=dist.HashStore(), rank=me.rank, world_size=size)
    training = kind(me.rank, size, False)
    digests = []
    for step in sandbox.shadow_steps(steps):
        training.step(step)
        digests.append(training.digest())
    answers = sandbox.answers()
    sandbox.leave()
    assert not me.endpoint.has_tape and me.endpoint.stats()["frames_sent"] == 0
    return digests, answers


@pytest.mark.parametrize(
    ("kind", "size", "classes"),
    [(Replicated, 2, 1), (StaticGraph, 2, 1), (Sharded, 2, 1), (TensorParallel, 4, 1), (ShapesTold, 4, 3)],
)
def test_the_recorded_rank_is_gone_through_again(
    kind: type[Training], size: int, classes: int, tmp_path: Path
) -> None:
    directory = tmp_path / "recordings"
    with gang() as members:
        found = [one.result() for one in members.world(recorded, size, kind, directory)]
        by_class: dict[str, list[int]] = {}
        for rank, (role_class, _, _) in enumerate(found):
            by_class.setdefault(role_class, []).append(rank)
        assert len(by_class) == classes
        for rank, (role_class, _, told) in enumerate(found):
            if rank != by_class[role_class][0]:
                assert told is None
                continue
            assert told["kind"] == "recorded" and told["ranks"] == by_class[role_class]
            assert told["steps"] == steps_of(kind) and told["bytes"] > 0
        for rank in sorted({ranks[place] for ranks in by_class.values() for place in (0, -1)}):
            one = members.start(played, rank, kind, size, directory, steps_of(kind) + 1)
            members.table([one])
            one.tell("begin")
            digests, answers = one.result()
            assert answers.missed == 0 and answers.answered > 0, answers
            assert len(digests) == steps_of(kind) + 1
            if rank == by_class[found[rank][0]][0]:
                assert digests[:-1] == found[rank][1], f"rank {rank}"


def in_turn(me: Member, kind: type[Training], size: int, directory: Path, ranks: list[int]) -> list[Any]:
    """A process without a peer that is warmed up for one rank after the other."""
    me.hear()
    sandbox = Sandbox(me.endpoint)
    comm.register(me.endpoint)
    found = []
    for number, rank in enumerate(ranks):
        if number:
            forget_groups()
        sandbox.enter(find(directory, rank))
        me.endpoint.configure(rank=rank, epoch=0, term=1, peers={rank: comm.Peer("127.0.0.1", 1, 0)})
        dist.init_process_group("tm", store=dist.HashStore(), rank=rank, world_size=size)
        training = kind(rank, size, False)
        for step in sandbox.shadow_steps(1):
            training.step(step)
        sandbox.rebuild_buckets({"ddp": getattr(training, "ddp", None)})
        training.step(1)
        found.append((sandbox.answers(), training.digest()))
    return found


@pytest.mark.parametrize(("kind", "size"), [(Replicated, 2), (TensorParallel, 4)])
def test_one_process_is_warm_for_one_rank_after_the_other(
    kind: type[Training], size: int, tmp_path: Path
) -> None:
    """One shadow step and the rebuilt buckets are enough for what comes next to be as it was recorded."""
    directory = tmp_path / "recordings"
    ranks = [size - 1, 0, size // 2, 0]
    with gang() as members:
        recordings = [one.result() for one in members.world(recorded, size, kind, directory)]
        one = members.start(in_turn, 0, kind, size, directory, ranks)
        members.table([one])
        one.tell("begin")
        found = one.result()
    for rank, (answers, digest) in zip(ranks, found, strict=True):
        assert answers.missed == 0 and answers.answered > 0, answers
        if rank == 0:
            assert digest == recordings[0][1][-1]


def test_one_that_grows_too_big_is_refused_and_says_so(tmp_path: Path) -> None:
    with gang() as members:
        told = members.world(overflowing, 1, tmp_path / "recordings")[0].result()
    assert told["kind"] == "recording_failed"
    assert told["why"] == (
        "the first steps have more than 1 MB of answers; raise standby.recording_limit_mb to record them"
    )


def overflowing(me: Member, directory: Path) -> Any:
    told: list[Any] = []
    recorder = Recorder(
        me.endpoint, steps=RECORDED, limit_bytes=1 << 20, directory=directory, tell=told.append
    )
    me.join_world()
    assert recorder.is_designated("only-1", 0, 1)
    recorder.begin_step()
    for _ in range(3):
        dist.all_reduce(torch.zeros(1 << 17))
    assert not recorder.step_ended(), "there is nothing more to record"
    recorder.finish().join(20)
    with pytest.raises(RecordingError, match=r"standby\.recording_limit_mb"):
        find(directory, 0)
    return told[0]


def test_another_path_is_noticed_and_answered_by_the_identity(tmp_path: Path) -> None:
    """Nothing waits and nothing fails: another shape, another collective, more calls than recorded."""
    with gang() as members:
        one = members.start(another_path, 0)
        members.table([one])
        one.tell("begin")
        one.result()


def another_path(me: Member) -> None:
    me.hear()
    me.endpoint.configure(rank=0, epoch=0, term=1, peers={0: comm.Peer("127.0.0.1", 1, 0)})
    comm.register(me.endpoint)
    me.endpoint.sandbox = True
    dist.init_process_group("tm", store=dist.HashStore(), rank=0, world_size=3)
    seven, eight = torch.full((2,), 7.0), torch.full((2,), 8.0)
    tape = Tape.player(
        [
            (0, "tm:all_reduce", 0, -1, -1, [seven]),
            (0, "tm:broadcast", 0, -1, -1, [eight]),
            (0, "tm:recv", 0, 1, 1, [seven]),
            (0, "tm:recv", 0, 2, 2, [eight]),
        ]
    )
    me.endpoint.attach(tape)
    tape.begin_step(0)
    mine = torch.ones(3)
    dist.all_reduce(mine)  # another shape
    assert torch.equal(mine, torch.ones(3)) and tape.missed == 1
    assert "all_reduce of Float[3] was not recorded" in tape.first_miss
    dist.all_reduce(mine.to(torch.int64)[:2])  # another dtype
    assert (tape.answered, tape.missed) == (0, 2)
    told = torch.zeros(2)
    dist.broadcast(told, 1)  # the all_reduce before it did not come
    assert torch.equal(told, eight) and (tape.answered, tape.missed) == (1, 3)
    dist.recv(told, 2)  # from one peer, whatever the order among peers
    assert torch.equal(told, eight)
    dist.recv(told, 1)
    assert torch.equal(told, seven) and (tape.answered, tape.missed) == (3, 3)
    dist.recv(told, 1)  # more than were recorded
    assert torch.equal(told, seven) and (tape.answered, tape.missed) == (3, 4)
    tape.begin_step(
        5
    )  # beyond what was recorded: the last recorded step again, and nothing that is left out is missed
    dist.broadcast(told, 1)
    assert torch.equal(told, eight) and tape.missed == 4
    me.endpoint.attach(None)
