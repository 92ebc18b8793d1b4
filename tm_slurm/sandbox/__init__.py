"""The sandbox (TrainMover §4): a standby warms up alone, no call leaves the process."""

from tm_slurm.sandbox.sandbox import Sandbox

__all__ = ["Sandbox"]
