"""What runs in each rank process: the step loop, the vote, the switch; and what a training script calls."""

from tm_slurm.runtime.api import Result, options, run
from tm_slurm.runtime.loop import Runtime
from tm_slurm.runtime.role import Role
from tm_slurm.runtime.sharing import Share, shares

__all__ = ["Result", "Role", "Runtime", "Share", "options", "run", "shares"]
