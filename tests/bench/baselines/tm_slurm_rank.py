"""A rank of tm_slurm: tm_slurm.examples.char_gpt, and a line in the step log for each step but the first."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import tm_slurm
from baselines.run_files import RunFiles
from tm_slurm.examples.char_gpt import build, train_step
from tm_slurm.examples.char_gpt_options import read_options


def is_real(runtime: tm_slurm.Runtime, step: int) -> bool:
    """Whether the step that has been done is one of the training's: no shadow step in a standby's sandbox.

    The runtime counts real steps alone, and its count is 0 while it stands by. So of step 0 that cannot be
    said, and it counts as none."""
    return step == runtime.step > 0


def main(directory: str) -> None:
    writer = RunFiles(Path(directory)).writer()
    options = read_options(tm_slurm.options())
    runtime = tm_slurm.Runtime(functools.partial(build, options=options))
    for state, step in runtime:
        with runtime.attempt():
            runtime.report(train_step(state, step))
            if is_real(runtime, step):
                writer.done(state["role"].rank, step)


if __name__ == "__main__":
    main(sys.argv[1])
