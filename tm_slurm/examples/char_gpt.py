"""Trains a byte-level GPT on real text, data-parallel over whatever process group there is.

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
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import tm_slurm
from tm_slurm.examples.char_gpt_data import Batches, read_text
from tm_slurm.examples.char_gpt_model import CharGpt
from tm_slurm.examples.char_gpt_options import Options, read_options

if TYPE_CHECKING:
    from tm_slurm.runtime import Role

DEFAULT_STEPS = 200


def build(role: Role, options: Options) -> dict[str, Any]:
    """The model, optimizer, schedule and data of one rank.

    The weights are the same on every rank; dropout and data differ.
    """
    torch.manual_seed(options.seed)
    model: torch.nn.Module = CharGpt(options.model).to(role.device)
    torch.manual_seed(options.seed + 1 + role.rank)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, functools.partial(warm_up, options.warmup_steps))
    if role.world_size > 1:
        model = DistributedDataParallel(model)
    data = Batches(
        read_text(options.data),
        batch_size=options.batch_size,
        context=options.model.context,
        seed=options.seed,
        rank=role.rank,
    )
    return {
        "model": model,
        "optimizer": optimizer,
        "schedule": schedule,
        "data": data,
        "options": options,
        "role": role,
    }


def warm_up(warmup_steps: int, step: int) -> float:
    """The learning rate's factor: up to 1 in `warmup_steps` steps, then constant."""
    return min((step + 1) / max(warmup_steps, 1), 1.0)


def train_step(state: dict[str, Any], step: int) -> dict[str, Any]:
    """One step. Metrics: `loss`, in nats per byte of this rank's (last) batch.

    Every `eval_every` steps rank 0 adds, and prints, `validation_bits_per_byte`.
    """
    options, role, model = state["options"], state["role"], state["model"]
    state["optimizer"].zero_grad()
    for share in tm_slurm.shares():  # one, unless a node was lost and there is none in its place
        with share:
            inputs, targets = (part.to(role.device) for part in state["data"].training(step))
            loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip_norm)
    state["optimizer"].step()
    state["schedule"].step()
    metrics = {"loss": loss.detach()}
    if role.rank == 0 and options.eval_every and (step + 1) % options.eval_every == 0:
        metrics["validation_bits_per_byte"] = found = evaluate(state, options.eval_batches)
        print(f"char_gpt: step={step + 1} loss={loss:.3f} validation_bits_per_byte={found:.3f}", flush=True)
    return metrics


@torch.no_grad()
def evaluate(state: dict[str, Any], batches: int) -> torch.Tensor:
    """Bits per byte on the validation text.

    Draws no random number and calls no collective, so training does not notice.
    """
    model, device = state["model"], state["role"].device
    if isinstance(model, DistributedDataParallel):
        model = model.module
    was_training = model.training
    model.eval()
    losses = []
    for number in range(batches):
        inputs, targets = (part.to(device) for part in state["data"].validation(number))
        losses.append(cross_entropy(model(inputs).flatten(0, 1), targets.flatten()))
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
    result = tm_slurm.run(functools.partial(build, options=options), train_step, steps=steps)
    if result.role.rank == 0:
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
