"""A planned move without delta groups (comm.delta_groups: false): what TrainMover's evaluation calls
Migration Naive, to be measured beside ours.

All ranks end their process groups and all that is built on them, and build again together, the joiner among
them; their state is in memory meanwhile. TCP links between processes that stay are kept, so it costs less
than it might. A failure meanwhile is not survived.
"""

from __future__ import annotations

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from tm_slurm.runtime.role import Role
from tm_slurm.runtime.surviving import Surviving
from tm_slurm.runtime.worker import Worker
from tm_slurm.state import Stored, pack, unpack


class Naive(Surviving):
    """The part of the runtime that is about making everything anew."""

    def _end_groups(self) -> Stored:
        """Take the state out of the role, and end it. Before the new epoch: what others send in that is for
        groups that are not there yet."""
        kept = pack(self.state, self.step)
        self._mark = None
        self.state.clear()
        dist.destroy_process_group()
        return kept

    def _build_anew(self, worker: Worker, kept: Stored) -> None:
        """With everybody else, at the new epoch."""
        rank = self._rank_of(worker)
        dist.init_process_group("tm", store=HashStore(), rank=rank, world_size=worker.world_size)
        self._take_role(self.role)
        self.step = self._first_step = unpack(self.state, kept)

    def _take_role(self, role: Role) -> None:
        """Build the state of a role."""
        raise NotImplementedError
