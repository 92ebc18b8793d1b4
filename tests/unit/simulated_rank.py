"""A rank process without tensors, for tests of the decisions: the points of tm_slurm/runtime, one at a time.

Its state is the history of the steps applied and a private counter. A step's gradient is what every rank has
drawn from its private counter for it, so that a step that is lost, done twice, or done with another rank's
private state is seen at once. See the_step_rule.md.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simulated_job import SimulatedJob

Message = dict[str, Any]
Draw = tuple[int, int]
"""A rank, and how often it has drawn before."""

COMPLETE_SHIFT = 8
COLLECTIVES = frozenset({"exchange", "collect", "nearly", "count", "late"})
AWAITS_ORDERS = frozenset({"idle", "left", "stopped", "done"})
KEPT_WARDS = 3


class Violation(AssertionError):
    """What must never happen has happened."""


@dataclass(frozen=True)
class State:
    """Everything that makes a rank what it is. `shard`: whose parameters it has."""

    shard: int
    history: tuple[tuple[Draw, ...], ...]
    private: Draw

    @property
    def step(self) -> int:
        return len(self.history)


@dataclass(frozen=True)
class Contribution:
    """What a process has brought to a collective. `cut_off`: nodes without a network at that time."""

    process: RankProcess
    value: Any
    cut_off: frozenset[str]

    def reaches(self, reader: RankProcess) -> bool:
        if self.process.node == reader.node:
            return True
        nodes = {self.process.node, reader.node}
        return not nodes & self.cut_off or not nodes & reader.job.cut_off


class RankProcess:
    """`point`: where its training thread is. Its listening thread is `hear`."""

    def __init__(self, job: SimulatedJob, node: str, slot: int, incarnation: int) -> None:
        self.job, self.node, self.slot, self.incarnation = job, node, slot, incarnation
        self.alive = True
        self.point = "starting"
        self.orders: deque[Message] = deque()
        self.order: Message = {}
        self.rank: int | None = None
        self.warm_for: int | None = None
        self.epoch = 0
        self.recovery_epoch = 0
        self.unsure: list[int] = []
        self.state: State | None = None
        self.mark: Draw = (0, 0)
        self.gradient: tuple[Draw, ...] = ()
        self.stopped: Message | None = None
        self.peers: dict[int, int] = {}
        self.peers_since: dict[int, int] = {}
        self.early_news: list[Message] = []
        self.staged: dict[int, dict[int, int]] = {}
        self.cancelled: set[int] = set()
        self.armed = self.carried = 0
        self.agreed = (0, 0)
        self.outgoing = 0
        self.exchange_due = True
        self.wards: dict[int, deque[tuple[int, Draw]]] = {}
        self.nearly: dict[int, deque[tuple[int, Draw]]] = {}
        self.absent: frozenset[int] = frozenset()
        self.adopted: dict[int, Draw] = {}
        self.adopted_mark: dict[int, Draw] = {}
        self.keys_told: set[int] = set()
        self.first_step = 0
        self.to_serve: list[int] = []
        self.duties: Message = {}
        self.slots: dict[int, list[Any]] = {}
        self.snapshot_complete = self.outstanding = -1
        self.checkpoint_asked = self.checkpoint_outstanding = False
        self.background: deque[tuple[str, State, int, Message]] = deque()

    def __repr__(self) -> str:
        return f"{self.node}.{self.slot}#{self.incarnation}"

    @property
    def step(self) -> int:
        return 0 if self.state is None else self.state.step

    def say(self, kind: str, **fields: Any) -> None:
        self.job.said(self, {"kind": kind, **fields})

    # ---- the listening thread ----

    def hear(self, message: Message) -> None:
        handler = getattr(self, f"_on_{message['kind']}", None)
        if handler is None:
            self.orders.append(message)
        else:
            handler(message)

    def _on_prepare(self, message: Message) -> None:
        if message["epoch"] > self.epoch:
            self.staged[message["epoch"]] = incarnations(message["changes"])

    def _on_prepare_leave(self, message: Message) -> None:
        if message["epoch"] > self.epoch and self.rank is not None:
            repeated = self.outgoing == message["epoch"]
            self.outgoing = message["epoch"]
            if repeated and self.point in ("boundary", *AWAITS_ORDERS):
                self._say_prepared()

    def _say_prepared(self) -> None:
        source = [self.node, self.incarnation]
        self.say(
            "leaver_prepared",
            epoch=self.outgoing,
            rank=self.rank,
            linked=sorted(self._linked()),
            source=source,
        )

    def _linked(self) -> set[int]:
        assert self.rank is not None
        ring = self._present()
        at = ring.index(self.rank)
        return {ring[(at + 1) % len(ring)], ring[at - 1]} - {self.rank}

    def _present(self) -> list[int]:
        return [rank for rank in range(self.job.shape.world_size) if rank not in self.absent]

    def _on_peers(self, message: Message) -> None:
        """News, which may be old: what has been heard of a later epoch counts. Or it comes before the
        switch."""
        if self.rank is not None and message["epoch"] > self.epoch:
            self.early_news.append(message)
            return
        for rank, incarnation in incarnations(message["changes"]).items():
            if self.rank is not None and message["epoch"] >= self.peers_since.get(rank, 0):
                self._knows({rank: incarnation}, message["epoch"])

    def _knows(self, peers: dict[int, int], epoch: int) -> None:
        self.peers |= peers
        self.peers_since |= dict.fromkeys(peers, epoch)

    def _on_go(self, message: Message) -> None:
        if message["epoch"] > self.epoch and message["epoch"] > self.carried:
            self.armed = message["epoch"]

    def _on_stop(self, message: Message) -> None:
        if self.carried >= message["epoch"]:
            self.say("too_late", epoch=message["epoch"])
        else:
            self.armed = 0
            self.say("stopped", epoch=message["epoch"])

    def _on_cancel(self, message: Message) -> None:
        epoch = message["epoch"]
        self.cancelled.add(epoch)
        self.staged.pop(epoch, None)
        if self.outgoing == epoch:
            self.outgoing = 0

    def _on_interrupt(self, message: Message) -> None:
        epoch = message["epoch"]
        if epoch < self.recovery_epoch or epoch <= self.epoch:
            return
        self.recovery_epoch = epoch
        self.unsure = message["lost"]
        if self.rank is None:
            self.say("not_joined", epoch=epoch)
            return
        self.armed = 0
        self._say_where()

    def _on_duties(self, message: Message) -> None:
        self.duties = message

    def _on_snapshot_complete(self, message: Message) -> None:
        step = message["step"]
        self.snapshot_complete = max(self.snapshot_complete, step)
        if self.outstanding <= step:
            self.outstanding = -1
        if step in self.slots and self.slots[step][0] != "sending":
            self.slots[step][0] = "complete"
            for other in [s for s, slot in self.slots.items() if s != step and slot[0] == "complete"]:
                del self.slots[other]

    def _on_checkpoint(self, message: Message) -> None:
        self.checkpoint_asked = True

    def _on_checkpoint_complete(self, message: Message) -> None:
        self.checkpoint_outstanding = False

    def _on_publish(self, message: Message) -> None:
        state = self.job.disk[message["step"], message["epoch"]][0]
        self.background.append(("publish", state, message["epoch"], {}))

    def _on_where(self, message: Message) -> None:
        """The watchdog is no part of this simulation."""

    def _say_where(self) -> None:
        if self.stopped is None or self.recovery_epoch <= self.epoch:
            return
        wards: dict[str, list[int]] = {}
        nearly: dict[str, list[int]] = {}
        for rank in self.unsure:
            known = list(self.wards.get(rank, ()))
            before = list(self.nearly.get(rank, ()))
            if rank in self.adopted and not self.stopped["torn"]:
                known.append((self.step, self.adopted_mark[rank]))
                if self.stopped["at_vote"]:
                    before.append((self.step + 1, self.adopted[rank]))
            for step, private in known:
                self.say("ward", epoch=self.recovery_epoch, rank=rank, step=step, private=list(private))
            for step, private in before:
                told = {"rank": rank, "step": step, "private": list(private), "common": []}
                self.say("ward", epoch=self.recovery_epoch, **told)
            if known:
                wards[str(rank)] = [step for step, _ in known]
            if before:
                nearly[str(rank)] = [step for step, _ in before]
        complete = self.snapshot_complete
        snapshots = [complete] if complete in self.slots and self.slots[complete][0] != "sending" else []
        statement = {**self.stopped, "wards": wards, "nearly": nearly, "snapshots": snapshots}
        statement["adopted"] = sorted(self.adopted)
        self.say("survivor", epoch=self.recovery_epoch, rank=self.rank, **statement)

    def ward_of(self) -> int:
        assert self.rank is not None
        shape = self.job.shape
        stride = shape.ranks_per_node if shape.world_size > shape.ranks_per_node else 1
        ward = (self.rank - stride) % shape.world_size
        while ward in self.absent:
            ward = (ward - stride) % shape.world_size
        return ward

    # ---- the training thread: what it could do next ----

    def alternatives(self) -> tuple[str, ...]:
        """ "go": the next thing; "fail": what it waits for fails; "lost": a peer is found to be gone."""
        point = self.point
        if point in AWAITS_ORDERS:
            return ("go",) if self.orders else ()
        if point in COLLECTIVES:
            return self._in_collective()
        if point == "building":
            overtaken = self.recovery_epoch > self.order["epoch"]
            return ("go", "fail") if overtaken else ("go",)
        if point == "dial":
            return self._dialling()
        if point == "receive":
            return self._receiving()
        if point == "serving":
            return self._serving()
        return ("go",)

    def _interrupted(self) -> bool:
        return self.recovery_epoch > self.epoch

    def _is_cancelled(self, epoch: int) -> bool:
        return epoch in self.cancelled or epoch < self.recovery_epoch

    def _in_collective(self) -> tuple[str, ...]:
        found = ("go",) if self._answers() is not None else ()
        if self._interrupted():
            return (*found, "fail")
        return (*found, "lost") if self._gone_peer() is not None else found

    def _gone_peer(self) -> int | None:
        for rank in sorted(self._linked()):
            holder = self.job.holders.get((rank, self.epoch))
            if holder is not None and holder.incarnation != self.peers.get(rank):
                raise Violation(
                    f"{self} waits for {self.peers.get(rank)} as rank {rank}, which is {holder} now"
                )
            peer = self.job.process_of(self.peers.get(rank, -1))
            if peer is None or not peer.alive or not self.job.connected(self.node, peer.node):
                return rank
        return None

    def _dialling(self) -> tuple[str, ...]:
        epoch = self.order["epoch"]
        if self._is_cancelled(epoch):
            return ("fail",)
        table = incarnations(self.order["peers"])
        ready = True
        for rank in self.order["dial"]:
            peer = self.job.process_of(table[rank])
            if peer is None or not peer.alive or not self.job.connected(self.node, peer.node):
                return ("fail",)
            joining = peer.order.get("kind") == "join" and peer.order["epoch"] == epoch
            ready &= epoch in peer.staged or joining
        return ("go",) if ready else ()

    def _receiving(self) -> tuple[str, ...]:
        epoch, rank = self.order["epoch"], self.order["rank"]
        sent = self.job.transfers.get((epoch, rank))
        found = ("go",) if sent is not None and sent.reaches(self) else ()
        source = self.job.process_of(self.order["sources"][0][1])
        gone = source is None or not source.alive or not self.job.connected(self.node, source.node)
        return (*found, "fail") if gone or self._is_cancelled(epoch) else found

    def _serving(self) -> tuple[str, ...]:
        served = (self.epoch, self.to_serve[0]) in self.job.taken
        return (*(("go",) if served else ()), *(("fail",) if self._interrupted() else ()))

    # ---- the training thread: doing it ----

    def take(self, which: str) -> None:
        if which == "go":
            getattr(self, f"_at_{self.point}")()
        else:
            self._fail(self._gone_peer() if which == "lost" else None)

    def _fail(self, lost: int | None) -> None:
        point = self.point
        if point in ("dial", "receive"):
            self._not_taken()
        elif point == "building":
            self.state = None
            self._stop(lost, begun=False)
        else:
            self._stop(lost, at_vote=point == "count", torn=point == "late")

    def break_link(self, lost: int | None) -> None:
        """A fault of the network: the collective that it waits in fails."""
        if self.point in COLLECTIVES:
            self._fail(lost)

    def _not_taken(self) -> None:
        """Taking a rank has failed, or was given up."""
        epoch = self.order["epoch"]
        if not self._is_cancelled(epoch):
            self.say("join_failed", epoch=epoch, rank=self.order["rank"], why="the link broke")
        self.order, self.point = {}, "idle"

    def _stop(
        self, lost: int | None = None, *, at_vote: bool = False, begun: bool = True, torn: bool = False
    ) -> None:
        self.say("broken", rank=self.rank, epoch=self.epoch, lost=lost, why="a collective failed")
        self._stop_at(at_vote=at_vote, begun=begun, torn=torn)
        self.point = "stopped"

    def _stop_at(self, *, at_vote: bool = False, begun: bool = True, torn: bool = False) -> None:
        committed = self.step if not torn else self.step - 1
        self.stopped = {"committed": committed, "at_vote": at_vote, "begun": begun, "torn": torn}
        self._say_where()

    def _at_epoch(self, epoch: int) -> None:
        if epoch < self.epoch:
            raise Violation(f"{self} goes back from epoch {self.epoch} to {epoch}")
        assert self.rank is not None
        self.epoch = epoch
        early, self.early_news = self.early_news, []
        for message in early:
            self._on_peers(message)
        self.stopped = None
        self.outgoing = 0 if self.outgoing <= epoch else self.outgoing
        self.outstanding = -1
        self.checkpoint_outstanding = False
        self._abandon()
        self.job.holds(self)

    def _take_seat(self, epoch: int, rank: int) -> bool:
        if self.recovery_epoch > epoch:
            return False
        self.rank = rank
        return True

    # ---- a step ----

    def _at_begin(self) -> None:
        assert self.state is not None and self.rank is not None
        if self.step >= self.job.shape.steps:
            self.say("rank_done", rank=self.rank, step=self.step, digest=repr(self.state.history))
            self.point = "done"
            self._stop_at()
            return
        if self.step <= self.first_step + 1 and self.step not in self.keys_told:
            self.keys_told.add(self.step)
            unshared = "" if self.job.shape.shares else "its script does not call tm_slurm.shares()"
            key = self.job.shape.key(self.rank, self.step)
            told = {"unshared": unshared} if self.step > self.first_step else {}
            self.say("replica_key", rank=self.rank, step=self.step, key=key, **told)
        if not self.exchange_due or self.ward_of() == self.rank:
            self.point = "compute"
        elif self._interrupted():
            self._stop()
        else:
            self._contribute("exchange", self.state.private)
            self.point = "exchange"

    def _at_exchange(self) -> None:
        ward = self.ward_of()
        private = self._answers()[ward]  # type: ignore[index]
        keep(self.wards, ward, self.step, private)
        self.exchange_due = False
        self.point = "compute"

    def _at_compute(self) -> None:
        assert self.state is not None
        if self._interrupted():
            self._stop()
            return
        rank, drawn = self.state.private
        self._contribute("collect", {rank: self.state.private, **self.adopted})
        self.state = replace(self.state, private=(rank, drawn + 1))
        self.adopted = {other: (whose, n + 1) for other, (whose, n) in self.adopted.items()}
        self.point = "collect"

    def _at_collect(self) -> None:
        answers = self._answers()
        assert answers is not None
        drawn = {rank: draw for brought in answers.values() for rank, draw in brought.items()}
        self.gradient = tuple(drawn[rank] for rank in sorted(drawn))
        if "shrink" not in self.job.shape.on_no_standby or self.ward_of() == self.rank:
            self.point = "vote"
        elif self._interrupted():
            self._stop()
        else:
            assert self.state is not None and self.rank is not None
            self._contribute("nearly", {self.rank: self.state.private, **self.adopted})
            self.point = "nearly"

    def _at_nearly(self) -> None:
        told = self._answers()[self.ward_of()]  # type: ignore[index]
        for rank, private in told.items():
            keep(self.nearly, rank, self.step + 1, private)
        self.point = "vote"

    def _at_vote(self) -> None:
        if self._interrupted():
            self._stop(at_vote=True)
            return
        self.carried = max(self.carried, self.armed)
        self._contribute("count", (self.armed, self._flags()))
        self.point = "count"

    def _at_count(self) -> None:
        votes = self._answers()
        assert votes is not None
        self.agreed = max(epoch for epoch, _ in votes.values()), max(flags for _, flags in votes.values())
        self.point = "apply"

    def _at_apply(self) -> None:
        if not self.job.shape.late_collectives:
            self._apply()
            self.point = "boundary"
        elif self._interrupted():
            self._apply_in_part()
            self._stop(torn=True)
        else:
            self._apply_in_part()
            self._contribute("late", 0)
            self.point = "late"

    def _at_late(self) -> None:
        self._committed()
        self.point = "boundary"

    def _apply_in_part(self) -> None:
        assert self.state is not None
        assert self.rank is not None
        history = (*self.state.history, self.gradient)
        shard = self.state.shard if self.step else self.job.shape.shard(self.rank, 1)
        self.state = replace(self.state, history=history, shard=shard)

    def _apply(self) -> None:
        self._apply_in_part()
        self._committed()

    def _committed(self) -> None:
        assert self.state is not None
        self.mark = self.state.private
        self.adopted_mark = dict(self.adopted)
        self.job.committed(self)

    def _at_boundary(self) -> None:
        agreed, flags = self.agreed
        if self.outgoing and self.point == "boundary":
            self._say_prepared()
        self.exchange_due |= bool(flags & 4)
        if agreed <= self.epoch or self.step >= self.job.shape.steps:
            self._store(flags)
            self.point = "begin"
        elif self.outgoing == agreed:
            self.say("switching", epoch=agreed, step=self.step)
            self.point = "hand_over"
        else:
            self._knows(self.staged.pop(agreed, {}), agreed)
            self._at_epoch(agreed)
            self.exchange_due = True
            self.point = "begin"

    def _at_hand_over(self) -> None:
        """Its state is on the way to the joiner; whoever is interrupted meanwhile still has it."""
        assert self.rank is not None
        self.job.send(self, self.outgoing, self.rank)
        self._stop_at()
        self.point = "left"

    # ---- collectives ----

    def _contribute(self, kind: str, value: Any) -> None:
        assert self.rank is not None
        table = self.job.contributions.setdefault((kind, self.epoch, self.step), {})
        if self.rank in table:
            raise Violation(f"rank {self.rank} brings {kind} of step {self.step}, epoch {self.epoch}, twice")
        table[self.rank] = Contribution(self, value, frozenset(self.job.cut_off))

    def _answers(self) -> dict[int, Any] | None:
        """What all have brought; None while somebody has not, or is not who this process thinks it is."""
        assert self.rank is not None
        table = self.job.contributions.get((self.point, self.epoch, self.step))
        if table is None:
            return None
        with_ward = self.point in ("exchange", "nearly")
        needed = [self.ward_of()] if with_ward else self._present()
        linked = self._linked()
        answers = {}
        for rank in needed:
            brought = table.get(rank)
            if brought is None or not (brought.process is self or brought.reaches(self)):
                return None
            if rank in linked and brought.process.incarnation != self.peers.get(rank):
                return None
            answers[rank] = brought.value
        return answers

    # ---- what is kept ----

    def _flags(self) -> int:
        if self.rank != min(self._present()):
            return 0
        shape, step = self.job.shape, self.step + 1
        flags = 4 if step % shape.exchange_every == 0 else 0
        wanted = self.duties.get("snapshots") and self.duties.get("vault") and self.outstanding < 0
        if wanted and not self.absent and step >= self.snapshot_complete + shape.snapshot_every:
            flags |= 1 | (self.snapshot_complete + 1) << COMPLETE_SHIFT
        every = shape.checkpoint_every
        if (self.checkpoint_asked or (every and step % every == 0)) and not self.checkpoint_outstanding:
            flags |= 2
        return flags

    def _store(self, flags: int) -> None:
        assert self.state is not None
        if flags & 1:
            self.outstanding = self.step
            if flags >> COMPLETE_SHIFT:
                self._on_snapshot_complete({"step": (flags >> COMPLETE_SHIFT) - 1})
            self._abandon()
            if self.duties.get("vault"):
                self.slots[self.step] = ["sending", self.state]
                self.background.append(("snapshot", self.state, self.epoch, self.duties))
        if flags & 2 and not self.checkpoint_outstanding:
            self.checkpoint_outstanding = True
            for private in (self.state.private, *self.adopted.values()):
                part = replace(self.state, private=private)
                self.background.append(("checkpoint", part, self.epoch, self.duties))

    def _abandon(self) -> None:
        """What is not complete by now will never be."""
        self.slots = {step: slot for step, slot in self.slots.items() if slot[0] == "complete"}
        self.background = deque(work for work in self.background if work[0] != "snapshot")

    def work_behind(self) -> None:
        """The background thread's next piece of work."""
        kind, state, epoch, duties = self.background.popleft()
        if kind == "publish":
            self.job.publish(state.step, epoch)
            self.say("checkpoint_published", step=state.step, epoch=epoch, path="x")
            return
        told = {"rank": state.private[0], "step": state.step, "epoch": epoch}
        if kind == "checkpoint":
            self.job.disk.setdefault((state.step, epoch), {})[state.private[0]] = state
            self.checkpoint_outstanding = False
            self.say("checkpoint_written", **told)
            return
        complete = max((step for step, slot in self.slots.items() if slot[0] == "complete"), default=-1)
        if self.job.put(self, duties["vault"], state, epoch, complete):
            self.slots[state.step][0] = "stored"
            self.say("snapshot_stored", **told, keeper=duties["keeper"])
            return
        self.slots.pop(state.step, None)
        if self.outstanding == state.step:
            self.outstanding = -1

    # ---- orders ----

    def _at_starting(self) -> None:
        self.point = "idle"
        self.say("process_ready", host=self.node, port=self.incarnation)

    def _at_idle(self) -> None:
        order = self.orders.popleft()
        kind, epoch = order["kind"], order.get("epoch", 0)
        if "peers" in order and incarnations(order["peers"])[order["rank"]] != self.incarnation:
            return  # it was for the process that was in this slot before
        if kind in ("retire", "exit", "finish"):
            self.job.process_ends(self, 0)
        elif kind == "warm":
            self.warm_for = order["rank"]
            self.say("process_warm", rank=self.warm_for)
        elif kind == "assign" and self._take_seat(epoch, order["rank"]):
            self.order, self.point = order, "building"
        elif kind == "join" and not self._is_cancelled(epoch):
            self.order, self.point = order, "dial"
            if self.warm_for != order["rank"]:
                self._not_taken()
        elif kind == "replace" and not self._is_cancelled(epoch):
            self._replace(order)

    def _at_building(self) -> None:
        """Alone in the process; who is interrupted meanwhile may notice it here or in its first step."""
        assert self.rank is not None
        order = self.order
        self.peers = {}
        self._knows(incarnations(order["peers"]), order["epoch"])
        self._does_alone(order)
        self._at_epoch(order["epoch"])
        self.wards.clear()
        self.nearly.clear()
        self.keys_told.clear()
        back_to = order.get("back_to") or order.get("restore") or {}
        if back_to.get("source") == "checkpoint":
            self.state = self.job.checkpointed(back_to["step"], self.rank)
        else:
            self.state = State(self.job.shape.shard(self.rank, 0), (), (self.rank, 0))
        self._gone_back(self.step)
        self.first_step = self.step
        self._go_on_from(self.state)

    def _at_dial(self) -> None:
        self.peers = {}
        self._knows(incarnations(self.order["peers"]), self.order["epoch"])
        self.say("joined", epoch=self.order["epoch"], rank=self.order["rank"])
        self.point = "receive"

    def _at_receive(self) -> None:
        order = self.order
        key = order["epoch"], order["rank"]
        state = self.job.transfers[key].value
        self.job.taken.add(key)
        if order["kind"] == "replace":
            state = replace(state, private=self._replayed(order))
        self._resume(order, state)

    def _replayed(self, order: Message) -> Draw:
        rank, drawn = order["private"]
        return rank, drawn + order["target"] - order["private_step"]

    def _resume(self, order: Message, state: State) -> None:
        if self._is_cancelled(order["epoch"]) or not self._take_seat(order["epoch"], order["rank"]):
            self._not_taken()
            return
        self.peers = {}
        self._knows(incarnations(order["peers"]), order["epoch"])
        self._does_alone(order)
        self.wards.clear()
        self.nearly.clear()
        self._at_epoch(order["epoch"])
        self.order = {}
        self._go_on_from(state)
        self.say("resumed", epoch=self.epoch, rank=self.rank, step=self.step)

    def _does_alone(self, order: Message) -> None:
        """No share but its own."""
        self.absent = frozenset(order.get("absent", ()))
        self.adopted, self.adopted_mark = {}, {}

    def _replace(self, order: Message) -> None:
        back_to = order.get("back_to")
        if back_to is None:
            self.order, self.point = order, "receive"
            self.peers = {}
            self._knows(incarnations(order["peers"]), order["epoch"])
        elif back_to.get("again"):
            if self._take_seat(order["epoch"], order["rank"]):
                self.order, self.point = order, "building"
                self.say("resumed", epoch=order["epoch"], rank=self.rank, step=order["target"])
        else:
            self.order = order
            state = self._stored(back_to, order["rank"])
            if state is None:
                self._not_taken()
            else:
                self._resume(order, state)

    def _stored(self, back_to: Message, rank: int) -> State | None:
        step = back_to["step"]
        if back_to["source"] == "checkpoint":
            self._gone_back(step)
            return self.job.checkpointed(step, rank)
        if step in self.slots and self.slots[step][0] != "sending" and self.rank == rank:
            self.snapshot_complete = step
            return self.slots[step][1]  # type: ignore[no-any-return]
        found = self.job.fetch(self, back_to.get("vault"), rank, step)
        if found is not None:
            self.slots = {step: ["complete", found]}
            self.snapshot_complete = step
        return found

    def _gone_back(self, step: int) -> None:
        if self.snapshot_complete > step:
            self.snapshot_complete = -1
        self.slots = {kept: slot for kept, slot in self.slots.items() if kept <= step}

    def _at_left(self) -> None:
        if self.orders[0]["kind"] == "retire":
            self.job.process_ends(self, 0)
        else:
            self._at_stopped()

    def _at_done(self) -> None:
        if self.orders[0]["kind"] == "finish":
            self.job.finished(self)
            self.job.process_ends(self, 0)
        else:
            self._at_stopped()

    def _at_stopped(self) -> None:
        """Taking the order and ending the statement is one: an interrupt that comes later is answered when
        this process has stopped again."""
        order = self.orders.popleft()
        if order["kind"] == "exit":
            self.job.process_ends(self, 1)
        elif order["kind"] == "resolve" and order["epoch"] == self.recovery_epoch:
            assert self.stopped is not None
            self._check(order, self.stopped)
            self.order = {**order, "at_vote": self.stopped["at_vote"]}
            self.stopped = None
            self.point = "following"

    def _check(self, order: Message, stopped: Message) -> None:
        if order.get("back_to") is None and (stopped["torn"] or not stopped["begun"]):
            raise Violation(f"rank {self.rank}, {stopped}, is to go on without going back")

    def _at_following(self) -> None:
        order, self.order = self.order, {}
        back_to = order.get("back_to")
        if back_to is None:
            self._come_to(order["target"], order["at_vote"])
        elif back_to.get("again"):
            self.order, self.point = order, "building"
            return
        self._knows(incarnations(order["changes"]), order["epoch"])
        if back_to is not None:
            self._does_alone(order)
        else:
            self._adopt(order)
        self._at_epoch(order["epoch"])
        if back_to is not None:
            assert self.rank is not None
            state = self._stored(back_to, self.rank)
            if state is None:
                self._stop()
                return
            self._go_on_from(state)
        self.to_serve = list(order["serve"])
        self._serve_next()

    def _go_on_from(self, state: State) -> None:
        self.state, self.mark = state, state.private
        self.exchange_due = True
        self.point = "begin"

    def _come_to(self, target: int, at_vote: bool) -> None:
        assert self.state is not None
        if target == self.step + 1 and at_vote and not self.job.shape.late_collectives:
            self._apply()
        elif target == self.step:
            self.state = replace(self.state, private=self.mark)
            self.adopted = dict(self.adopted_mark)
        else:
            raise Violation(f"rank {self.rank} at step {self.step} cannot come to {target}")

    def _adopt(self, order: Message) -> None:
        """The shares that it does from now on beside its own; what it did before it keeps in mind."""
        before, self.adopted = self.adopted, {}
        given = {int(rank): tuple(told["private"]) for rank, told in order["adopt"].items()}
        for rank in (*order["keep"], *given):
            if rank not in before and rank not in given:
                raise Violation(f"{self} is to do the share of rank {rank}, and has not its private state")
            self.adopted[rank] = given[rank] if rank in given else before[rank]
            if self.adopted[rank] != (rank, self.step):
                raise Violation(f"{self} adopts {self.adopted[rank]} as rank {rank} at step {self.step}")
        for rank in set(before) - set(self.adopted):
            keep(self.wards, rank, self.step, before[rank])
        self.adopted_mark = dict(self.adopted)
        self.absent = frozenset(order["absent"])
        if given:
            self.say("adopted", epoch=order["epoch"], rank=self.rank)

    def _serve_next(self) -> None:
        if self.to_serve:
            rank = self.to_serve[0]
            self.job.send(self, self.epoch, rank)
            self.say("source_ready", epoch=self.epoch, rank=rank, source=[self.node, self.incarnation])
            self.point = "serving"
        else:
            self.exchange_due = True
            self.point = "begin"

    def _at_serving(self) -> None:
        self.to_serve.pop(0)
        self._serve_next()


def keep(kept: dict[int, deque[tuple[int, Draw]]], rank: int, step: int, private: Draw) -> None:
    """As tm_slurm/runtime/wards.py does."""
    told = kept.setdefault(rank, deque(maxlen=KEPT_WARDS))
    while told and told[-1][0] >= step:
        told.pop()
    told.append((step, private))


def incarnations(table: Message) -> dict[int, int]:
    """Of a table of peers."""
    return {int(rank): int(peer[2]) for rank, peer in table.items()}
