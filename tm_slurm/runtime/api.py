"""The two calls of a training script: `run` and `options`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tm_slurm.config import load
from tm_slurm.runtime.loop import Runtime
from tm_slurm.runtime.role import Role

Build = Callable[[Role], dict[str, Any]]
TrainStep = Callable[[dict[str, Any], int], Mapping[str, Any] | None]


@dataclass(frozen=True)
class Result:
    """What `run` returns on every rank when training is done. `metrics`: what the last step returned."""

    state: dict[str, Any]
    step: int
    role: Role
    metrics: Mapping[str, Any]


def run(build: Build, train_step: TrainStep, *, steps: int | None = None) -> Result:
    """Train for `steps` steps, surviving drains of the nodes it runs on.

    `build(role)` makes the state: a dict whose values with `state_dict`/`load_state_dict` (model, optimizer,
    …) are moved with the rank. It may be called again in the same process for another role.
    `train_step(state, step)` does one ordinary step and may return metrics; "loss" is shown to people. Where
    the job's config has `train.steps`, that number holds. Outside a tm_slurm job everything runs in this one
    process. On a standby that is never needed, `run` does not return: the process ends. ValueError when no
    number of steps is known.
    """
    runtime = Runtime(build, steps=steps)
    metrics: Mapping[str, Any] = {}
    for state, step in runtime:
        with runtime.attempt():
            metrics = train_step(state, step) or {}
            runtime.report(metrics)
    return Result(runtime.state, runtime.step, runtime.role, metrics)


def options(path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """The config's free-form `train.options`: of the running job, else of the config file at `path`, else
    empty."""
    job_dir = os.environ.get("TM_SLURM_JOB_DIR")
    if job_dir is not None:
        return dict(load(Path(job_dir) / "config.yaml").train.options)
    return dict(load(Path(path)).train.options) if path is not None else {}
