"""Trains a byte-level GPT on real text: data-parallel, sharded, tensor-parallel, in a pipeline, compiled.

    python -m tm_slurm.examples.char_gpt [configs/char_gpt.yaml]     one process, here
    tm-slurm submit configs/char_gpt.yaml                            a Slurm job that survives drains

All that makes it survive is that `build` and `train_step` are functions of what they are given. Options: see
char_gpt_options.
"""

from __future__ import annotations

import functools
import math
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

import tm_slurm
from tm_slurm.examples.char_gpt_data import Batches, read_text
from tm_slurm.examples.char_gpt_model import CharGpt
from tm_slurm.examples.char_gpt_options import Options, OptionsError, read_options
from tm_slurm.examples.char_gpt_parallel import Divided, compile_blocks, divide, loss_of

if TYPE_CHECKING:
    from tm_slurm.runtime import Role

DEFAULT_STEPS = 200


def build(role: Role, options: Options) -> dict[str, Any]:
    """The model, optimizer, schedule and data of one rank.

    The weights are the same on every rank, or parts of the same; dropout and data differ between replicas and
    shards. Raises OptionsError when the layout does not fit the number of ranks.
    """
    layout = options.parallel.of(role.world_size)
    torch.manual_seed(options.seed)
    whole = CharGpt(options.model).to(role.device)
    torch.manual_seed(options.seed + 1 + role.rank // layout.tp)
    model: torch.nn.Module = whole
    divided = None
    if layout.divides:
        divided = divide(whole, layout, options, role.device)
        model = divided.model
    else:
        if options.compile:
            compile_blocks(whole, options)
        if role.world_size > 1:
            model = DistributedDataParallel(whole)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, functools.partial(warm_up, options.warmup_steps))
    replica, rest = divmod(role.rank, layout.pp * layout.shard * layout.tp)
    data = Batches(
        read_text(options.data),
        batch_size=options.batch_size,
        context=options.model.context,
        seed=options.seed,
        rank=replica * layout.shard + rest // layout.tp % layout.shard,
    )
    return {
        "model": model,
        "optimizer": optimizer,
        "schedule": schedule,
        "data": data,
        "options": options,
        "role": role,
        "divided": divided,
    }


def warm_up(warmup_steps: int, step: int) -> float:
    """The learning rate's factor: up to 1 in `warmup_steps` steps, then constant."""
    return min((step + 1) / max(warmup_steps, 1), 1.0)


def train_step(state: dict[str, Any], step: int) -> dict[str, Any]:
    """One step. Metrics: `loss`, in nats per byte of this rank's (last) batch.

    Every `eval_every` steps `validation_bits_per_byte` is added, and printed by rank 0. A rank that has the
    whole model evaluates alone, after its step; else all do together, before the next one.
    """
    divided: Divided | None = state["divided"]
    if divided is not None:
        found = _evaluation(state, step)
    state["optimizer"].zero_grad()
    if divided is not None:
        inputs, targets = _batch(state, step)
        loss = divided.clip(state["options"].clip_norm, divided.backward(inputs, targets))
    else:
        for share in tm_slurm.shares():  # one, unless a node was lost and there is none in its place
            with share:
                inputs, targets = _batch(state, step)
                loss = loss_of(state["model"](inputs), targets)
                loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(state["model"].parameters(), state["options"].clip_norm)
    state["optimizer"].step()
    state["schedule"].step()
    if divided is None:
        found = _evaluation(state, step + 1) if state["role"].rank == 0 else {}
    return {"loss": loss.detach(), **found}


def _batch(state: dict[str, Any], step: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = (part.to(state["role"].device) for part in state["data"].training(step))
    return inputs, targets


def _evaluation(state: dict[str, Any], done: int) -> dict[str, torch.Tensor]:
    """What there is to say of the model after so many steps."""
    options = state["options"]
    if not done or not options.eval_every or done % options.eval_every:
        return {}
    found = evaluate(state, options.eval_batches)
    if state["role"].rank == 0:
        print(f"char_gpt: step={done} validation_bits_per_byte={found:.3f}", flush=True)
    return {"validation_bits_per_byte": found}


@torch.no_grad()
def evaluate(state: dict[str, Any], batches: int) -> torch.Tensor:
    """Bits per byte on the validation text.

    Draws no random number, and calls no collective where this rank has the whole model, so training does not
    notice.
    """
    model, divided, device = state["model"], state["divided"], state["role"].device
    whole = model.module if isinstance(model, DistributedDataParallel) else model
    was_training = model.training
    model.eval()
    losses = []
    for number in range(batches):
        inputs, targets = (part.to(device) for part in state["data"].validation(number))
        losses.append(loss_of(whole(inputs), targets) if divided is None else divided.loss(inputs, targets))
    model.train(was_training)
    return torch.stack(losses).mean() / math.log(2)


def main(arguments: list[str]) -> int:
    """Trains; rank 0 ends with one line of results. Exit code 2 for a wrong option."""
    path = arguments[0] if arguments else None
    try:
        options = read_options(tm_slurm.options(path))
        steps = _steps(path)
        read_text(options.data)
    except ValueError as error:
        print(f"char_gpt: {error}", file=sys.stderr)
        return 2
    try:
        result = tm_slurm.run(functools.partial(build, options=options), train_step, steps=steps)
    except OptionsError as error:
        print(f"char_gpt: {error}", file=sys.stderr)
        return 2
    if result.role.rank != 0:
        return 0
    if result.state["divided"] is not None:
        print(f"char_gpt: trained steps={result.step} loss={result.metrics['loss']:.3f}", flush=True)
        return 0
    found = float(evaluate(result.state, 8 * options.eval_batches))
    unigram = result.state["data"].text.unigram_entropy()
    size = sum(parameter.numel() for parameter in result.state["model"].parameters())
    print(
        f"char_gpt: trained steps={result.step} parameters={size} validation_bits_per_byte={found:.3f} "
        f"unigram_entropy_bits_per_byte={unigram:.3f}",
        flush=True,
    )
    return 0


def _steps(path: str | None) -> int:
    """The config file's number of steps; inside a job, `run` takes the job's."""
    if path is None:
        return DEFAULT_STEPS
    from tm_slurm.config import load

    return load(path).train.steps or DEFAULT_STEPS


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
