"""What the coordinator knows: nodes, rank processes, seats, and the move in flight. Plain data, no torch, no
sockets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Standing = Literal["expected", "active", "standby", "leaving", "kept", "released", "lost"]
"""expected: not heard of yet; active: has ranks; standby: in reserve; leaving: its ranks have moved or are
stopping; kept: it should be given back, but Slurm cannot take it from the job; released: Slurm has it back;
lost: its agent is gone."""

Phase = Literal["preparing", "armed", "switching"]
"""preparing: phase 1, nothing in use is touched; armed: the leaver will carry the epoch into the next vote;
switching: a vote has carried it, the pause has begun."""

FAILURE_LIMIT = 2
"""A standby that has failed to come up or to join more often is not used any more."""


@dataclass
class Process:
    """One rank process: a slot of a node, and where its data listener is."""

    slot: int
    incarnation: int
    host: str
    port: int
    warm_for: int | None = None
    wanted_warm: int | None = None

    def peer(self) -> list[Any]:
        """The entry for this process in a table of peers: host, port, incarnation."""
        return [self.host, self.port, self.incarnation]


@dataclass
class Notice:
    """Why a node should be left. `gives_back`: it then goes to the administrator; else it stays as a
    standby."""

    event_id: str
    kind: str
    reason: str
    at: float
    source: str
    gives_back: bool
    said_waiting: bool = False


@dataclass
class Node:
    """One machine of the job."""

    name: str
    batch_host: bool
    standing: Standing = "expected"
    agent_up: bool = False
    processes: dict[int, Process] = field(default_factory=dict)
    notice: Notice | None = None
    failures: int = 0
    kept_because: str = ""
    drained: bool = False
    dead: bool = False
    """Its ranks have died; their seats are not taken over yet."""

    def free_to_join(self) -> bool:
        """Whether ranks may be moved here."""
        well = self.agent_up and self.failures <= FAILURE_LIMIT
        return self.standing == "standby" and well and self.notice is None


@dataclass
class Pair:
    """A leaver and the joiner that takes its ranks, one to one."""

    leaver: str
    joiner: str
    ranks: dict[int, int]
    """rank → slot, the same slot on both nodes"""


@dataclass
class Move:
    """A planned move in flight: one epoch, one or several leavers."""

    epoch: int
    pairs: list[Pair]
    started_at: float
    phase: Phase = "preparing"
    asked_to_join: set[int] = field(default_factory=set)
    linked: dict[int, list[int]] = field(default_factory=dict)
    """leaving rank → the ranks that it has open links to"""
    sources: dict[int, list[Any]] = field(default_factory=dict)
    """leaving rank → [host, port] where its state can be fetched"""
    joined: set[int] = field(default_factory=set)
    resumed: dict[int, dict[str, float]] = field(default_factory=dict)
    """moved rank → the bytes that its joiner received, and in how many seconds"""
    stop_asked: bool = False
    stop_reason: str = ""
    prepared_at: float = 0.0
    switching_at: float = 0.0

    def ranks(self) -> dict[int, Pair]:
        """Every moving rank and its pair."""
        return {rank: pair for pair in self.pairs for rank in pair.ranks}

    def trigger(self) -> int:
        """The leaving rank that carries the epoch into the vote, and may still take it back before."""
        return min(self.ranks())

    def leavers(self) -> list[str]:
        return [pair.leaver for pair in self.pairs]

    def joiners(self) -> list[str]:
        return [pair.joiner for pair in self.pairs]


@dataclass
class Recovery:
    """An unplanned failure being repaired: one epoch, one or several dead nodes (the leavers of `pairs`)."""

    epoch: int
    pairs: list[Pair]
    started_at: float
    how: str
    committed: dict[int, int] = field(default_factory=dict)
    """surviving rank → steps that it has committed"""
    at_vote: set[int] = field(default_factory=set)
    target: int | None = None
    agreed_at: float = 0.0
    resumed: dict[int, dict[str, float]] = field(default_factory=dict)
    restarted: bool = False

    def ranks(self) -> dict[int, Pair]:
        """Every dead rank and its pair."""
        return {rank: pair for pair in self.pairs for rank in pair.ranks}


@dataclass
class Plan:
    """What the job was started as. `order` is the allocation's node list, in Slurm's order."""

    order: list[str]
    batch_host: str | None
    active_nodes: int
    ranks_per_node: int
    prepare_timeout_s: float = 120.0
    switch_timeout_s: float = 60.0
    release: bool = True
    on_no_standby: str = "fail"

    @property
    def world_size(self) -> int:
        return self.active_nodes * self.ranks_per_node

    def first_standbys(self) -> list[str]:
        """The nodes that start as standbys: the batch host first, because Slurm cannot take it out of the
        job, then the last ones in order. Chosen by name and not by who came first, so that a spare that
        starts early never takes the place of a healthy node that is slower."""
        spare = len(self.order) - self.active_nodes
        last_first = [name for name in reversed(self.order) if name != self.batch_host]
        preferred = ([self.batch_host] if self.batch_host in self.order else []) + last_first
        return [name for name in preferred if name is not None][:spare]


@dataclass
class JobState:
    """Everything that decisions depend on."""

    plan: Plan
    nodes: dict[str, Node]
    seats: dict[int, tuple[str, int]]
    """rank → (node, slot)"""
    epoch: int = 0
    last_epoch: int = 0
    started: bool = False
    finishing: bool = False
    ended: bool = False
    verdict: dict[str, Any] | None = None
    move: Move | None = None
    done: dict[int, dict[str, Any]] = field(default_factory=dict)
    moves_done: int = 0
    recovery: Recovery | None = None
    recoveries_done: int = 0
    failures_at: dict[int, int] = field(default_factory=dict)
    """step → how often ranks have died at it"""

    @classmethod
    def initial(cls, plan: Plan) -> JobState:
        """The state before anybody has reported."""
        standbys = set(plan.first_standbys())
        nodes = {
            name: Node(name, name == plan.batch_host, "standby" if name in standbys else "expected")
            for name in plan.order
        }
        active = [name for name in plan.order if name not in standbys]
        seats = {
            place * plan.ranks_per_node + slot: (name, slot)
            for place, name in enumerate(active)
            for slot in range(plan.ranks_per_node)
        }
        return cls(plan, nodes, seats)

    def process(self, rank: int) -> Process | None:
        """The process that sits on `rank` now."""
        name, slot = self.seats[rank]
        return self.nodes[name].processes.get(slot)

    def ranks_on(self, name: str) -> dict[int, int]:
        """rank → slot for the ranks that sit on a node now."""
        return {rank: slot for rank, (node, slot) in self.seats.items() if node == name}

    def peers(self) -> dict[str, list[Any]]:
        """The table of peers at the current epoch, with string keys as JSON has them."""
        table = {}
        for rank in self.seats:
            process = self.process(rank)
            if process is not None:
                table[str(rank)] = process.peer()
        return table
