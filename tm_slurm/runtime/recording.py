"""A rank's part in recording and replay: its first steps are recorded, a standby waits for what was
(TrainMover §4)."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tm_slurm.runtime.agent_link import Message
from tm_slurm.runtime.role import Role
from tm_slurm.runtime.saying import say
from tm_slurm.runtime.worker import Worker
from tm_slurm.sandbox import (
    Recorder,
    Recording,
    RecordingError,
    find,
    least_steps,
    recordings_of,
    role_class_of,
    roles_of,
)

Found = TypeVar("Found")

LOOK_S = 0.1
"""How often a standby looks whether the recording of its class is there."""


def begin_recording(worker: Worker) -> None:
    """From now on what this rank's collectives answer is recorded, until `keep_recording` says for whom."""
    standby = worker.config.standby
    worker.recorder = None
    worker.endpoint.attach(None)
    if standby.recorded_steps > 0:
        worker.recorder = Recorder(
            worker.endpoint,
            steps=standby.recorded_steps,
            limit_bytes=standby.recording_limit_mb << 20,
            directory=recordings_of(worker.place.job_dir),
            tell=worker.link.send,
        )


def keep_recording(worker: Worker, state: dict[str, Any], role: Role) -> None:
    """The role is built: one rank of each class goes on recording. A collective of all ranks; raises what one
    raises when a rank has failed."""
    recorder = worker.recorder
    if recorder is None:
        return
    if not recorder.is_designated(role_class_of(state), role.rank, role.world_size):
        worker.recorder = None
        return
    recorder.steps_left = max(recorder.steps_left, least_steps(state))


def await_recording(worker: Worker, rank: int, *, wait_s: float | None = None) -> Recording | None:
    """The recording of a rank's class. None when there will be none, when it does not come within `wait_s`
    (the config's, if not given), and as soon as there is another order: a rank may have been lost."""
    directory = recordings_of(worker.place.job_dir)
    try:
        return _await(worker, lambda: find(directory, rank), wait_s)
    except RecordingError as error:
        say(f"no recording for rank {rank}, warming up with identity answers: {error}")
        return None


def _await(worker: Worker, look: Callable[[], Found | None], wait_s: float | None = None) -> Found | None:
    """What `look` finds in time, and before there is another order; with nothing recorded, nothing. What did
    not come in time once is not waited for again."""
    if worker.config.standby.recorded_steps == 0:
        return None
    deadline = time.monotonic() + (worker.recording_wait_s if wait_s is None else wait_s)
    while True:
        found = look()
        left = deadline - time.monotonic()
        if found is None and left <= 0 and wait_s is None:
            worker.recording_wait_s = 0.0
        if found is not None or left <= 0 or worker.link.has_order(min(left, LOOK_S)):
            return found


@dataclass(frozen=True)
class Turn:
    """A rank to warm up for. `batch`: the ranks that this node's processes warm up for meanwhile, this one
    among them (none: this process is on its own); calls among them are real (TrainMover §4)."""

    rank: int
    batch: range = range(0)

    def peers(self, mates: Mapping[int, list[Any]]) -> dict[str, list[Any]]:
        """Where those of the batch listen; empty unless all are there."""
        slots = {rank: rank - self.batch.start for rank in self.batch}
        known = all(slot in mates for slot in slots.values())
        return {str(rank): mates[slot] for rank, slot in slots.items()} if known else {}


def roles_to_warm(worker: Worker, order: Message) -> list[Turn]:
    """What to warm up for in turn, the last of which is kept built (TrainMover §6): one rank of each role
    class, if the order is for any rank and all classes come to be known; else the one of the order."""
    ordered, slot, standby = int(order["rank"]), worker.place.slot, worker.config.standby
    directory, all_ranks = recordings_of(worker.place.job_dir), set(range(int(order["world_size"])))

    def whole() -> dict[str, list[int]] | None:
        found = roles_of(directory)
        return found if {rank for ranks in found.values() for rank in ranks} == all_ranks else None

    try:
        classes = _await(worker, whole) if order.get("any") else None
    except RecordingError:
        classes = None
    per_node = worker.config.job.ranks_per_node
    if classes is None:
        return [choose([ordered], ordered, slot, per_node)]
    kept = standby.keep_built[min(int(order.get("place", 0)), len(standby.keep_built) - 1)]

    def turn(role_class: str) -> tuple[bool, int]:
        name = role_class.rsplit("-", 1)[0]
        order_of = standby.warm_order
        return name == kept, order_of.index(name) if name in order_of else -1

    in_turn = [classes[name] for name in sorted(sorted(classes), key=turn)]
    return [choose(ranks, ordered, slot, per_node) for ranks in in_turn]


def choose(ranks: Sequence[int], ordered: int, slot: int, per_node: int) -> Turn:
    """Which rank of a class the process in `slot` warms up for. If all ranks of some node are of this class,
    the processes of this node take those, each its own: all of them choose the same node."""
    nodes = [r for r in ranks if r % per_node == 0 and all(r + other in ranks for other in range(per_node))]
    if nodes and slot < per_node > 1:
        first = ordered - slot if ordered - slot in nodes else nodes[0]
        return Turn(first + slot, range(first, first + per_node))
    return Turn(ordered if ordered in ranks else ranks[slot % len(ranks)])


@contextlib.contextmanager
def share_of_cpus(share: float) -> Iterator[None]:
    """All threads of this process, those that are started meanwhile too, keep to this part of its CPUs (at
    least one)."""
    before = os.sched_getaffinity(0)
    kept = sorted(before)[: math.ceil(len(before) * share)]
    if len(kept) == len(before):
        yield
        return
    _pin(kept)
    try:
        yield
    finally:
        _pin(before)


def _pin(cpus: set[int] | list[int]) -> None:
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread.name), cpus)
