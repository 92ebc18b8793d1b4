"""salloc's options for the nodes of launch mode `allocation`: what sbatch would have been asked for."""

from __future__ import annotations

import math
import time

from tm_slurm.config import Config, minutes_of
from tm_slurm.submit.resources import cpus_per_node, gpus_per_node, memory_of

NOT_FOR_SALLOC = frozenset(
    {"array", "begin", "error", "export", "input", "open-mode", "output", "requeue", "wait", "wrap"}
)
"""sbatch options that are about a batch script."""


def salloc_options(config: Config, *, called: str, begins: float | None = None) -> list[str]:
    """Return the options for the resolved `config`. `called`: what the allocation's name begins with;
    `begins`: Unix seconds before which it is not to start."""
    job = config.job
    options = [
        "--no-shell",
        "--no-kill",
        f"--job-name={called}{job.name}",
        f"--nodes={job.all_nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={cpus_per_node(config)}",
        f"--signal=USR2@{job.signal_delay_s}",
    ]
    minutes = minutes_of(job.time_limit)
    named = {
        "time": "UNLIMITED" if job.time_limit is not None and minutes is None else minutes,
        "partition": job.partition,
        "account": job.account,
        "qos": job.qos,
        "constraint": job.constraint,
        "exclude": job.exclude,
        "reservation": job.reservation,
        "mem": memory_of(config),
        "gpus-per-node": gpus_per_node(config) or None,
        "begin": None if begins is None else f"now+{max(0, math.ceil(begins - time.time()))}seconds",
    }
    further = {name: value for name, value in job.sbatch.items() if name not in NOT_FOR_SALLOC}
    for name, value in {**named, **further}.items():
        if value is True:
            options.append(f"--{name}")
        elif value is not None and value is not False:
            options.append(f"--{name}={value}")
    return options
