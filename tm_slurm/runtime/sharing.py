"""The shares of a step's work: this rank's own, and those of absent ranks that it does beside it.

    for share in tm_slurm.shares():
        with share:
            ...forward and backward of the data of share.rank...
    optimizer.step()

Inside an adopted share the random generators, the objects with a state and the buffers are the absent
rank's, so that it draws what that rank would have drawn; gradients add up, and a DistributedDataParallel
among the values of `build` reduces them in the last share alone. Normally there is one share, and entering it
does nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tm_slurm.state import common_objects, give_private, global_generators, take_private

Json = Any


class Share:
    """What one rank has to do in a step. `rank`: whose data it is for."""

    def __init__(self, shares: Shares, rank: int, *, is_last: bool) -> None:
        self.rank = rank
        self._shares = shares
        self._is_last = is_last
        self._entered = contextlib.ExitStack()

    def __enter__(self) -> Share:
        self._entered.enter_context(self._shares.doing(self.rank, is_last=self._is_last))
        return self

    def __exit__(self, *failure: Any) -> None:
        self._entered.__exit__(*failure)


class Shares:
    """Of one process. `adopted`: the absent ranks whose share this one does.

    Their private states are kept as they are now and as they were at the beginning of the step, like this
    rank's own.
    """

    def __init__(self) -> None:
        self.rank = 0
        self._state: Mapping[str, Any] = {}
        self._now: dict[int, Json] = {}
        self._marked: dict[int, Json] = {}
        self._own: Json = None
        self._own_at_vote: Json = {"entries": {}}
        """this rank's own at the beginning of the step; only while there are others"""
        self._is_inside = False
        self._was_called = False
        self._seen: Json = None
        self._drawn_outside = False

    def take_role(self, rank: int, state: Mapping[str, Any]) -> None:
        """From now on this process is `rank`, and does no other one's share."""
        self.rank, self._state = rank, state
        self._now, self._marked = {}, {}

    @property
    def adopted(self) -> list[int]:
        return sorted(self._now)

    # ---- in a step ----

    def begin(self, *, watched: bool) -> None:
        """A step begins. `watched`: see `why_not_shared`."""
        self._was_called = self._drawn_outside = False
        self._seen = global_generators() if watched else None

    def list(self) -> Iterator[Share]:
        """In the order of their ranks."""
        self._was_called = True
        ranks = sorted([self.rank, *self._now])
        for rank in ranks:
            yield Share(self, rank, is_last=rank == ranks[-1])

    @contextlib.contextmanager
    def doing(self, rank: int, *, is_last: bool) -> Iterator[None]:
        """Inside the share of `rank`."""
        if self._is_inside:
            raise RuntimeError(f"the share of rank {rank} is entered inside another: leave that one first")
        self._look_for_draws()
        self._is_inside = True
        try:
            with contextlib.ExitStack() as inside:
                if rank != self.rank:
                    inside.enter_context(self._as(rank, keeps=True))
                for value in () if is_last else self._state.values():
                    if isinstance(value, DistributedDataParallel):
                        inside.enter_context(value.no_sync())
                yield
        finally:
            self._is_inside = False
            if self._seen is not None:
                self._seen = global_generators()

    @contextlib.contextmanager
    def _as(self, rank: int, *, keeps: bool) -> Iterator[None]:
        own = take_private(self._state)
        give_private(self._state, self._now[rank])
        try:
            yield
            if keeps:
                self._now[rank] = take_private(self._state)
        finally:
            give_private(self._state, own)

    def as_adopted(self, rank: int) -> contextlib.AbstractContextManager[None]:
        """The state is that of an absent rank inside."""
        return self._as(rank, keeps=False)

    def check_outside(self) -> None:
        """Gradients are about to be applied."""
        if self._is_inside:
            raise RuntimeError(
                "optimizer.step() inside a share: apply the gradients after the loop over tm_slurm.shares(), "
                "when all shares are done"
            )

    def _look_for_draws(self) -> None:
        if self._seen is not None and global_generators() != self._seen:
            self._drawn_outside = True

    def why_not_shared(self) -> str:
        """Why the watched step that has just ended could not have been done for another rank; "" if it
        could."""
        self._look_for_draws()
        self._seen = None
        if not self._was_called:
            return "its script does not take its work from tm_slurm.shares()"
        if self._drawn_outside:
            return "its script draws random numbers outside the shares of tm_slurm.shares()"
        return ""

    # ---- between steps ----

    def commit(self) -> None:
        """A step is applied. What an absent rank has in common with this one, and its share did not change,
        is what it is here (a schedule, stepped after the optimizer)."""
        if not self._now:
            return
        own = take_private(self._state)
        for rank, now in self._now.items():
            before, entries = self._marked[rank]["entries"], dict(now["entries"])
            for key in now["objects"]:
                if entries[key] == before[key] == self._own["entries"][key]:
                    entries[key] = own["entries"][key]
            self._marked[rank] = {**now, "entries": entries}
        self._now = dict(self._marked)
        self._own = own

    def rewind(self) -> None:
        """The step is done again. Its first forward is to synchronise buffers again, whichever share was the
        last one that was done."""
        self._now = dict(self._marked)
        for value in self._state.values():
            if isinstance(value, DistributedDataParallel):
                value.require_forward_param_sync = True

    def before_the_vote(self) -> dict[int, Json]:
        """rank → its private state now, of this rank and the adopted ones."""
        self._own_at_vote = take_private(self._state)
        return {self.rank: self._own_at_vote, **self._now}

    def told_before_the_vote(self, rank: int) -> dict[str, Any]:
        """An adopted rank's private state then, and the objects that it had in common with this one."""
        private = self._now[rank]
        return {"private": private, "common": common_objects(private, self._own_at_vote)}

    def at_the_beginning(self, rank: int) -> Json:
        """An adopted rank's private state at the beginning of the step."""
        return self._marked[rank]

    # ---- who is adopted ----

    def adopt(self, keep: Iterable[int], given: Mapping[int, Mapping[str, Any]]) -> dict[int, Json]:
        """At a boundary: do the shares of these ranks from now on. `given`: of those that are new, the
        private state, and which objects are the same as here. Returns those that others do now."""
        before = self._marked
        own = take_private(self._state)
        adopted = {rank: before[rank] for rank in keep}
        for rank, told in given.items():
            entries = {**told["private"]["entries"], **{key: own["entries"][key] for key in told["common"]}}
            adopted[rank] = {**told["private"], "entries": entries}
        self._marked, self._now = adopted, dict(adopted)
        self._own = own
        return {rank: private for rank, private in before.items() if rank not in adopted}


class Current:
    """What `shares` speaks of in this process."""

    shares: Shares | None = None


def shares() -> Iterator[Share]:
    """The shares of the step in progress: `for share in tm_slurm.shares(): with share: ...`, and after that
    the optimizer's step.

    Each has its `rank`. Usually there is one, with this rank's own. A script that takes its data and random
    numbers from there alone can go on with fewer nodes (policy.on_no_standby: shrink). In a process that
    tm_slurm does not run, there is one as well.
    """
    if Current.shares is None:
        alone = Shares()
        alone.take_role(dist.get_rank() if dist.is_initialized() else 0, {})
        return alone.list()
    return Current.shares.list()
