"""FSDP2, tensor parallel, pipelines, meshes, ZeRO, checkpoints: a replacement halfway changes no bit."""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

import pytest
import replacement
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from replacement import Training, replaced
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.out = nn.Linear(64, 256), nn.Linear(256, 64), nn.Linear(64, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.out(self.down(torch.relu(self.up(inputs))))


class Sharded(Training):
    """FSDP2 over all ranks."""

    def build(self) -> None:
        model = Net()
        mesh = init_device_mesh("cpu", (self.size,), mesh_dim_names=("dp",))
        self.shard(model, mesh)
        self.replica = self.rank

    def shard(self, model: Net, mesh: Any) -> None:
        for layer in (model.up, model.down, model.out):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        self.modules = [model]
        self.optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)]

    def step(self, step: int) -> None:
        inputs, targets = self.data(step, self.replica)
        self.optimizers[0].zero_grad()
        (self.modules[0](inputs) - targets).square().mean().backward()
        self.optimizers[0].step()


class Hybrid(Sharded):
    """FSDP2 with replicas: 2 x 2, shards in the inner dimension."""

    def build(self) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        self.shard(Net(), mesh)
        self.replica = self.rank


class TensorParallel(Sharded):
    """A 2 x 2 mesh: FSDP2 over dp, tensor parallel over tp."""

    mesh_shape = (2, 2)
    names = ("dp", "tp")

    def build(self) -> None:
        mesh = init_device_mesh("cpu", self.mesh_shape, mesh_dim_names=self.names)
        model = Net()
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan, src_data_rank=None)
        self.shard(model, mesh["dp"])
        self.replica = mesh.get_local_rank("dp")


class ThreeDimensions(TensorParallel):
    mesh_shape = (1, 2, 2)
    names = ("pp", "dp", "tp")


class Pipeline(Training):
    """1F1B over three stages."""

    def build(self) -> None:
        stages = [
            nn.Sequential(nn.Linear(64, 32), nn.ReLU()),
            nn.Sequential(nn.Linear(32, 32), nn.ReLU()),
            nn.Linear(32, 8),
        ]
        model = stages[self.rank]
        shapes = [torch.empty(4, width, requires_grad=width == 32) for width in (64, 32, 32, 8)]
        stage = PipelineStage(
            model,
            self.rank,
            self.size,
            torch.device("cpu"),
            input_args=(shapes[self.rank],),
            output_args=(shapes[self.rank + 1],),
        )
        self.train_stage(model, stage)

    def train_stage(self, model: nn.Module, stage: PipelineStage) -> None:
        self.stage = stage
        self.schedule = Schedule1F1B(self.stage, n_microbatches=4, loss_fn=nn.MSELoss())
        self.modules = [model]
        self.optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3)]

    def step(self, step: int) -> None:
        inputs, targets = self.data(step, 0)
        self.optimizers[0].zero_grad()
        if self.rank == 0:
            self.schedule.step(inputs)
        elif self.rank == self.size - 1:
            self.schedule.step(target=targets)
        else:
            self.schedule.step()
        self.optimizers[0].step()

    def warm_up(self, endpoint: Any) -> None:
        """The stages' vote at the first step is answered as it was recorded: all have static shapes."""
        self.stage._warmup_backward_result = lambda received_result=None: torch.ones(1, dtype=torch.int32)
        super().warm_up(endpoint)


class Zero(Training):
    """DDP whose optimizer state is spread over the ranks; its step broadcasts parameters."""

    def build(self) -> None:
        model = Net()
        self.ddp = DistributedDataParallel(model, init_sync=not self.joiner)
        self.modules = [model]
        self.optimizers = [ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)]

    def step(self, step: int) -> None:
        inputs, targets = self.data(step, self.rank)
        self.optimizers[0].zero_grad()
        (self.ddp(inputs) - targets).square().mean().backward()
        self.optimizers[0].step()

    def warm_up(self, endpoint: Any) -> None:
        for _ in range(3):
            super().warm_up(endpoint)


class Checkpointed(Sharded):
    """FSDP2 that saves and loads a distributed checkpoint around every step."""

    def step(self, step: int) -> None:
        super().step(step)
        if step == 0:  # a joiner's shadow step
            return
        shared: list[Any] = [tempfile.mkdtemp() if self.rank == 0 else None]
        dist.broadcast_object_list(shared, 0)
        state = {"model": self.modules[0].state_dict()}
        dcp.save(state, checkpoint_id=shared[0])
        before = self.digest()
        for parameter in self.modules[0].parameters():
            replacement.local(parameter).zero_()
        dcp.load(state, checkpoint_id=shared[0])
        dist.barrier()  # everybody has read it
        if self.rank == 0:
            shutil.rmtree(shared[0])
        self.modules[0].load_state_dict(state["model"])
        assert self.digest() == before


@pytest.mark.parametrize(
    ("kind", "size", "leavers"),
    [
        (Sharded, 3, [1]),
        (Hybrid, 4, [0]),
        (TensorParallel, 4, [2]),
        (TensorParallel, 4, [0, 3]),
        (ThreeDimensions, 4, [1]),
        (Pipeline, 3, [1]),
        (Pipeline, 3, [0, 2]),
        (Zero, 3, [2]),
        (Checkpointed, 3, [0]),
    ],
)
def test_a_replacement_changes_no_bit(kind: type[Training], size: int, leavers: list[int]) -> None:
    assert replaced(kind, size, leavers) == replacement.reference(kind, size)
