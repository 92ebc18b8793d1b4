"""A real Slurm cluster (munged, slurmctld, slurmd) on one machine, for the demo, tests and trials.

Two modes: `namespaces` (root) makes every node a host of its own, with its address, hostname and process
table, which can be powered off, unplugged or frozen; `plain` runs several slurmd on loopback as any user.
"""

from __future__ import annotations

from tm_slurm.localcluster.cluster import LocalCluster
from tm_slurm.localcluster.errors import LocalClusterError
from tm_slurm.localcluster.status import ClusterStatus, NodeStatus

__all__ = ["ClusterStatus", "LocalCluster", "LocalClusterError", "NodeStatus"]
