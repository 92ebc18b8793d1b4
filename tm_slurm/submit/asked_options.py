"""What was asked by `--tm-standbys`, `--tm-policy`, `--tm-lead` and `--tm-off` on sbatch, srun or salloc: the
SPANK plugin checks them when they are typed and leaves them in the job's environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tm_slurm.config import ConfigError
from tm_slurm.slurm import environment

STANDBYS = "TM_SLURM_STANDBYS"
POLICY = "TM_SLURM_POLICY"
LEAD_MINUTES = "TM_SLURM_LEAD_MINUTES"
OFF = "TM_SLURM_OFF"


def asked_overrides(inherited: Mapping[str, str], *, holds_nodes: bool = True) -> dict[str, Any]:
    """Return the configuration keys, with their values, that the options stand for.

    `--tm-standbys=N`: N of the job's nodes are in reserve, all others are active, whatever the configuration
    says. Raises ConfigError when that leaves no active node, or a variable holds nonsense. Without
    `holds_nodes` this job is only to ask for the nodes, and N comes on top of the active ones.
    """
    asked: dict[str, Any] = {}
    if STANDBYS in inherited:
        standbys = _number(inherited[STANDBYS], "--tm-standbys")
        asked["job.standbys"] = standbys
    if STANDBYS in inherited and holds_nodes:
        count = _number(environment.read(environment.JOB_NODE_COUNT, inherited) or "", "SLURM_JOB_NUM_NODES")
        if standbys >= count:
            raise ConfigError(
                f"--tm-standbys={standbys}: the job has {count} nodes, so none is left that could be active: "
                f"use sbatch --nodes={standbys + 1} or more"
            )
        asked["job.nodes"] = count - standbys
    if POLICY in inherited:
        asked["policy.on_no_standby"] = inherited[POLICY].split(",")
    if LEAD_MINUTES in inherited:
        asked["policy.window_lead_s"] = 60.0 * _number(inherited[LEAD_MINUTES], "--tm-lead")
    if OFF in inherited:
        asked["policy.signed_events"] = False
    return asked


def _number(text: str, what: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise ConfigError(f"{what}: expected a number, found {text!r}")
    return int(text)
