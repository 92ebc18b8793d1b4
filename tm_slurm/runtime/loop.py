"""The step loop of a rank: take a role or stand by, step, vote, switch, finish.

    for state, step in tm_slurm.Runtime(build, steps=1000):
        ...one ordinary step with what is in `state`...

A standby gets shadow steps from the same loop, in the sandbox, and later its real ones; a leaver's loop ends
the process. What a rank does when another one fails is in `surviving`, what a standby does in `standing_by`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from tm_slurm.runtime.agent_link import AgentLink, Message
from tm_slurm.runtime.alone import join_nobody
from tm_slurm.runtime.finite import all_finite
from tm_slurm.runtime.handover import Outgoing
from tm_slurm.runtime.limits import PRIVATE_INTERVAL_S
from tm_slurm.runtime.role import Role, role_of
from tm_slurm.runtime.saying import say
from tm_slurm.runtime.sharing import Current, Shares
from tm_slurm.runtime.standing_by import StandingBy
from tm_slurm.runtime.vote import PRIVATE, Ballot, Discarded, Vote
from tm_slurm.runtime.wards import Wards
from tm_slurm.runtime.worker import Worker, peers_of
from tm_slurm.sandbox import forget_role, import_what_comes_late
from tm_slurm.state import (
    Mark,
    StateError,
    capture,
    digest,
    mark,
    replica_key,
    take_buffers,
)

Build = Callable[[Role], dict[str, Any]]


class Runtime(StandingBy):
    """Iterate over it: it yields (state, step) for each step this process has to do. Call `report` in the
    loop's body, and wrap the body in `attempt()`.

    `steps`: how many in all; a `train.steps` in the job's config holds over it. After the loop: `state`,
    `step`, `role`.
    """

    def __init__(self, build: Build, *, steps: int | None = None) -> None:
        link = AgentLink.from_environment()
        self._worker = Worker(link) if link is not None else None
        self._build = build
        self.steps = self._number_of_steps(steps)
        self.state: dict[str, Any] = {}
        self.step = 0
        self.role = role_of(0, 1, 0)
        self._ballot = self._worker.ballot if self._worker is not None else Ballot()
        self._vote = Vote(self._ballot)
        self._metrics: Mapping[str, Any] = {}
        self._committed_at = 0.0
        self._in_collectives_s = 0.0
        self._mark: Mark | None = None
        self.shares = self._worker.shares if self._worker is not None else Shares()
        self._discarded = False
        self._resolution: Message | None = None
        self._tells_buffers = False
        self._exchange_due = False
        self._exchanged_at = 0.0
        self._redone = -1
        self._keys_told: set[int] = set()
        self._first_step = 0
        """of those that were built together with this rank. Two steps long they have something to agree on (a
        DistributedDataParallel makes its buckets anew in the second) that a standby has done already."""
        self._warmed_up = False
        self._shape = None

    def _number_of_steps(self, steps: int | None) -> int:
        configured = self._worker.config.train.steps if self._worker is not None else None
        number = configured if configured is not None else steps
        if number is None:
            raise ValueError("how many steps? Pass steps=… or set train.steps in the config")
        return number

    def report(self, metrics: Mapping[str, Any]) -> None:
        """What the step just done measured; "loss" (a number or a 0-dim tensor) is shown to people."""
        self._metrics = metrics

    def __iter__(self) -> Iterator[tuple[dict[str, Any], int]]:
        worker = self._worker
        Current.shares = self.shares
        if worker is None:
            join_nobody()
            self._take_role(self.role)
            yield from self._real_steps()
            return
        import_what_comes_late()
        order = worker.link.next_order("assign", "warm", "replace", "retire", "exit")
        mine = order["kind"] == "assign" and worker.is_for_me(order)
        if mine and worker.take_seat(int(order["epoch"])):
            self._start(worker, order)
        else:
            yield from self._stand_by(worker, order)
        yield from self._real_steps()
        yield from self._finish(worker)

    # ---- real steps ----

    def _real_steps(self) -> Iterator[tuple[dict[str, Any], int]]:
        yield from self._recorded_steps()
        while self.step < self.steps:
            yield from self._one_step()
            if self._resolution is not None:  # all may have begun again
                yield from self._recorded_steps()

    def _recorded_steps(self) -> Iterator[tuple[dict[str, Any], int]]:
        """The first steps of a rank that records them; afterwards nothing of the recorder is left."""
        worker = self._worker
        while worker is not None and (recorder := worker.recorder) is not None and self.step < self.steps:
            epoch = worker.epoch
            recorder.begin_step()
            yield from self._one_step()
            if worker.recorder is not recorder:
                continue  # all have begun again
            if self._discarded or worker.epoch != epoch:
                recorder.give_up("the first steps of the job were disturbed by a failure or a move")
                worker.recorder = None
            elif not recorder.step_ended() or self.step >= self.steps:
                recorder.finish()
                worker.recorder = None

    def _one_step(self) -> Iterator[tuple[dict[str, Any], int]]:
        self._begin_step()
        if not self._discarded:
            yield self.state, self.step
            with self.attempt():
                if not self._discarded:
                    self._vote.hold()
        if not self._discarded:
            self._commit()
        if self._resolution is not None:
            self._go_on(self._resolution)
        elif self._discarded and self._mark is not None:
            self._rewind()  # every rank does: the gradients were not finite
        elif self._worker is not None:
            self._at_boundary(self._worker)

    def _begin_step(self) -> None:
        self._discarded = False
        self._resolution = None
        self._mark = mark(self.state, self._mark)
        self._vote.open()
        worker = self._worker
        if worker is not None and worker.wards is not None:
            self._tell_key(worker)
            watched = worker.may_shrink and self.step == self._first_step
            self.shares.begin(watched=watched)
            self._tells_buffers = self._mark.tells_buffers
            with self.attempt():
                if self._exchange_due or self._tells_buffers:
                    worker.wards.exchange(self.step, self._mark.private())
                    self._exchange_due = False
                    self._exchanged_at = time.monotonic()

    def _tell_key(self, worker: Worker) -> None:
        """Before the first step, and after it, when optimizers have their state: who is whose replica."""
        if self.step <= self._first_step + 1 and self.step not in self._keys_told:
            self._keys_told.add(self.step)
            told = {"kind": "replica_key", "rank": self.role.rank, "step": self.step}
            size = capture(self.state, self.step, generators=False).nbytes
            if self.step > self._first_step:
                told["unshared"] = self.shares.why_not_shared()
            worker.link.send({**told, "key": replica_key(self.state), "bytes": size})

    def _tell_buffers(self) -> None:
        """Before the vote: the running statistics as this step leaves them; or all that is private, where
        ranks may be dropped."""
        self.shares.check_outside()
        worker = self._worker
        if worker is None or worker.endpoint.sandbox or worker.wards is None:
            return
        if worker.may_shrink:
            told = self.shares.before_the_vote()
            worker.wards.exchange_nearly(self.step, told, with_buffers=self._tells_buffers)
        elif self._tells_buffers:
            worker.wards.exchange_buffers(self.step, take_buffers(self.state))

    def _flags(self) -> int:
        """What this rank, if it is the pacer, asks all ranks for in the vote."""
        worker = self._worker
        if worker is None or worker.endpoint.sandbox or not worker.is_pacer:
            return 0
        private = time.monotonic() - self._exchanged_at >= PRIVATE_INTERVAL_S
        flags = worker.storing.flags(self.step + 1, snapshots=not worker.absent)
        return flags | (PRIVATE if private else 0)

    def _has_nonfinite(self) -> bool:
        worker = self._worker
        if worker is None or worker.endpoint.sandbox or worker.config.policy.on_nonfinite == "ignore":
            return False
        return not all_finite(self.state)

    def _refuse(self) -> None:
        """Some rank's gradients are not finite: all ranks do the step again, once."""
        worker = self._worker
        if worker is None or worker.endpoint.sandbox:
            return
        if worker.config.policy.on_nonfinite == "stop" or self._redone == self.step:
            again = " again, after it was done anew" if self._redone == self.step else ""
            finite = all_finite(self.state)
            mine = "" if finite else f", some of them on rank {self.role.rank}"
            why = (
                f"step {self.step}: gradients are not finite{again}{mine}; nothing of the step was applied "
                "(policy.on_nonfinite)"
            )
            if not finite:  # else those that have them say so
                worker.link.send({"kind": "gives_up", "rank": self.role.rank, "why": why})
            raise FloatingPointError(why)
        self._redone = self.step
        raise Discarded

    def _commit(self) -> None:
        now = time.time()
        loss = self._metrics.get("loss")
        self.step += 1
        self.shares.commit()
        if self._worker is not None:
            seconds = now - self._committed_at if self._committed_at else 0.0
            self._worker.storing.stepped(self.step, seconds)
            shown = float(loss) if loss is not None else None
            worked_s = self._worked_s(self._worker, seconds)
            self._worker.link.committed(
                rank=self.role.rank,
                epoch=self._worker.epoch,
                step=self.step - 1,
                at=now,
                seconds=seconds,
                loss=shown,
                worked_s=worked_s,
            )
        self._committed_at = now

    def _worked_s(self, worker: Worker, seconds: float) -> float | None:
        """How much of the step that took `seconds` was this rank's own work; None if nobody asks."""
        if worker.config.policy.straggler_slower is None:
            return None
        before, self._in_collectives_s = (
            self._in_collectives_s,
            worker.endpoint.stats()["in_collectives_us"] / 1e6,
        )
        return max(0.0, seconds - (self._in_collectives_s - before)) if seconds > 0 else None

    def _at_boundary(self, worker: Worker) -> None:
        worker.prepare_to_leave(lambda: capture(self.state, self.step))
        agreed, flags = self._vote.agreed_epoch, self._vote.agreed_flags
        self._exchange_due = self._exchange_due or bool(flags & PRIVATE)
        if agreed <= worker.epoch or self.step >= self.steps:
            self._store(worker, flags)
            return
        leaving = worker.leaving(agreed)
        if leaving is not None:
            self._leave(worker, leaving)
            return
        kept = None if worker.config.comm.delta_groups else self._end_groups()
        worker.endpoint.switch(epoch=agreed)
        worker.at_epoch(agreed)
        self._exchange_due = True
        if kept is not None:
            self._build_anew(worker, kept)

    def _store(self, worker: Worker, flags: int) -> None:
        try:
            worker.storing.at_boundary(flags, self.state, self.step, shares=self.shares, epoch=worker.epoch)
        except StateError as error:
            say(f"nothing is kept of step {self.step}: {error}")

    # ---- roles ----

    def _start(self, worker: Worker, order: Message) -> None:
        """A fresh job: this rank from the beginning, or from where an earlier start of the job was."""
        rank, world_size = int(order["rank"]), int(order["world_size"])
        self._build_and_survive(
            worker,
            {**order, "back_to": order.get("restore")},
            rank,
            world_size,
        )

    def _enter(
        self, worker: Worker, *, rank: int, world_size: int, epoch: int, peers: dict[str, list[Any]]
    ) -> None:
        if dist.is_initialized():
            self._mark = None
            forget_role(self.state)
            self.state = {}
        worker.endpoint.configure(rank=rank, epoch=epoch, term=0, peers=peers_of(peers))
        dist.init_process_group("tm", store=HashStore(), rank=rank, world_size=world_size)
        worker.rank, worker.world_size = rank, world_size
        worker.wards = Wards(rank, world_size, worker.config.job.ranks_per_node)
        worker.leave_out(())
        worker.at_epoch(epoch)
        self._take_role(role_of(rank, world_size, worker.place.slot, worker.config.job.ranks_per_node))

    def _take_role(self, role: Role) -> None:
        self.role = role
        if role.device.type == "cuda":
            torch.cuda.set_device(role.device)
        self._vote.is_open = False  # a step that was broken off is no reason to judge what build() does
        self.state = self._build(role)
        self.shares.take_role(role.rank, self.state)
        self._mark = None
        self._vote = Vote(
            self._ballot,
            before=self._tell_buffers,
            may_switch=lambda: self.step > self._first_step,
            failed=self._failed_at_vote,
            flags=self._flags,
            nonfinite=self._has_nonfinite,
            refused=self._refuse,
        )
        self._vote.watch(self.state)

    # ---- leaving and ending ----

    def _leave(self, worker: Worker, outgoing: Outgoing) -> None:
        """Hand this rank's state to the joiner, stay until the switch has committed, end the process. Returns
        if the switch has failed and this rank keeps its seat."""
        worker.link.send({"kind": "switching", "epoch": outgoing.epoch, "step": self.step})
        worker.link.beat()
        try:
            outgoing.send(capture(self.state, self.step))
        except StateError as error:
            say(f"rank {self.role.rank} could not hand over its state: {error}")
        worker.stop_at(self.step)
        order = worker.await_resolution("retire")
        if order["kind"] != "resolve":
            self._end_process(0)
        self._discarded = False
        self._resolution = order
        self._go_on(order)

    def _finish(self, worker: Worker) -> Iterator[tuple[dict[str, Any], int]]:
        """All steps are done here: say with what result, wait for the others. When somebody dies although all
        steps are done here, its successor needs the state; when all go back, there are steps to do again."""
        while True:
            worker.link.beat()
            told = {"kind": "rank_done", "rank": self.role.rank, "step": self.step}
            worker.link.send({**told, "digest": digest(self.state)})
            worker.stop_at(self.step)
            order = worker.await_resolution("finish")
            if order["kind"] != "resolve":
                worker.storing.close()
                return
            self._discarded = False
            self._go_on(order)
            yield from self._real_steps()

    def _end_process(self, code: int) -> NoReturn:
        """This process has no rank any more; nothing of the user's script may run after this."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
