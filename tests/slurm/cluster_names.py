"""Names of clusters that tests start, so that a later test run can tell which were left behind."""

from __future__ import annotations

import os
import re

from tm_slurm.localcluster.processes import ProcessId


def own_name(kind: str) -> str:
    """A cluster name that says which test process it belongs to."""
    identity = ProcessId.of(os.getpid())
    assert identity is not None
    return f"test-{identity.pid}-{identity.start}-{kind}"


def was_left_behind(name: str) -> bool:
    """Whether it is the name of a cluster whose test process is gone."""
    match = re.fullmatch(r"test-(\d+)-(\d+)-\w+", name)
    return match is not None and not ProcessId(int(match[1]), int(match[2])).alive()
