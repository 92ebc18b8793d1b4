"""What a rank process has besides its role: its endpoint, its line to the agent, and what can be done off the
training thread while training goes on."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tm_slurm.comm import Endpoint, Peer, register
from tm_slurm.config import load
from tm_slurm.control import read_secret
from tm_slurm.runtime.agent_link import AgentLink, Message
from tm_slurm.runtime.handover import Incoming, Outgoing
from tm_slurm.runtime.limits import RECOVERY_TIMEOUT_S, TransferLimits
from tm_slurm.runtime.link_watch import LinkWatch
from tm_slurm.runtime.sharing import Shares
from tm_slurm.runtime.storing import Storing
from tm_slurm.runtime.vote import Ballot
from tm_slurm.runtime.wards import Wards
from tm_slurm.sandbox import Recorder, Sandbox
from tm_slurm.state import Snapshot, StateError


@dataclass(frozen=True)
class Place:
    """Where this process runs."""

    job_dir: Path
    host: str
    slot: int
    incarnation: int

    @classmethod
    def from_environment(cls) -> Place:
        return cls(
            job_dir=Path(os.environ["TM_SLURM_JOB_DIR"]),
            host=os.environ["TM_SLURM_HOST"],
            slot=int(os.environ["TM_SLURM_SLOT"]),
            incarnation=int(os.environ["TM_SLURM_INCARNATION"]),
        )


def peers_of(table: dict[str, list[Any]]) -> dict[int, Peer]:
    """The table of peers as it comes in a message."""
    return {int(rank): Peer(str(h), int(p), int(i)) for rank, (h, p, i) in table.items()}


class Worker:
    """Listens to the agent for the life of the process. `rank` is None until a role is taken."""

    def __init__(self, link: AgentLink) -> None:
        self.place = Place.from_environment()
        self.config = load(self.place.job_dir / "config.yaml")
        self.limits = TransferLimits.of(self.config.policy)
        self.secret = read_secret(self.place.job_dir)
        self.link = link
        self.endpoint = Endpoint(
            secret=self.secret,
            job=self.place.job_dir.name,
            host=self.place.host,
            incarnation=self.place.incarnation,
            timeout_s=self.config.comm.timeout_s,
            keepalive_s=self.config.policy.keepalive_s,
        )
        register(self.endpoint)
        self.sandbox = Sandbox(self.endpoint)
        self.recorder: Recorder | None = None
        """while this rank records its first steps for its class"""
        self.recording_wait_s = self.config.standby.recording_wait_s
        self.mates: dict[int, list[Any]] = {}
        """slot → where the process of this node in it listens, this one among them"""
        self.ballot = Ballot()
        self._links = LinkWatch(self.endpoint)
        self.rank: int | None = None
        self.world_size = 1
        self.epoch = 0
        self.outgoing: Outgoing | None = None
        self.incoming: Incoming | None = None
        self._serving: Outgoing | None = None
        self._layout: Snapshot | None = None
        self._staged: set[int] = set()
        self._news: list[Message] = []
        """of moves to epochs that this rank has yet to switch to"""
        self._cancelled: set[int] = set()
        self._lock = threading.Lock()
        self._recovery_epoch = 0
        self._unsure: list[int] = []
        self._standing_by = True
        self._stopped: Message | None = None
        self.wards: Wards | None = None
        self.shares = Shares()
        self.absent: frozenset[int] = frozenset()
        self.storing = Storing(self.secret, self.place.job_dir, self.config.policy, link)
        link.start(
            {
                "prepare": self._on_prepare,
                "prepare_leave": self._on_prepare_leave,
                "go": self._on_go,
                "stop": self._on_stop,
                "cancel": self._on_cancel,
                "peers": self._on_peers,
                "mates": self._on_mates,
                "interrupt": self._on_interrupt,
                "where": self._on_where,
                **self.storing.handlers(),
            },
            every_beat=self._beat,
        )
        atexit.register(self._last_beat)  # a script that fails has told every step that it has done
        link.send({"kind": "process_ready", "host": self.place.host, "port": self.endpoint.port})

    def _last_beat(self) -> None:
        with contextlib.suppress(OSError):
            self.link.beat()

    # ---- in the listening thread ----

    def _beat(self) -> None:
        """Tell of steps that were done, and of links that have ended. The latter is evidence against ranks
        whose agent is not connected, and nothing else."""
        self.link.beat()
        if self.rank is None or self.endpoint.sandbox:
            return
        epoch, gone = self._links.look()
        for rank in gone:
            self.link.send({"kind": "link_ended", "rank": self.rank, "epoch": epoch, "lost": rank})

    def _on_prepare(self, message: Message) -> None:
        """A linked stayer: stage the joiner's links beside those in use (TrainMover §5, phase 1)."""
        epoch = int(message["epoch"])
        if epoch > self.epoch and epoch not in self._staged:
            self._staged.add(epoch)
            self.endpoint.prepare(epoch=epoch, changes=peers_of(message["changes"]))

    def _on_prepare_leave(self, message: Message) -> None:
        epoch = int(message["epoch"])
        if epoch <= self.epoch or self.rank is None:
            return
        with self._lock:
            if self.outgoing is None or self.outgoing.epoch != epoch:
                if self.outgoing is not None:
                    self.outgoing.close()
                self.outgoing = Outgoing(
                    host=self.place.host,
                    secret=self.secret,
                    rank=self.rank,
                    epoch=epoch,
                    limits=self.limits,
                    ahead=self.config.standby.warm_up,
                )
            outgoing = self.outgoing
            if self._layout is not None:
                outgoing.give_layout(self._layout)
        if not outgoing.wants_layout:
            self._say_prepared(outgoing)

    def _say_prepared(self, outgoing: Outgoing) -> None:
        self.link.send(
            {
                "kind": "leaver_prepared",
                "epoch": outgoing.epoch,
                "rank": self.rank,
                "linked": self.endpoint.linked(),
                "source": outgoing.source,
            }
        )

    def _on_peers(self, message: Message) -> None:
        """A move has committed: where its ranks are now. Whoever has yet to switch to its epoch hears it
        then; who has no rank yet gets a table that has them."""
        with self._lock:
            if self._standing_by:
                return
            if int(message["epoch"]) > self.epoch:
                self._news.append(message)
                return
        self._take_news(message)

    def _take_news(self, message: Message) -> None:
        self.endpoint.update(epoch=int(message["epoch"]), peers=peers_of(message["changes"]))

    def _on_mates(self, message: Message) -> None:
        self.mates = {int(slot): list(peer) for slot, peer in message["at"].items()}

    def _on_go(self, message: Message) -> None:
        if int(message["epoch"]) > self.epoch:
            self.ballot.arm(int(message["epoch"]))

    def _on_stop(self, message: Message) -> None:
        epoch = int(message["epoch"])
        kind = "stopped" if self.ballot.withdraw(epoch) else "too_late"
        self.link.send({"kind": kind, "epoch": epoch})

    def _on_cancel(self, message: Message) -> None:
        epoch = int(message["epoch"])
        self._cancelled.add(epoch)
        if epoch in self._staged:
            self._staged.discard(epoch)
            self.endpoint.cancel(epoch=epoch)
        with self._lock:
            if self.outgoing is not None and self.outgoing.epoch == epoch:
                self.outgoing.close()
                self.outgoing = None
            if self.incoming is not None and self.incoming.epoch == epoch:
                self.incoming.cancel()

    def _on_interrupt(self, message: Message) -> None:
        """Somebody has failed: wake this rank out of whatever it waits in, and say where it has stopped. A
        process without a rank says that; from then on it cannot get one at an older epoch."""
        epoch = int(message["epoch"])
        with self._lock:
            if epoch < self._recovery_epoch or epoch <= self.epoch:
                return
            self._recovery_epoch = epoch
            self._unsure = [int(rank) for rank in message.get("lost", ())]
            standing_by, incoming = self._standing_by, self.incoming
            outgoings = [self.outgoing, self._serving]
        if incoming is not None and incoming.epoch < epoch:
            incoming.cancel()
        if standing_by:
            self.sandbox.leave_batch()  # it may wait for another one there
            self.link.send({"kind": "not_joined", "epoch": epoch})
            return
        for outgoing in outgoings:
            if outgoing is not None:
                outgoing.cancel()
        self.ballot.disarm()
        self.endpoint.interrupt(epoch=epoch - 1)
        self._say_where()

    def _on_where(self, message: Message) -> None:
        """The coordinator wonders why no step is committed: say whether this rank waits for others."""
        stats = self.endpoint.stats()
        told = {"waiting": stats["operations_in_flight"] > 0, "since_s": stats["oldest_operation_ms"] / 1000}
        self.link.send({"kind": "whereabouts", "rank": self.rank, "epoch": self.epoch, **told})

    def _say_where(self) -> None:
        with self._lock:
            epoch, unsure = self._recovery_epoch, self._unsure
            if self._stopped is None or epoch <= self.epoch:
                return
            assert self.rank is not None  # else it would not have stopped
            statement = {"kind": "survivor", "epoch": epoch, "rank": self.rank, **self._stopped}
        wards = self.wards
        statement["snapshots"] = self.storing.local_snapshots(self.rank)
        statement["wards"], statement["nearly"] = {}, {}
        statement["adopted"] = self.shares.adopted
        for rank in unsure if wards is not None else ():
            assert wards is not None
            known, nearly = wards.told(rank), wards.told_nearly(rank)
            if rank in self.shares.adopted:
                mine, before_the_vote = self._told_of_adopted(rank, statement)
                known, nearly = [*known, mine], [*nearly, *before_the_vote]
            for told in (*known, *nearly):
                self.link.send({**told, "epoch": epoch})
            if known:
                statement["wards"][str(rank)] = [told["step"] for told in known]
            if nearly:
                statement["nearly"][str(rank)] = [told["step"] for told in nearly]
        self.link.send(statement)

    def _told_of_adopted(self, rank: int, stopped: Message) -> tuple[Message, list[Message]]:
        """An absent rank's private state where this one has stopped: at the beginning of the step, and, when
        it stands at the vote, as it is there."""
        told = {"kind": "ward", "rank": rank}
        step, now = int(stopped["committed"]), self.shares.told_before_the_vote(rank)
        buffers = now["private"]["buffers"] if stopped["at_vote"] else None
        mine = {**told, "step": step, "private": self.shares.at_the_beginning(rank), "buffers": buffers}
        return mine, [{**told, "step": step + 1, **now}] if stopped["at_vote"] else []

    # ---- in the training thread ----

    def take_seat(self, epoch: int) -> bool:
        """From now on this process has a rank. False when a failure at a later epoch came first: then it has
        none, and has said so."""
        with self._lock:
            if self._recovery_epoch > epoch:
                return False
            self._standing_by = False
            return True

    def is_for_me(self, order: Message) -> bool:
        """Whether an order that gives a rank means this process, and not the one that was in its slot
        before."""
        peer = order["peers"].get(str(order["rank"]))
        return peer is not None and int(peer[2]) == self.place.incarnation

    def stop_at(
        self, committed: int, *, at_vote: bool = False, begun: bool = True, torn: bool = False
    ) -> None:
        """This rank has stopped with `committed` steps applied. `at_vote`: and with the gradients of the next
        one; `begun`: its role is built; `torn`: it has begun to apply the next step, and could not finish."""
        with self._lock:
            self._stopped = {"committed": committed, "at_vote": at_vote, "begun": begun, "torn": torn}
        self._say_where()

    def await_resolution(self, *others: str) -> Message:
        """What all survivors do now: the newest recovery's `resolve` order, or an order of the kinds
        `others`. TimeoutError when none comes."""
        while True:
            order = self.link.next_order("resolve", "exit", *others, timeout_s=RECOVERY_TIMEOUT_S)
            if order["kind"] != "resolve":
                return order
            with self._lock:  # from here on what was said of where this rank stands is of the past
                if int(order["epoch"]) == self._recovery_epoch:
                    self._stopped = None
                    return order

    def recovered(self, order: Message) -> None:
        """Take over the recovery's epoch: the dead are out, their successors in."""
        epoch = int(order["epoch"])
        absent = order.get("absent", ())
        self.endpoint.prepare(epoch=epoch, changes=peers_of(order["changes"]), absent=absent)
        self.endpoint.switch(epoch=epoch)
        self.leave_out(absent)
        self.at_epoch(epoch)

    def leave_out(self, absent: Iterable[int]) -> None:
        """These ranks take no part from now on."""
        self.absent = frozenset(int(rank) for rank in absent)
        if self.wards is not None:
            self.wards.leave_out(self.absent)

    @property
    def is_pacer(self) -> bool:
        """Whether this rank, the lowest one present, asks the others for snapshots and checkpoints."""
        return self.rank == min(set(range(self.world_size)) - self.absent)

    @property
    def may_shrink(self) -> bool:
        return "shrink" in self.config.policy.on_no_standby

    def at_epoch(self, epoch: int) -> None:
        """The membership of `epoch` is in force here."""
        self.storing.abandon()
        with self._lock:
            self.epoch = epoch
            self._stopped = None
            past = self.outgoing is not None and self.outgoing.epoch <= epoch
            outgoing = self.outgoing if past else None
            if past:
                self.outgoing = None
            heard = [message for message in self._news if int(message["epoch"]) <= epoch]
            self._news = [message for message in self._news if int(message["epoch"]) > epoch]
        for message in heard:
            self._take_news(message)
        if outgoing is not None:
            outgoing.close()

    def serving(self, outgoing: Outgoing | None) -> None:
        """A state on its way to a lost rank's successor; a failure elsewhere ends it."""
        with self._lock:
            self._serving = outgoing
            cancelled = outgoing is not None and outgoing.epoch < self._recovery_epoch
        if outgoing is not None and cancelled:
            outgoing.cancel()

    def is_cancelled(self, epoch: int) -> bool:
        """Whether the move or recovery to `epoch` was given up."""
        return epoch in self._cancelled or epoch < self._recovery_epoch

    def prepare_to_leave(self, capture_state: Callable[[], Snapshot]) -> None:
        """At a step boundary: if this rank is to leave, give its layout and say that it is prepared. Only now
        are the links open that a step uses."""
        outgoing = self.outgoing
        if outgoing is not None and outgoing.wants_layout:
            self._layout = capture_state()
            outgoing.give_layout(self._layout)
            self._say_prepared(outgoing)

    def await_state(self, incoming: Incoming) -> None:
        """From now on a cancellation wakes `incoming`; StateError when it has come already."""
        with self._lock:
            self.incoming = incoming
        if self.is_cancelled(incoming.epoch):
            raise StateError("the move was given up")

    def forget_incoming(self) -> None:
        """The transfer has ended, well or not."""
        with self._lock:
            incoming, self.incoming = self.incoming, None
        if incoming is not None:
            incoming.close()

    def leaving(self, epoch: int) -> Outgoing | None:
        """The hand-over of this rank at `epoch`; None for a stayer."""
        with self._lock:
            outgoing = self.outgoing
        return outgoing if outgoing is not None and outgoing.epoch == epoch else None
