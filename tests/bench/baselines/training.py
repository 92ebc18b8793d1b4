"""char_gpt as a rank of any rival trains it: the model, data and step of tm_slurm.examples.char_gpt, the
state in one file, a line in the step log for each step."""

from __future__ import annotations

import os
from typing import Any

import torch

from baselines.run_files import RunFiles
from tm_slurm.examples.char_gpt import build, train_step
from tm_slurm.examples.char_gpt_options import read_options
from tm_slurm.runtime import Role

STEPS = 100_000
"""More than are ever done: a run is ended when its fault is through."""

PARTS = ("model", "optimizer", "schedule")


class Training:
    """One rank's. With more than one rank in `world_size` the default process group must be there:
    DistributedDataParallel goes over it. `data_rank`: whose batches it takes."""

    def __init__(self, files: RunFiles, data_rank: int, world_size: int) -> None:
        self.files = files
        options = read_options(files.options)
        self.state: dict[str, Any] = build(Role(rank=data_rank, world_size=world_size), options)

    def step(self, step: int) -> None:
        train_step(self.state, step)

    def state_dict(self) -> dict[str, Any]:
        """Parameters, optimizer and schedule."""
        return {part: self.state[part].state_dict() for part in PARTS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for part in PARTS:
            self.state[part].load_state_dict(state[part])

    def save(self, steps_done: int) -> None:
        """Replace the run's checkpoint: of so many steps."""
        path = self.files.checkpoint
        made = path.with_suffix(f".{os.getpid()}")
        torch.save({**self.state_dict(), "steps_done": steps_done}, made)
        made.replace(path)
        self.files.saved(steps_done)

    def load(self) -> int:
        """Go back to the run's checkpoint, if there is one; how many steps are done then."""
        if not self.files.checkpoint.exists():
            return 0
        found = torch.load(self.files.checkpoint, weights_only=True)
        self.load_state_dict(found)
        return int(found["steps_done"])
