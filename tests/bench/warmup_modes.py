"""Trainings for bench_warmup: one small residual network in every way that ranks share the work."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from replacement import Training
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

WIDTH, LAYERS, ROWS, MICROBATCHES = 256, 6, 64, 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(nn.functional.gelu(self.up(self.norm(hidden))))


def network(layers: int) -> nn.Sequential:
    return nn.Sequential(*(Layer() for _ in range(layers)))


def split(model: nn.Sequential, mesh: Any) -> None:
    for layer in model:
        parallelize_module(
            layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()}, src_data_rank=None
        )


class Mode(Training):
    """`ranks`: of the world; `joins`: the one that is replaced; `cold`, `identity`: whether a joiner can come
    without a recording at all."""

    ranks, joins = 2, 1
    cold = identity = True
    layers = LAYERS

    def build(self) -> None:
        model = network(self.layers)
        self.run = self.wrapped(model)
        self.finish([model])

    def wrapped(self, model: nn.Module) -> Any:
        return model

    def finish(self, modules: Iterable[nn.Module]) -> None:
        self.modules = list(modules)
        parameters = [parameter for module in self.modules for parameter in module.parameters()]
        self.optimizers = [torch.optim.AdamW(parameters, lr=1e-4, foreach=False)]

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * step + self.rank)
        return (torch.randn(self.rows(step), WIDTH, generator=generator) for _ in range(2))  # type: ignore

    def rows(self, step: int) -> int:
        return ROWS

    def step(self, step: int) -> None:
        inputs, targets = self.batch(step)
        self.optimizers[0].zero_grad()
        (self.run(inputs) - targets).square().mean().backward()
        self.share_gradients()
        self.optimizers[0].step()

    def share_gradients(self) -> None:
        for parameter in self.modules[0].parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= self.size


class Eager(Mode):
    """Data parallel, gradients averaged by hand."""


class Compiled(Mode):
    layers = 2  # compiling takes long enough

    def wrapped(self, model: nn.Module) -> Any:
        return torch.compile(model)


class CompiledDynamic(Mode):
    layers = 2

    def wrapped(self, model: nn.Module) -> Any:
        return torch.compile(model, dynamic=True)

    def rows(self, step: int) -> int:
        return ROWS + 8 * (step % 2)


class Replicated(Mode):
    """DDP. A cold joiner would have another bucket layout than the others, and all would hang."""

    cold = False

    def wrapped(self, model: nn.Module) -> Any:
        return DistributedDataParallel(model, bucket_cap_mb=2, init_sync=not self.joiner)

    def share_gradients(self) -> None:
        pass


class Sharded(Mode):
    """FSDP2."""

    def wrapped(self, model: nn.Sequential) -> Any:
        mesh = init_device_mesh("cpu", (self.size,), mesh_dim_names=("shard",))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    def share_gradients(self) -> None:
        pass


class Tensors(Mode):
    """Tensor parallel."""

    def wrapped(self, model: nn.Sequential) -> Any:
        split(model, init_device_mesh("cpu", (self.size,), mesh_dim_names=("tp",)))
        return model

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(step)
        return (torch.randn(ROWS, WIDTH, generator=generator) for _ in range(2))  # type: ignore

    def share_gradients(self) -> None:
        pass


class Pipeline(Mode):
    """1F1B over four stages that tell each other their shapes in pickles; identity answers are no pickles."""

    ranks, joins = 4, 1
    cold = identity = False

    def build(self) -> None:
        model = network(2 if 0 < self.rank < self.size - 1 else 1)
        self.begin(model, self.rank, self.size, None)

    def begin(self, model: nn.Module, number: int, stages: int, group: Any) -> None:
        self.number, self.stages = number, stages
        self.stage = PipelineStage(model, number, stages, torch.device("cpu"), group=group)
        self.schedule = Schedule1F1B(self.stage, n_microbatches=MICROBATCHES, loss_fn=nn.MSELoss())
        self.finish([model])

    def step(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        inputs, targets = (torch.randn(ROWS, WIDTH, generator=generator) for _ in range(2))
        self.optimizers[0].zero_grad()
        if self.number == 0:
            self.schedule.step(inputs)
        elif self.number == self.stages - 1:
            self.schedule.step(target=targets)
        else:
            self.schedule.step()
        self.share_gradients()
        self.optimizers[0].step()

    def share_gradients(self) -> None:
        pass


class Mesh(Pipeline):
    """Data, tensor and pipeline parallel on a 2 x 2 x 2 mesh."""

    ranks, joins = 8, 3

    def build(self) -> None:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        self.replicas = mesh.get_group("dp")
        model = network(2)
        split(model, mesh["tp"])
        self.begin(model, mesh.get_local_rank("pp"), 2, mesh.get_group("pp"))

    def share_gradients(self) -> None:
        for parameter in self.modules[0].parameters():
            grad = parameter.grad
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            dist.all_reduce(local, group=self.replicas)
            local /= self.replicas.size()


MODES: dict[str, type[Mode]] = {
    "eager": Eager,
    "compile": Compiled,
    "compile_dynamic": CompiledDynamic,
    "ddp": Replicated,
    "fsdp2": Sharded,
    "tensor_parallel": Tensors,
    "pipeline_1f1b": Pipeline,
    "mesh_2x2x2": Mesh,
}
