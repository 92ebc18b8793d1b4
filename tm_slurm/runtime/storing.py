"""A rank's part in what the job can go back to: snapshots in another node's memory, checkpoints on disk.

The pacer, rank 0, asks for them in the vote, so that all ranks take them at the same boundary. Taking one
blocks for a copy to host memory; the rest is done by background threads.
"""

from __future__ import annotations

import functools
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tm_slurm.config.model import PolicyConfig
from tm_slurm.runtime import checkpoint
from tm_slurm.runtime.agent_link import AgentLink, Message
from tm_slurm.runtime.limits import TransferLimits
from tm_slurm.runtime.peer_memory import Cost, PeerMemory, choose_interval
from tm_slurm.runtime.saying import say
from tm_slurm.runtime.sharing import Shares
from tm_slurm.runtime.vote import CHECKPOINT, COMPLETE_SHIFT, SNAPSHOT
from tm_slurm.state import StateError, capture, unpack
from tm_slurm.state.background import Background
from tm_slurm.state.checkpoint_directory import checkpoints_of

State = Mapping[str, Any]

RECENT_STEPS = 50
"""Steps whose median is the usual step time."""

FELT_STEPS = 2
"""Steps after a snapshot in which its cost shows: by then it has been sent."""

FELT_SNAPSHOTS = 9

CLOSE_LIMIT_S = 30.0
"""At the end of training, a checkpoint that is being written is waited for no longer."""

AIM = 0.003
"""The share of the step time that snapshots may take by what was measured: less than a third of the 1 % that
is promised, since steps differ, and not all that a snapshot costs shows on this rank."""

GIVEN_UP_AFTER = 4
"""After so many times the steps between two snapshots, one that is not complete never will be: some rank's
part has failed."""


class CannotGoBack(StateError):
    """What was stored of this rank from `source` ("snapshot", "checkpoint") at `step` cannot be had."""

    def __init__(self, why: str, source: str, step: int) -> None:
        super().__init__(why)
        self.source = source
        self.step = step


class Storing:
    """Of one process. Messages are handled in the listening thread; all else is the training thread's."""

    def __init__(self, secret: bytes, job_dir: Path, policy: PolicyConfig, link: AgentLink) -> None:
        self._secret = secret
        self._directory = checkpoints_of(job_dir)
        self._policy = policy
        self._link = link
        self._lock = threading.Lock()
        self._vault: tuple[str, int] | None = None
        self._keeper = ""
        self._owner: int | None = None
        self._wanted = policy.snapshots == "always"
        self._complete = -1
        self._taken_at: int | None = None
        self._felt_s = 0.0
        self._durations: deque[float] = deque(maxlen=RECENT_STEPS)
        self._felt: deque[float] = deque(maxlen=FELT_SNAPSHOTS)
        self._outstanding: int | None = None
        self._checkpoint_outstanding = False
        self._checkpoint_asked = False
        self._checkpoint_begun_at = 0.0
        self._memory: PeerMemory | None = None
        self._reserved = False
        self._told: dict[int, tuple[int, int, str]] = {}
        self._checkpoints: dict[int, checkpoint.Checkpoints] = {}
        """rank → what writes its part: this one, and absent ones whose share is done here"""
        self._publisher: Background | None = None
        self._closed = False
        self._written_as: dict[tuple[int, int], int] = {}

    def handlers(self) -> dict[str, Callable[[Message], None]]:
        """What the listening thread does with the coordinator's messages about this."""
        return {
            "duties": self._on_duties,
            "snapshot_complete": self._on_snapshot_complete,
            "checkpoint": self._on_checkpoint,
            "checkpoint_complete": self._on_checkpoint_complete,
            "publish": self._on_publish,
        }

    def _on_duties(self, message: Message) -> None:
        with self._lock:
            vault = message["vault"]
            self._vault = (str(vault[0]), int(vault[1])) if vault else None
            self._keeper = str(message["keeper"] or "")
            self._owner = int(message["owner"])
            if self._policy.snapshots == "auto":
                self._wanted = bool(message["snapshots"])

    def _on_snapshot_complete(self, message: Message) -> None:
        step = int(message["step"])
        with self._lock:
            self._complete = max(self._complete, step)
            if self._outstanding is not None and self._outstanding <= step:
                self._outstanding = None
        if self._memory is not None:
            self._memory.completed(step)

    def _on_checkpoint(self, _: Message) -> None:
        self._checkpoint_asked = True

    def _on_checkpoint_complete(self, message: Message) -> None:
        self._checkpoint_outstanding = False
        if message["step"] < 0 and self._checkpoint_asked:
            self._checkpoint_asked = False

    def _on_publish(self, message: Message) -> None:
        """All ranks have written their parts; rank 0 makes the checkpoint the newest and removes old
        ones."""
        with self._lock:
            if self._closed:
                return
            if self._publisher is None:
                self._publisher = Background("tm-publish")
        self._publisher.submit(lambda: self._publish(message))

    def _publish(self, message: Message) -> None:
        step, epoch = int(message["step"]), int(message["epoch"])
        told = {"step": step, "epoch": epoch, "rank": 0}
        try:
            path = checkpoint.publish(self._directory, step, int(message["world_size"]), epoch=epoch)
            kept = checkpoint.complete(self._directory)[: self._policy.checkpoints_kept]
            older = [[checkpoint.step_of(other), str(other)] for other in kept if other != path]
            self._link.send({"kind": "checkpoint_published", **told, "path": str(path), "older": older})
            checkpoint.prune(self._directory, keep=self._policy.checkpoints_kept)
        except (OSError, StateError) as error:
            self._link.send({"kind": "checkpoint_failed", **told, "why": str(error)})

    def close(self) -> None:
        """Nothing more is kept of this process; what is being written is waited for. A thread that is in
        native code when the interpreter ends would abort the process."""
        with self._lock:
            self._closed = True
        for writer in self._checkpoints.values():
            writer.close(CLOSE_LIMIT_S)
        if self._publisher is not None:
            self._publisher.close(CLOSE_LIMIT_S)
        if self._memory is not None:
            self._memory.close()

    # ---- the pacer ----

    def flags(self, step: int, *, snapshots: bool = True) -> int:
        """What the pacer asks for at the boundary after `step` steps; no `snapshots`: not those."""
        asked = 0
        if snapshots and self._snapshot_due(step):
            asked |= SNAPSHOT | (self._complete + 1) << COMPLETE_SHIFT
        every = self._policy.checkpoint_every_steps
        due = self._checkpoint_asked or (every is not None and step % every == 0)
        if due and not self._checkpoint_outstanding:
            asked |= CHECKPOINT
        return asked

    def stepped(self, step: int, seconds: float) -> None:
        """The step took `seconds`. What a snapshot costs, sending and storing on all nodes included, shows in
        the steps right after it."""
        self._durations.append(seconds)
        if self._taken_at is None:
            return
        if step - self._taken_at <= FELT_STEPS:
            self._felt_s += seconds - statistics.median(self._durations)
            return
        self._felt.append(max(0.0, self._felt_s))
        self._taken_at, self._felt_s = None, 0.0

    def _snapshot_due(self, step: int) -> bool:
        with self._lock:
            if not self._wanted or self._vault is None or not self._reserved:
                return False
            complete, outstanding = self._complete, self._outstanding
        every = self._policy.snapshot_every_steps
        if every is None:
            every = self._chosen_interval()
        if outstanding is not None and step < outstanding + GIVEN_UP_AFTER * every:
            return False
        return step >= (complete // every + 1) * every

    def _chosen_interval(self) -> int:
        """By what snapshots have cost so far: as measured by who takes and sends them, and as felt."""
        step_s = statistics.median(self._durations) if self._durations else 0.0
        if step_s <= 0:
            return 1
        cost = self._memory.cost if self._memory is not None else Cost()
        cpu_s = cost.send_cpu_s + cost.vault_cpu_s
        felt_s = statistics.median(self._felt) if self._felt else 0.0
        if felt_s > cost.pack_s + cpu_s:
            return choose_interval(felt_s, step_s, limit=AIM)
        return choose_interval(max(cost.pack_s, felt_s), step_s, cpu_s=cpu_s, limit=AIM)

    # ---- at a boundary ----

    def at_boundary(self, flags: int, state: State, step: int, *, shares: Shares, epoch: int) -> None:
        """All ranks do this at the same boundary, `step` steps done. Raises StateError as `pack` does."""
        if flags & SNAPSHOT:
            complete = (flags >> COMPLETE_SHIFT) - 1  # another rank may have heard of it before this one
            self._on_snapshot_complete({"step": complete})
            self._take_snapshot(state, step, shares.rank, epoch)
        else:
            self.reserve(state)
        if flags & CHECKPOINT:
            self._take_checkpoint(state, step, shares.rank, epoch)
            for absent in shares.adopted:
                with shares.as_adopted(absent):
                    self._take_checkpoint(state, step, absent, epoch)

    def reserve(self, state: State, *, told: bool = False) -> None:
        """Have memory ready for snapshots of `state`, if there will be any: once it is all there that a step
        leaves. `told`: a standby is told so; a rank has its duties."""
        wanted = self._wanted or (told and self._policy.snapshots == "auto")
        if wanted and not self._reserved:
            self._reserved = True
            try:
                self._peer_memory().reserve(state)
            except StateError as error:  # the snapshot itself will say so again
                say(f"no memory is reserved for snapshots: {error}")

    def _take_snapshot(self, state: State, step: int, rank: int, epoch: int) -> None:
        self._taken_at, self._felt_s = step, 0.0
        with self._lock:
            vault, keeper = self._vault, self._keeper
            self._outstanding = step
        if vault is None:
            return
        memory = self._peer_memory()
        memory.abandon()  # whatever is not complete by now will never be
        self._told[step] = (rank, epoch, keeper)
        if not memory.begin(state, step, rank=rank, epoch=epoch, vault=vault):
            self._failed(step, f"rank {rank} takes no snapshot of step {step}: the one before is on its way")

    def _peer_memory(self) -> PeerMemory:
        if self._memory is None:
            self._memory = PeerMemory(self._secret, stored=self._stored, failed=self._failed)
        return self._memory

    def _stored(self, step: int) -> None:
        rank, epoch, keeper = self._told.pop(step)
        told = {"kind": "snapshot_stored", "rank": rank, "step": step, "epoch": epoch, "keeper": keeper}
        self._link.send(told)

    def _failed(self, step: int, why: str) -> None:
        """No matter but for this snapshot: it will never be complete, the next one is asked for."""
        self._told.pop(step, None)
        say(why)
        with self._lock:
            if self._outstanding == step:
                self._outstanding = None

    def _take_checkpoint(self, state: State, step: int, rank: int, epoch: int) -> None:
        self._checkpoint_begun_at = time.monotonic()
        if rank not in self._checkpoints:
            self._checkpoints[rank] = checkpoint.Checkpoints(
                self._directory,
                written=functools.partial(self._written, rank),
                failed=functools.partial(self._not_written, rank),
            )
        owner = self._owner if self._owner is not None else rank
        self._written_as[rank, step] = epoch
        self._checkpoint_outstanding = True
        if not self._checkpoints[rank].begin(state, step, rank=rank, owner=owner, epoch=epoch):
            self._not_written(rank, step, "the one before is still being written")

    def _written(self, rank: int, step: int) -> None:
        epoch = self._written_as.pop((rank, step))
        self._link.beat()
        seconds = time.monotonic() - self._checkpoint_begun_at
        told = {"kind": "checkpoint_written", "rank": rank, "step": step, "epoch": epoch}
        self._link.send({**told, "seconds": seconds})

    def _not_written(self, rank: int, step: int, why: str) -> None:
        """A checkpoint that cannot be written does not end training."""
        epoch = self._written_as.pop((rank, step))
        told = {"kind": "checkpoint_failed", "rank": rank, "step": step, "epoch": epoch}
        self._link.send({**told, "why": why})

    # ---- when somebody has failed ----

    def abandon(self) -> None:
        """The membership has changed: what was not complete will never be."""
        with self._lock:
            self._outstanding = None
        self._checkpoint_outstanding = False
        if self._memory is not None:
            self._memory.abandon()

    def local_snapshots(self, rank: int) -> list[int]:
        """Steps that this process can go back to by itself, as `rank`."""
        complete, memory = self._complete, self._memory
        return [complete] if memory is not None and memory.local(complete, rank) is not None else []

    def forget(self) -> None:
        """This process did not become the rank that it was to go back as."""
        with self._lock:
            self._complete = -1
        if self._memory is not None:
            self._memory.forget()

    def go_back(self, back_to: Message, state: State, rank: int) -> int:
        """Make `state` what it was; returns the number of steps done then. CannotGoBack."""
        try:
            return self._go_back(back_to, state, rank)
        except StateError as error:
            raise CannotGoBack(str(error), str(back_to["source"]), int(back_to["step"])) from error

    def _go_back(self, back_to: Message, state: State, rank: int) -> int:
        step = int(back_to["step"])
        if back_to["source"] == "checkpoint":
            path = Path(back_to["path"]) if "path" in back_to else checkpoint.newest(self._directory)
            if path is None:
                raise StateError(f"there is no checkpoint in {self._directory}")
            reached = unpack(state, checkpoint.read(path, rank))
            self.gone_back(reached)
            return reached
        stored = self._memory.local(step, rank) if self._memory is not None else None
        if stored is None:
            if back_to.get("vault") is None:
                raise StateError(f"the snapshot of rank {rank} at step {step} is nowhere")
            host, port = back_to["vault"]
            limit = self._policy.snapshot_memory << 20
            address = (str(host), int(port))
            stored = self._peer_memory().fetch(
                address, rank, step, timeout_s=self._fetch_timeout_s(state, step), max_bytes=limit
            )
        reached = unpack(state, stored)
        with self._lock:
            self._complete = step
        return reached

    def gone_back(self, step: int) -> None:
        """Everybody has gone back to `step` without a snapshot: those of later steps are snapshots no
        longer, and new ones will be taken before."""
        with self._lock:
            if self._complete > step:
                self._complete = -1
        if self._memory is not None:
            self._memory.forget(above=step)

    def _fetch_timeout_s(self, state: State, step: int) -> float:
        """For a snapshot of about the size that `state` has."""
        size = capture(state, step, generators=False).nbytes
        return TransferLimits.of(self._policy).transfer_s(size)
