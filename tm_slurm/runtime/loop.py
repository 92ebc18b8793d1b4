"""The step loop of a rank, from the first order to the last: take a role or stand by, step, vote, switch,
finish.

    for state, step in tm_slurm.Runtime(build, steps=1000):
        ...one ordinary step with what is in `state`...

A standby gets shadow steps from the same loop, in the sandbox, and later its real ones; a leaver's loop ends
the process.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from tm_slurm.runtime.agent_link import AgentLink, Message
from tm_slurm.runtime.alone import join_nobody
from tm_slurm.runtime.handover import Incoming, Outgoing
from tm_slurm.runtime.limits import PREPARE_TIMEOUT_S, PRIVATE_INTERVAL_S, SWITCH_TIMEOUT_S
from tm_slurm.runtime.role import Role, role_of
from tm_slurm.runtime.vote import FAILURES, Ballot, Discarded, Vote
from tm_slurm.runtime.worker import Worker, peers_of
from tm_slurm.state import (
    Mark,
    ReceiveReport,
    StateError,
    capture,
    digest,
    give_private,
    mark,
    private_buffers,
    take_private,
)

Build = Callable[[Role], dict[str, Any]]


@dataclass
class Joined:
    """What came of joining; no report: it failed or was given up."""

    report: ReceiveReport | None = None


class Runtime:
    """Iterate over it: it yields (state, step) for each step this process has to do. Call `report` in the
    loop's body.

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
        self._mark: Mark | None = None
        self._discarded = False
        self._resolution: Message | None = None
        self._private_told_at = -1.0

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
        if worker is None:
            join_nobody()
            self._take_role(self.role)
            yield from self._real_steps()
            return
        order = worker.link.next_order("assign", "warm", "retire", "exit")
        if order["kind"] == "assign":
            self._start(worker, order)
        elif order["kind"] == "warm":
            yield from self._stand_by(worker, order)
        else:
            self._end_process(0)
        yield from self._real_steps()
        self._finish(worker)

    # ---- real steps ----

    def _real_steps(self) -> Iterator[tuple[dict[str, Any], int]]:
        while self.step < self.steps:
            self._begin_step()
            yield self.state, self.step
            with self.attempt():
                if not self._discarded:
                    self._vote.hold()
            if not self._discarded:
                self._commit()
            if self._resolution is not None:
                self._go_on(self._resolution)
            elif self._worker is not None:
                self._at_boundary(self._worker)

    def _begin_step(self) -> None:
        self._discarded = False
        self._resolution = None
        self._mark = mark(self.state, self._mark)
        now = time.monotonic()
        interval = 0.0 if private_buffers(self.state) else PRIVATE_INTERVAL_S
        if self._worker is not None and now - self._private_told_at >= interval:
            self._private_told_at = now
            private = take_private(self.state)
            told = {"kind": "private", "rank": self.role.rank, "step": self.step, "private": private}
            self._worker.link.send(told)
        self._vote.open()

    # ---- when somebody else fails ----

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Around the body of the loop: a failure of another rank inside it discards the step instead of
        ending this process. The loop then yields the same step again."""
        try:
            yield
        except Discarded:
            self._discarded = True
        except FAILURES as error:
            if self._worker is None or self._worker.endpoint.sandbox:
                raise
            self._resolution = self._stop(self._worker, error, at_vote=False)
            self._discarded = True

    def _failed_at_vote(self, error: RuntimeError) -> None:
        if self._worker is None or self._worker.endpoint.sandbox:
            raise error
        self._resolution = self._stop(self._worker, error, at_vote=True)
        if int(self._resolution["target"]) == self.step:
            raise Discarded

    def _stop(self, worker: Worker, error: RuntimeError, *, at_vote: bool) -> Message:
        lost = getattr(error, "rank", None)
        worker.link.send({"kind": "broken", "rank": self.role.rank, "lost": lost, "why": str(error)[:500]})
        worker.stop_at(self.step, at_vote=at_vote)
        order = worker.await_resolution()
        if order["kind"] != "resolve":
            self._end_process(1)
        return order

    def _go_on(self, order: Message) -> None:
        """All survivors are at the same boundary now: let the dead ranks' successors in, and give them the
        state."""
        worker = self._worker
        assert worker is not None
        if self._discarded and self._mark is not None:
            self._mark.rewind()
        while True:
            worker.recovered(order)
            try:
                for rank in order["serve"]:
                    self._serve(worker, rank, int(order["epoch"]))
                return
            except StateError as error:
                say(f"the state could not be given to rank {rank}: {error}")
                worker.stop_at(self.step, at_vote=False)
                order = worker.await_resolution()

    def _serve(self, worker: Worker, rank: int, epoch: int) -> None:
        outgoing = Outgoing(host=worker.place.host, secret=worker.secret, rank=rank, epoch=epoch)
        try:
            outgoing.give_layout(capture(self.state, self.step))
            ready = {"kind": "source_ready", "epoch": epoch, "rank": rank, "source": outgoing.source}
            worker.link.send(ready)
            outgoing.send(capture(self.state, self.step))
        finally:
            outgoing.close()

    def _commit(self) -> None:
        now = time.time()
        loss = self._metrics.get("loss")
        self.step += 1
        if self._worker is not None:
            seconds = now - self._committed_at if self._committed_at else 0.0
            shown = float(loss) if loss is not None else None
            self._worker.link.committed(
                rank=self.role.rank,
                epoch=self._worker.epoch,
                step=self.step - 1,
                at=now,
                seconds=seconds,
                loss=shown,
            )
        self._committed_at = now

    def _at_boundary(self, worker: Worker) -> None:
        worker.prepare_to_leave(lambda: capture(self.state, self.step))
        agreed = self._vote.agreed_epoch
        if agreed <= worker.epoch or self.step >= self.steps:
            return
        leaving = worker.leaving(agreed)
        if leaving is not None:
            self._leave(worker, leaving)
        worker.endpoint.switch(epoch=agreed)
        worker.epoch = agreed

    # ---- roles ----

    def _start(self, worker: Worker, order: Message) -> None:
        """A fresh job: this rank from the beginning."""
        self._enter(worker, order, epoch=int(order["epoch"]), peers=order["peers"])

    def _enter(self, worker: Worker, order: Message, *, epoch: int, peers: dict[str, list[Any]]) -> None:
        rank, world_size = int(order["rank"]), int(order["world_size"])
        if dist.is_initialized():
            self.state = {}
            dist.destroy_process_group()
            gc.collect()
        worker.endpoint.configure(rank=rank, epoch=epoch, term=0, peers=peers_of(peers))
        dist.init_process_group("tm", store=HashStore(), rank=rank, world_size=world_size)
        worker.rank, worker.epoch = rank, epoch
        self._take_role(role_of(rank, world_size, worker.place.slot))

    def _take_role(self, role: Role) -> None:
        self.role = role
        if role.device.type == "cuda":
            torch.cuda.set_device(role.device)
        self.state = self._build(role)
        self._mark = None
        self._vote = Vote(self._ballot, self._failed_at_vote)
        self._vote.watch(self.state.values())

    # ---- standing by ----

    def _stand_by(self, worker: Worker, order: Message) -> Iterator[tuple[dict[str, Any], int]]:
        """Warm up in the sandbox, then wait: for another role to warm up for, for a rank to take, or for the
        end."""
        while True:
            if order["kind"] == "warm":
                began = time.monotonic()
                if worker.rank != int(order["rank"]):
                    yield from self._warm_up(worker, order)
                seconds = time.monotonic() - began
                worker.link.send({"kind": "process_warm", "rank": worker.rank, "seconds": seconds})
            elif order["kind"] == "join":
                if self._join(worker, order):
                    return
            elif order["kind"] == "replace":
                taken = yield from self._replace(worker, order)
                if taken:
                    return
            else:
                self._end_process(0)
            order = worker.link.next_order("warm", "join", "replace", "retire", "exit", "finish")

    def _warm_up(self, worker: Worker, order: Message) -> Iterator[tuple[dict[str, Any], int]]:
        """Build the role and run shadow iterations, answered without any communication (TrainMover §4).

        Whatever they do to the state is overwritten at the switch."""
        worker.sandbox.enter()
        self._enter(worker, order, epoch=0, peers={})
        for step in worker.sandbox.shadow_steps(worker.config.policy.shadow_steps):
            self._vote.open()
            yield self.state, step
            self._vote.hold()
        self._metrics = {}

    def _join(self, worker: Worker, order: Message) -> bool:
        """Take over a leaver's rank. False when the move was given up; then this is a standby as before."""
        rank, epoch = int(order["rank"]), int(order["epoch"])
        if worker.is_cancelled(epoch):
            return False
        if worker.rank != rank:
            why = f"this standby is warm for rank {worker.rank}"
            worker.link.send({"kind": "join_failed", "epoch": epoch, "rank": rank, "why": why})
            return False
        with self._joining(worker, order) as joined:
            worker.endpoint.configure(rank=rank, epoch=epoch, term=0, peers=peers_of(order["peers"]))
            worker.endpoint.dial(epoch=epoch, ranks=order["dial"], timeout_s=PREPARE_TIMEOUT_S)
            incoming = self._connect(worker, order)
            worker.link.send({"kind": "joined", "epoch": epoch, "rank": rank})
            joined.report = incoming.receive()
        return self._resume(worker, order, joined.report)

    def _replace(self, worker: Worker, order: Message) -> Generator[tuple[dict[str, Any], int], None, bool]:
        """Take a dead rank's place: its private state as it last told it, brought up to date by doing the
        steps since then in the sandbox (random numbers and data positions do not depend on what the
        collectives answer); all else from a replica. False when the recovery was given up."""
        if worker.rank != int(order["rank"]):
            yield from self._warm_up(worker, order)
        rank, epoch = int(order["rank"]), int(order["epoch"])
        give_private(self.state, order["private"])
        for step in range(int(order["private_step"]), int(order["target"])):
            self._vote.open()
            yield self.state, step
            self._vote.hold()
        if private_buffers(self.state) and int(order["private_step"]) < int(order["target"]):
            say(
                f"rank {rank} died with step {order['target']} not told: its running statistics (buffers) "
                "are those of shadow steps until they have been updated often enough; all else is exact"
            )
        private = take_private(self.state)
        with self._joining(worker, order) as joined:
            worker.endpoint.configure(rank=rank, epoch=epoch, term=0, peers=peers_of(order["peers"]))
            joined.report = self._connect(worker, order).receive()
            give_private(self.state, private)
        return self._resume(worker, order, joined.report)

    @contextlib.contextmanager
    def _joining(self, worker: Worker, order: Message) -> Iterator[Joined]:
        """Whatever fails in here is told to the coordinator; unless it was the coordinator that gave up."""
        rank, epoch = int(order["rank"]), int(order["epoch"])
        joined = Joined()
        try:
            yield joined
        except (OSError, RuntimeError) as error:
            if not worker.is_cancelled(epoch):
                say(f"joining as rank {rank} at epoch {epoch} failed: {error}")
                worker.link.send({"kind": "join_failed", "epoch": epoch, "rank": rank, "why": str(error)})
        finally:
            worker.forget_incoming()

    def _connect(self, worker: Worker, order: Message) -> Incoming:
        incoming = Incoming(
            source=(str(order["source"][0]), int(order["source"][1])),
            secret=worker.secret,
            rank=int(order["rank"]),
            epoch=int(order["epoch"]),
            state=self.state,
        )
        worker.await_state(incoming)
        incoming.prepare()
        return incoming

    def _resume(self, worker: Worker, order: Message, report: ReceiveReport | None) -> bool:
        if report is None:
            return False
        worker.sandbox.leave()
        worker.epoch = int(order["epoch"])
        self.step = report.step
        worker.link.send(
            {
                "kind": "resumed",
                "epoch": worker.epoch,
                "rank": worker.rank,
                "step": self.step,
                "bytes": report.bytes,
                "state_s": report.seconds,
            }
        )
        return True

    # ---- leaving and ending ----

    def _leave(self, worker: Worker, outgoing: Outgoing) -> NoReturn:
        """Hand this rank's state to the joiner, stay until the switch has committed, end the process."""
        worker.link.send({"kind": "switching", "epoch": outgoing.epoch, "step": self.step})
        worker.link.beat()
        try:
            outgoing.send(capture(self.state, self.step))
        except StateError as error:
            say(f"rank {self.role.rank} could not hand over its state: {error}")
            self._end_process(1)
        worker.link.next_order("retire", "exit", timeout_s=SWITCH_TIMEOUT_S)
        self._end_process(0)

    def _finish(self, worker: Worker) -> None:
        """All steps are done here: say with what result, wait for the others."""
        worker.link.beat()
        done = digest(self.state)
        told = {"kind": "rank_done", "rank": self.role.rank, "step": self.step, "digest": done}
        worker.link.send(told)
        worker.stop_at(self.step, at_vote=False)
        order = worker.link.next_order("finish", "exit", "resolve")
        while (
            order["kind"] == "resolve"
        ):  # somebody died although all steps are done here: its successor needs the state
            self._discarded = False
            self._go_on(order)
            worker.link.send(told)
            worker.stop_at(self.step, at_vote=False)
            order = worker.link.next_order("finish", "exit", "resolve")

    def _end_process(self, code: int) -> NoReturn:
        """This process has no rank any more; nothing of the user's script may run after this."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def say(text: str) -> None:
    """One line for people, in this process's log."""
    print(f"tm_slurm: {text}", file=sys.stderr, flush=True)
