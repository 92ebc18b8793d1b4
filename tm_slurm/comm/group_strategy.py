"""Replacement over a stock backend (NCCL, gloo): inner groups are built beside those in use, then swapped.

The same three calls as `Endpoint`, for devices whose connections are not ours. A group
object stays the same for ever; the stock backend inside it is exchanged under a lock. It costs more than an
endpoint does: preparation builds every affected group anew, and for a moment both exist (two communicators'
device memory).
With NCCL this has not been measured yet.
"""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import ProcessGroupGloo

from tm_slurm.comm import _tm
from tm_slurm.comm.backend import group_identity
from tm_slurm.comm.endpoint import Endpoint

MakeInner = Callable[[Store, int, int, timedelta], Any]


def make_gloo(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Build the CPU's inner backend; every rank of the group must do so at about the same time."""
    return ProcessGroupGloo(store, rank, size, timeout)


def make_nccl(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Build the GPU's inner backend (not yet measured)."""
    options = torch.distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return torch.distributed.ProcessGroupNCCL(store, rank, size, options)


@dataclass
class _Group:
    backend: _tm.InnerBackend
    identity: int
    rank: int
    ranks: Sequence[int]
    timeout: timedelta


@dataclass
class _Preparation:
    """Replacements of one epoch, each built by a thread of its own: ranks need not agree on an order."""

    wanted: dict[int, _Group] = field(default_factory=dict)
    built: dict[int, Any] = field(default_factory=dict)
    failed: dict[int, BaseException] = field(default_factory=dict)
    cancelled: bool = False


class GroupStrategy:
    """One a process: makes the groups of a torch.distributed backend whose inner backends can be exchanged.

    Args:
        store: reached by all ranks, stayers and joiners; each inner group meets under a prefix of its epoch.
        make: builds an inner backend from a store, a rank, a size and a timeout.
        name: of the torch.distributed backend that `register` makes.
        devices: that the inner backend serves.
        shield: the inner backend cannot stop what is in flight (gloo): let it write to copies only.
        timeout_s: for building an inner group, in seconds.
    """

    def __init__(
        self,
        *,
        store: Store,
        make: MakeInner = make_gloo,
        name: str = "tm_gloo",
        devices: Sequence[str] = ("cpu",),
        shield: bool = True,
        timeout_s: float = 300.0,
    ) -> None:
        self._store = store
        self._make = make
        self._name = name
        self._devices = list(devices)
        self._shield = shield
        self._timeout = timedelta(seconds=timeout_s)
        self._condition = threading.Condition()
        self._epoch = 0
        self._interrupted = -1
        self._groups: dict[int, _Group] = {}
        self._counts: Counter[tuple[int, ...]] = Counter()
        self._preparations: dict[int, _Preparation] = {}
        self._alone: Endpoint | None = None

    def configure(self, *, epoch: int) -> None:
        """Say at which epoch this process comes in: 0, or a joiner's; before its groups are made."""
        self._epoch = epoch

    def register(self) -> None:
        """Register the backend: `init_process_group(name)` and `new_group` make groups of this strategy."""
        torch.distributed.Backend.register_backend(
            self._name, self._create, extended_api=True, devices=self._devices
        )

    @property
    def sandbox(self) -> bool:
        """As `Endpoint.sandbox`: collectives answer alone and at once."""
        return self._alone is not None

    @sandbox.setter
    def sandbox(self, value: bool) -> None:
        if value == self.sandbox:
            return
        if self._alone is not None:
            self._alone.close()
        self._alone = None
        if value:
            self._alone = Endpoint(
                secret=secrets.token_bytes(32), job="sandbox", host="127.0.0.1", incarnation=0
            )
            self._alone.sandbox = True
        for group in self._groups.values():
            self._let_answer_alone(group)

    def _let_answer_alone(self, group: _Group) -> None:
        if self._alone is None:
            group.backend.answer_with(None)
            return
        alone = _tm.make_backend(
            self._alone._native,
            self._name,
            group.identity,
            group.rank,
            group.ranks,
            self._timeout.total_seconds(),
        )
        group.backend.answer_with(alone)

    def prepare(self, *, epoch: int, changes: Collection[int]) -> None:
        """Phase 1: build, in the background, replacements of the groups that have one of these ranks.

        After an interrupt all groups are built anew, on all ranks: a stock backend has no way to tell what is
        left of a collective that was given up from what comes next. Returns at once.

        Raises:
            RuntimeError: the epoch is not after the current one.
        """
        if epoch <= self._epoch:
            raise RuntimeError(f"prepare: epoch {epoch} is not after the current epoch {self._epoch}")
        with self._condition:
            everything = self._interrupted >= self._epoch
            preparation = _Preparation(
                {
                    identity: group
                    for identity, group in self._groups.items()
                    if everything or not set(changes).isdisjoint(group.ranks)
                }
            )
            self.cancel(epoch=epoch)
            self._preparations[epoch] = preparation
        for group in preparation.wanted.values():
            threading.Thread(target=self._build, args=(epoch, preparation, group), daemon=True).start()

    def wait_staged(self, *, epoch: int, timeout_s: float) -> bool:
        """Wait until all replacements of this epoch are built; False on timeout or failure, or unprepared."""
        with self._condition:
            preparation = self._preparations.get(epoch)
            if preparation is None:
                return False
            self._condition.wait_for(
                lambda: (
                    preparation.cancelled
                    or preparation.failed
                    or preparation.built.keys() == preparation.wanted.keys()
                ),
                timeout_s,
            )
            whole = preparation.built.keys() == preparation.wanted.keys()
            return whole and not preparation.cancelled

    def cancel(self, *, epoch: int) -> None:
        """Drop what `prepare` built, or still builds, for this epoch."""
        with self._condition:
            preparation = self._preparations.pop(epoch, None)
            if preparation is None:
                return
            preparation.cancelled = True
            self._condition.notify_all()
            _drop_later(list(preparation.built.values()))

    def switch(self, *, epoch: int) -> None:
        """Phase 2: the replacements take over; the old inner groups are dropped by another thread.

        Raises:
            RuntimeError: the epoch is before the current one, or not all replacements are built; then nothing
                has changed, and `cancel` or waiting are both possible.
        """
        if epoch == self._epoch:
            return
        if epoch < self._epoch:
            raise RuntimeError(f"switch: epoch {epoch} is before the current epoch {self._epoch}")
        with self._condition:
            preparation = self._preparations.get(epoch, _Preparation())
            missing = preparation.wanted.keys() - preparation.built.keys()
            if missing:
                ranks = [list(preparation.wanted[identity].ranks) for identity in missing]
                why = next(iter(preparation.failed.values()), "still building")
                raise RuntimeError(f"switch: no replacement yet for the groups of ranks {ranks}: {why}")
            if self._interrupted >= self._epoch and preparation.wanted.keys() != self._groups.keys():
                raise RuntimeError("switch: after an interrupt call prepare() for this epoch first")
            old = [
                preparation.wanted[identity].backend.swap(inner)
                for identity, inner in preparation.built.items()
            ]
            self._preparations.pop(epoch, None)
            self._epoch = epoch
            for earlier in [other for other in self._preparations if other < epoch]:
                self.cancel(epoch=earlier)
        _drop_later(old)

    def interrupt(self, *, epoch: int) -> None:
        """Let collectives, in flight or posted later, raise GroupInterrupted until a switch past `epoch`."""
        with self._condition:
            self._interrupted = max(self._interrupted, epoch)
            if epoch < self._epoch:
                return
            groups = list(self._groups.values())
        for group in groups:
            group.backend.interrupt()
        if (
            not self._shield
        ):  # waiting works come back only when the communicator is aborted; that may take time
            for group in groups:
                threading.Thread(target=group.backend.inner().abort, daemon=True).start()

    def _prefixed(self, epoch: int, identity: int) -> Store:
        return PrefixStore(f"tm/{epoch}/{identity}", self._store)

    def _build(self, epoch: int, preparation: _Preparation, group: _Group) -> None:
        try:
            store = self._prefixed(epoch, group.identity)
            inner = self._make(store, group.rank, len(group.ranks), self._timeout)
        except (
            Exception
        ) as error:  # whatever the stock backend raises is the answer of wait_staged and switch
            with self._condition:
                preparation.failed[group.identity] = error
                self._condition.notify_all()
            return
        with self._condition:
            if not preparation.cancelled:
                preparation.built[group.identity] = inner
                self._condition.notify_all()
                return
        _abort(inner)

    def _create(self, options: Any, _: object) -> Any:
        ranks = list(options.global_ranks_in_group)
        if not ranks:  # the default group
            ranks = list(range(options.group_size))
            self._counts.clear()
            self._groups.clear()
        ordinal = self._counts[tuple(ranks)]
        self._counts[tuple(ranks)] += 1
        identity = group_identity(str(ordinal), ranks)
        timeout = options.timeout or self._timeout
        inner = self._make(
            self._prefixed(self._epoch, identity), options.group_rank, options.group_size, timeout
        )
        backend = _tm.InnerBackend(
            inner=inner,
            name=self._name,
            rank=options.group_rank,
            size=options.group_size,
            shield=self._shield,
        )
        group = _Group(backend, identity, options.group_rank, ranks, timeout)
        self._groups[identity] = group
        self._let_answer_alone(group)
        return backend


def _abort(inner: Any) -> None:
    inner.abort()


def _drop_later(inners: list[Any]) -> None:
    """Dropping a stock backend may wait for what it has in flight: never on the training thread."""
    if not inners:
        return

    def drop() -> None:
        for inner in inners:
            _abort(inner)
        inners.clear()

    threading.Thread(target=drop, daemon=True).start()
