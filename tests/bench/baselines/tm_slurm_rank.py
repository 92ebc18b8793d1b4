"""A rank of tm_slurm: tm_slurm.examples.char_gpt, and a line in the step log for each step.

A shadow step of a standby is logged as well; it has the number of a step that others have done, so it is
never a new one.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import tm_slurm
from baselines.run_files import RunFiles
from tm_slurm.examples.char_gpt import build, train_step
from tm_slurm.examples.char_gpt_options import read_options


def main(directory: str) -> None:
    writer = RunFiles(Path(directory)).writer()
    options = read_options(tm_slurm.options())
    runtime = tm_slurm.Runtime(functools.partial(build, options=options))
    for state, step in runtime:
        with runtime.attempt():
            runtime.report(train_step(state, step))
            writer.done(state["role"].rank, step)


if __name__ == "__main__":
    main(sys.argv[1])
