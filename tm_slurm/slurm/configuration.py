"""Which cluster the commands of this process would ask, read from slurm.conf without asking anybody."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

_PLACES = tuple(
    Path(place)
    for place in (
        "/etc/slurm/slurm.conf",
        "/run/slurm/conf/slurm.conf",
        "/usr/local/etc/slurm.conf",
        "/etc/slurm-llnl/slurm.conf",
    )
)
"""Where Slurm's packages look when SLURM_CONF is not set."""
_LINE = re.compile(
    r"^\s*(ClusterName|SlurmctldHost|ControlMachine|SlurmctldPort)\s*=\s*([^\s#]+)", re.I | re.M
)


def configuration_file(environment: Mapping[str, str] | None = None) -> Path | None:
    """Return the slurm.conf that a Slurm command would read here, None when there is none.

    A file that SLURM_CONF names is returned whether it is there or not.
    """
    named = (os.environ if environment is None else environment).get("SLURM_CONF")
    if named:
        return Path(named)
    return next((place for place in _PLACES if place.is_file()), None)


def cluster_identity(environment: Mapping[str, str] | None = None) -> str | None:
    """Return what tells this cluster from others, usable as a file name: its name, controller and port.

    The same in a job and on a login node: it comes from what slurm.conf says, not from where the file is.
    None when no slurm.conf can be read here, or it does not name the cluster.
    """
    path = configuration_file(environment)
    try:
        text = "" if path is None else path.read_text(errors="replace")
    except OSError:
        return None
    said: dict[str, str] = {}
    for key, value in _LINE.findall(text):
        said.setdefault(key.lower(), value)
    if "clustername" not in said:
        return None
    controller = said.get("slurmctldhost", said.get("controlmachine", ""))
    words = "@".join((said["clustername"], controller, said.get("slurmctldport", "6817")))
    return re.sub(r"[^\w.@-]", "_", words)
