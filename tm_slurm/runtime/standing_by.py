"""What a standby does: warm up in the sandbox for whatever role it may get, and take a leaver's or a dead
rank's place (TrainMover §4, §5, §7)."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tm_slurm.comm import HandshakeRefused
from tm_slurm.runtime.agent_link import Message
from tm_slurm.runtime.handover import Incoming, call_sources
from tm_slurm.runtime.naive import Naive
from tm_slurm.runtime.recording import await_recording, roles_to_warm, share_of_cpus
from tm_slurm.runtime.saying import say
from tm_slurm.runtime.worker import Worker, peers_of
from tm_slurm.sandbox import Recording, Shape, least_steps, shadow_steps_of_another_role, shape_of
from tm_slurm.state import ReceiveReport, give_buffers, give_private, take_private

Shadow = Generator[tuple[dict[str, Any], int], None, bool]
"""Steps in the sandbox; then whether this process has a rank now."""


@dataclass
class Joined:
    """What came of joining; no report: it failed or was given up."""

    report: ReceiveReport | None = None


class StandingBy(Naive):
    """The part of the runtime that is about having no rank yet."""

    _metrics: Mapping[str, Any]
    _warmed_up: bool
    _shape: Shape | None
    """of the role that this process was warmed up for last"""

    def _stand_by(self, worker: Worker, order: Message) -> Iterator[tuple[dict[str, Any], int]]:
        """Warm up, then wait: for another role to warm up for, for a rank to take, or for the end."""
        while True:
            kind = order["kind"]
            if kind == "warm":
                yield from self._warm_up_in_turn(worker, order)
            elif kind == "reserve":
                worker.storing.reserve(self.state, told=True)
            elif kind in ("join", "replace") and not worker.is_for_me(order):
                pass  # for the process that was in this slot before
            elif kind == "join":
                if worker.config.standby.warm_up:
                    joined = self._join(worker, order)
                else:
                    joined = yield from self._join_cold(worker, order)
                if joined:
                    return
            elif kind == "replace":
                taken = yield from self._replace(worker, order)
                if taken:
                    return
            elif kind != "assign":  # an assignment that a failure has overtaken
                self._end_process(0)
            order = worker.link.next_order("warm", "reserve", "join", "replace", "retire", "exit", "finish")

    def _warm_up_in_turn(self, worker: Worker, order: Message) -> Iterator[tuple[dict[str, Any], int]]:
        """As a `warm` order wants it: for the rank that it names, or, when it is for any, for one of each
        role class; whatever else comes meanwhile ends that early."""
        rank = int(order["rank"])
        if not worker.config.standby.warm_up:
            worker.world_size = int(order["world_size"])
            cold = {"kind": "process_warm", "rank": rank, "ordered": rank, "each_s": {}, "seconds": 0.0}
            worker.link.send({**cold, "answers": vars(worker.sandbox.answers())})
            return
        seconds: dict[str, float] = {}
        is_there = worker.rank == rank or (order.get("any") and worker.rank is not None)
        if not is_there:
            for turn in roles_to_warm(worker, order):
                recording = await_recording(worker, turn.rank)
                began = time.monotonic()
                peers = turn.peers(worker.mates)
                yield from self._warm_up(worker, {**order, "rank": turn.rank}, recording, peers)
                seconds[recording.role_class if recording else str(turn.rank)] = time.monotonic() - began
                if worker.link.has_order(0):
                    break
        warm = {"kind": "process_warm", "rank": worker.rank, "ordered": rank, "each_s": seconds}
        answers = vars(worker.sandbox.answers())
        worker.link.send({**warm, "seconds": sum(seconds.values()), "answers": answers})
        worker.storing.reserve(self.state)

    def _warm_up(
        self,
        worker: Worker,
        order: Message,
        recording: Recording | None,
        batch: Mapping[str, list[Any]] | None = None,
    ) -> Iterator[tuple[dict[str, Any], int]]:
        """Build the role and run shadow iterations, answered without any communication but among a batch of
        joiners (TrainMover §4): rank → where its process listens, this one's included.

        Whatever they do to the state is overwritten at the switch."""
        rank, world_size = int(order["rank"]), int(order["world_size"])
        peers = dict(batch or {})
        class_before = worker.sandbox.role_class
        worker.sandbox.enter(recording, map(int, peers))
        with share_of_cpus(worker.config.standby.cpu_share):
            self._enter(worker, rank=rank, world_size=world_size, epoch=0, peers=peers)
            steps = max(worker.config.policy.shadow_steps, least_steps(self.state))
            again, self._warmed_up = self._warmed_up, True
            cold = not worker.config.standby.warm_up
            if again or cold:  # for another role: what a process needs once is there
                steps = shadow_steps_of_another_role(self.state, steps)
            if cold and not worker.config.comm.delta_groups:
                steps = 0
            alike = again and not peers and recording is not None and recording.role_class == class_before
            if alike and steps and self._shape is not None and worker.sandbox.can_imitate(self.state):
                if worker.sandbox.imitate(self.state, self._shape):
                    steps = 0
                else:
                    self._enter(worker, rank=rank, world_size=world_size, epoch=0, peers=peers)
            for step in worker.sandbox.shadow_steps(steps):
                self._vote.open()
                yield self.state, step
                self._vote.hold()
            if (again or cold) and steps == 1:
                worker.sandbox.rebuild_buckets(self.state)
        self._shape = shape_of(self.state)
        self._metrics = {}
        worker.sandbox.leave_batch()
        answers = worker.sandbox.answers()
        if answers.why_alone:
            say(f"warming up for rank {rank} without the other processes of this node: {answers.why_alone}")
        if answers.missed:
            say(
                f"warming up for rank {rank}, {answers.missed} calls were not as recorded "
                f"({answers.answered} were); the first: {answers.first_miss}"
            )

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
            worker.endpoint.dial(epoch=epoch, ranks=order["dial"], timeout_s=worker.limits.prepare_s)
            incoming = self._connect(worker, order)
            worker.link.send({"kind": "joined", "epoch": epoch, "rank": rank})
            joined.report = incoming.receive()
        return self._resume(worker, order, joined.report)

    def _join_cold(self, worker: Worker, order: Message) -> Shadow:
        """The same with nothing prepared (standby.warm_up: false): from when the leaver lets this process in,
        everybody waits for it."""
        rank, epoch = int(order["rank"]), int(order["epoch"])
        called: list[socket.socket] = []
        with self._joining(worker, order):
            worker.link.send({"kind": "joined", "epoch": epoch, "rank": rank})
            called = self._call(worker, order)
        if not called:
            return False
        recording = await_recording(worker, rank, wait_s=0)
        yield from self._warm_up(worker, {**order, "world_size": worker.world_size}, recording)
        delta = worker.config.comm.delta_groups
        with self._joining(worker, order) as joined:
            if delta:
                self._configure(worker, order)
            joined.report = self._connect(worker, order, called).receive()
        if delta or joined.report is None:
            return self._resume(worker, order, joined.report)
        self.step = joined.report.step
        kept = self._end_groups()
        self._configure(worker, order)
        taken = self._resume(worker, order, joined.report)
        if taken:
            self._build_anew(worker, kept)
        return taken

    def _call(self, worker: Worker, order: Message) -> list[socket.socket]:
        sources = [(str(h), int(p)) for h, p in order["sources"]]
        rank, epoch = int(order["rank"]), int(order["epoch"])
        return call_sources(sources, worker.secret, rank=rank, epoch=epoch, limits=worker.limits)

    def _replace(self, worker: Worker, order: Message) -> Shadow:
        """Take a dead rank's place. False when the recovery was given up."""
        back_to = order.get("back_to")
        if back_to is not None and back_to.get("again"):
            return self._replace_anew(worker, order)
        began = time.monotonic()
        if worker.rank != int(order["rank"]):
            # kept by nobody here: to give it back takes milliseconds
            yield from self._warm_up(worker, order, await_recording(worker, int(order["rank"]), wait_s=0))
        times = {"warm_s": time.monotonic() - began}
        if back_to is not None:
            return self._replace_from_store(worker, order, times)
        return (yield from self._replace_from_replica(worker, order, times))

    def _replace_from_replica(self, worker: Worker, order: Message, times: dict[str, float]) -> Shadow:
        """Its private state as it last told it, brought up to date by doing the steps since then in the
        sandbox (random numbers and data positions do not depend on what the collectives answer); all else
        from a replica."""
        target = int(order["target"])
        began = time.monotonic()
        give_private(self.state, order["private"])
        for step in range(int(order["private_step"]), target):
            worker.sandbox.begin_step(step)
            self._vote.open()
            yield self.state, step
            self._vote.hold()
        if int(order["private_step"]) < target and order["private_buffers"] is not None:
            give_buffers(self.state, order["private_buffers"])  # they depend on parameters, too
        private = take_private(self.state)
        times["replay_s"] = time.monotonic() - began
        with self._joining(worker, order) as joined:
            self._configure(worker, order)
            joined.report = self._connect(worker, order).receive()
            give_private(self.state, private)
        return self._resume(worker, order, joined.report, times)

    def _replace_from_store(self, worker: Worker, order: Message, times: dict[str, float]) -> bool:
        """Everybody goes back to a snapshot or a checkpoint; this process too, to the dead rank's part."""
        rank = int(order["rank"])
        began = time.monotonic()
        with self._joining(worker, order) as joined:
            self._configure(worker, order)
            step = worker.storing.go_back(order["back_to"], self.state, rank)
            seconds = time.monotonic() - began
            joined.report = ReceiveReport(step, 0, seconds, 0, 0, 0, prepared=False, acknowledged=True)
        taken = self._resume(worker, order, joined.report, times)
        if not taken:
            worker.storing.forget()
        return taken

    def _replace_anew(self, worker: Worker, order: Message) -> bool:
        """Everybody begins again; this process as the dead rank."""
        rank, epoch = int(order["rank"]), int(order["epoch"])
        if not worker.take_seat(epoch):
            return False
        worker.sandbox.leave()
        worker.rank, worker.world_size = rank, int(order["world_size"])
        worker.link.send({"kind": "resumed", "epoch": epoch, "rank": rank, "step": int(order["target"])})
        self._begin_again(worker, order)
        return True

    @contextlib.contextmanager
    def _joining(self, worker: Worker, order: Message) -> Iterator[Joined]:
        """Whatever fails in here is told to the coordinator; unless it was the coordinator that gave up."""
        rank, epoch = int(order["rank"]), int(order["epoch"])
        joined = Joined()
        try:
            yield joined
        except (OSError, RuntimeError, HandshakeRefused) as error:
            if not worker.is_cancelled(epoch):
                say(f"joining as rank {rank} at epoch {epoch} failed: {error}")
                worker.link.send({"kind": "join_failed", "epoch": epoch, "rank": rank, "why": str(error)})
        finally:
            worker.forget_incoming()

    def _configure(self, worker: Worker, order: Message) -> None:
        """Who is who, and who takes no part, as a lost rank's successor sees it."""
        rank, epoch, absent = int(order["rank"]), int(order["epoch"]), order.get("absent", ())
        worker.endpoint.configure(
            rank=rank, epoch=epoch, term=0, peers=peers_of(order["peers"]), absent=absent
        )
        worker.leave_out(absent)

    def _connect(self, worker: Worker, order: Message, called: list[socket.socket] | None = None) -> Incoming:
        incoming = Incoming(
            sources=[(str(h), int(p)) for h, p in order["sources"]],
            secret=worker.secret,
            rank=int(order["rank"]),
            epoch=int(order["epoch"]),
            state=self.state,
            limits=worker.limits,
            called=called,
        )
        worker.await_state(incoming)
        incoming.prepare()
        return incoming

    def _resume(
        self,
        worker: Worker,
        order: Message,
        report: ReceiveReport | None,
        times: Mapping[str, float] | None = None,
    ) -> bool:
        epoch = int(order["epoch"])
        if report is None or not worker.take_seat(epoch):
            return False
        answers = worker.sandbox.answers()
        worker.sandbox.leave()
        worker.at_epoch(epoch)
        self.step = report.step
        self._exchange_due = True
        told = {"kind": "resumed", "epoch": epoch, "rank": worker.rank, "step": self.step}
        measured = {"bytes": report.bytes, "state_s": report.seconds, **(times or {})}
        worker.link.send({**told, **measured, "answers": vars(answers)})
        return True
