"""sbatch's options in a configuration: which may be passed on as they are, and what a constraint names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tm_slurm.config.impossible import ImpossibleValue

# What the configuration says in its own words, and the key that the option would contradict.
_OPTIONS_WITH_A_KEY = {
    "account": "job.account",
    "batch": "job.batch_feature",
    "comment": None,
    "constraint": "job.constraint",
    "cpus-per-gpu": "job.cpus_per_rank",
    "cpus-per-task": "job.cpus_per_rank",
    "error": None,
    "exclude": "job.exclude",
    "gpus-per-node": "job.gpus_per_rank",
    "gpus-per-task": "job.gpus_per_rank",
    "job-name": "job.name",
    "mem": "job.memory",
    "no-kill": None,
    "nodes": "job.nodes",
    "ntasks": "job.ranks_per_node",
    "ntasks-per-node": "job.ranks_per_node",
    "open-mode": None,
    "output": None,
    "partition": "job.partition",
    "qos": "job.qos",
    "requeue": None,
    "reservation": "job.reservation",
    "signal": "job.signal_delay_s",
    "time": "job.time_limit",
    "tm-lead": "policy.window_lead_s",
    "tm-off": "policy.signed_events",
    "tm-policy": "policy.on_no_standby",
    "tm-standbys": "job.standbys",
}


def check_sbatch_options(options: Mapping[str, Any]) -> None:
    """Raise ImpossibleValue for an option that is none, has no one-line value, or has a key of its own."""
    for name, value in options.items():
        if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
            raise ImpossibleValue("sbatch", f"expected a long option such as mail-user, found {name!r}")
        if name in _OPTIONS_WITH_A_KEY:
            key = _OPTIONS_WITH_A_KEY[name]
            advice = f"use {key}" if key else "the job needs its own"
            raise ImpossibleValue("sbatch", f"{name!r} cannot be set here: {advice}")
        if not isinstance(value, (str, int, float, bool)):
            raise ImpossibleValue("sbatch", f"expected text, a number or true for {name!r}, found {value!r}")
        if not str(value).isprintable():
            raise ImpossibleValue(
                "sbatch", f"expected one line of printable text for {name!r}, found {value!r}"
            )


def features_of(constraint: str) -> list[str]:
    """Return the names in a constraint, without counts: `[gpu*5&service*1]` names gpu and service."""
    return [name.partition("*")[0] for name in re.split(r"[\[\]()&|,]+", constraint) if name]


def constraint_of_one(constraint: str | None, batch_feature: str | None) -> str | None:
    """Return what `constraint`, of a job whose batch script is on a node with `batch_feature`, asks of each
    of its other nodes: `gpu` of `[gpu*5&service*1]`. Alternatives (`|`) are left as they are.
    """
    if constraint is None or batch_feature is None or "|" in constraint:
        return constraint
    names = [name for name in features_of(constraint) if name != batch_feature]
    return "&".join(names) or None
