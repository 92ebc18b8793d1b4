"""How char_gpt is spread over ranks: replicas (dp), FSDP2 shards, tensor parallel (tp), a 1F1B pipeline (pp).

Ranks are numbered with dp outermost, then pp, shard and tp: ranks that talk most sit on one node, replicas of
one another on different ones. All of it is ordinary torch, over one device mesh.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from tm_slurm.examples.char_gpt_model import BYTES, CharGpt
from tm_slurm.examples.char_gpt_options import Options, ParallelOptions


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Nats per byte: logits [batch, length, 256], targets [batch, length]."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Divided:
    """One rank's part of a model that no rank has alone."""

    model: nn.Module
    mesh: DeviceMesh
    schedule: Schedule1F1B | None

    def backward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Gradients of this part for one batch; its loss (of a pipeline, at the last stage alone)."""
        if self.schedule is not None:
            return self._through_pipeline(self.schedule.step, inputs, targets)
        loss = loss_of(self.model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss alone, the same on all stages. All ranks call it together."""
        if self.schedule is None:
            return loss_of(self.model(inputs), targets)
        loss = self._through_pipeline(self.schedule.eval, inputs, targets)
        dist.all_reduce(loss, group=self.mesh["pp"].get_group())
        return loss

    def clip(self, limit: float, loss: torch.Tensor) -> torch.Tensor:
        """Scales the gradients of the whole model to a norm of at most `limit`; the loss, on all stages."""
        parameters = [each for each in self.model.parameters() if each.grad is not None]
        norm = _norm([each.grad for each in parameters])  # type: ignore[misc]
        if self.schedule is not None:
            totals = torch.stack((norm.square(), loss))
            dist.all_reduce(totals, group=self.mesh["pp"].get_group())
            norm, loss = totals[0].sqrt(), totals[1]
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        with torch.no_grad():
            for each in parameters:
                _local(each.grad).mul_(factor)
        return loss

    def _through_pipeline(self, go: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        stage, stages = self.mesh.get_local_rank("pp"), self.mesh["pp"].size()
        losses: list[torch.Tensor] = []
        given = (inputs,) if stage == 0 else ()
        if stage == stages - 1:
            go(*given, target=targets, losses=losses, return_outputs=False)
            return torch.stack([loss.detach() for loss in losses]).mean()
        go(*given, return_outputs=False)
        return torch.zeros((), device=inputs.device)


def divide(model: CharGpt, layout: ParallelOptions, options: Options, device: torch.device) -> Divided:
    """This rank's part of `model`, which every rank has built alike. All ranks call it together."""
    sizes = {"dp": layout.dp, "pp": layout.pp, "shard": layout.shard, "tp": layout.tp}
    mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if layout.pp > 1:
        model.keep_stage(mesh.get_local_rank("pp"), layout.pp)
    if layout.tp > 1:
        _share_layers(model, mesh["tp"])
    if options.compile:
        compile_blocks(model, options)
    part: nn.Module = model
    if layout.shard > 1 or (layout.tp > 1 and layout.dp > 1):
        _shard(model, mesh["dp", "shard"] if layout.dp > 1 else mesh["shard"], keep=layout.pp > 1)
    elif layout.dp > 1:
        part = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    schedule = _pipeline(part, mesh, layout, options, device) if layout.pp > 1 else None
    return Divided(part, mesh, schedule)


def compile_blocks(model: CharGpt, options: Options) -> None:
    """Block by block: the second one finds the first one's code."""
    for block in model.blocks:
        block.compile(dynamic=options.dynamic_shapes)


def _share_layers(model: CharGpt, mesh: DeviceMesh) -> None:
    """Whole heads, and columns of the feed-forward layers, to each rank."""
    plan = {
        "blocks.*.query_key_value": ColwiseParallel(),
        "blocks.*.attention_out": RowwiseParallel(),
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
    }
    with torch.no_grad():
        for (
            block
        ) in model.blocks:  # rows of query, key, value: by rank, so that a slice of them is whole heads
            weight: torch.Tensor = block.query_key_value.weight  # type: ignore[union-attr, assignment]
            by_rank = weight.view(3, mesh.size(), -1, weight.shape[1]).transpose(0, 1)
            weight.copy_(by_rank.flatten(0, 2).clone())
    parallelize_module(model, mesh, plan, src_data_rank=None)


def _shard(model: CharGpt, mesh: DeviceMesh, *, keep: bool) -> None:
    """`keep`: gathered parameters from the first to the last micro-batch of a step."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=not keep)
    fully_shard(model, mesh=mesh, reshard_after_forward=not keep)


class _Stage(PipelineStage):
    """A stage of known shapes: there is nothing to vote on with the others before the first step."""

    def _warmup_forward_vote(self, has_backward: bool, received_acc: torch.Tensor | None = None) -> Any:
        return torch.ones(1, dtype=torch.int32, device=self.device)

    def _warmup_backward_result(self, received_result: torch.Tensor | None = None) -> Any:
        return torch.ones(1, dtype=torch.int32, device=self.device)


def _pipeline(
    part: nn.Module, mesh: DeviceMesh, layout: ParallelOptions, options: Options, device: torch.device
) -> Schedule1F1B:
    stage = mesh.get_local_rank("pp")
    size = (options.batch_size // layout.micro_batches, options.model.context)
    text = torch.empty(size, dtype=torch.int64, device=device)
    hidden = torch.empty(*size, options.model.width, device=device, requires_grad=True)
    logits = torch.empty(*size, BYTES, device=device, requires_grad=True)
    staged = _Stage(
        part,
        stage,
        layout.pp,
        device,
        input_args=text if stage == 0 else hidden,
        output_args=logits if stage == layout.pp - 1 else hidden,
        group=mesh["pp"].get_group(),
    )
    return Schedule1F1B(staged, n_microbatches=layout.micro_batches, loss_fn=loss_of)


def _local(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Of all gradients of a stage, however they are spread over its ranks; the same on all of these."""
    squares: dict[tuple[dist.ProcessGroup, ...], torch.Tensor] = {}
    for each in gradients:
        square = _local(each).square().sum()
        groups = _spread_over(each)
        squares[groups] = squares[groups] + square if groups in squares else square
    for groups, square in squares.items():
        for group in groups:
            dist.all_reduce(square, group=group)
    return torch.stack(list(squares.values())).sum().sqrt()


def _spread_over(tensor: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The groups whose ranks each have another part of `tensor`."""
    if not isinstance(tensor, DTensor):
        return ()
    mesh, placements = tensor.device_mesh, tensor.placements
    return tuple(mesh.get_group(axis) for axis, how in enumerate(placements) if not how.is_replicate())
