"""What the coordinator knows: nodes, rank processes, seats, and the move in flight. Plain data, no torch, no
sockets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tm_slurm.config.model import SLOWEST_BYTES_S
from tm_slurm.coordinator.roster import Nodes, PeerTable, Place, Seats

Standing = Literal["expected", "active", "standby", "leaving", "kept", "released", "lost"]
"""expected: not heard of yet; active: has ranks; standby: in reserve; leaving: its ranks have moved or are
stopping; kept: it should be given back, but Slurm cannot take it from the job; released: Slurm has it back;
lost: its agent is gone."""

Phase = Literal["preparing", "armed", "switching"]
"""preparing: phase 1, nothing in use is touched; armed: the leaver will carry the epoch into the next vote;
switching: a vote has carried it, the pause has begun."""

WHERE_IT_STANDS = frozenset({"standing", "notice", "dead"})
TOLD_TO_THE_ROSTER = WHERE_IT_STANDS | {"agent_up", "vault"}
"""What of a node decides who has to do with it."""

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
    warm_at: float = 0.0
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
    window: str = ""
    """id of the window that it is for, if nothing else speaks against the node"""
    deadline: float | None = None
    """when that opens"""


@dataclass
class ComingWindow:
    """A time in which Slurm keeps nodes for something else. `opens_at` and `closes_at` are the job's time,
    `opens` and `closes` the wall clock's (Unix seconds), as Slurm has them."""

    id: str
    name: str
    nodes: tuple[str, ...]
    opens_at: float
    closes_at: float
    opens: float
    closes: float


@dataclass
class Node:
    """One machine of the job."""

    name: str
    batch_host: bool
    standing: Standing = "expected"
    agent_up: bool = False
    connected: bool = False
    """Its agent is up and has come to this leader. If not, it may still come, or be lost."""
    away: bool = False
    """Its agent was not connected when it was to lead; it may be back at once, or be lost."""
    processes: dict[int, Process] = field(default_factory=dict)
    notice: Notice | None = None
    failures: int = 0
    kept_because: str = ""
    drained: bool = False
    dead: bool = False
    """Its ranks have died; their seats are not taken over yet."""
    may_return: bool = True
    """Lost in silence: its agent may still be there. One that was heard to end will not come back."""
    lost_at: float | None = None
    """since when it is lost, while it may still come back"""
    crashed: bool = False
    """One of its rank processes has ended by itself since the last recovery."""
    ended: dict[int, int] = field(default_factory=dict)
    """slot → the last incarnation whose end was heard of: it may be told again"""
    banned: set[int] = field(default_factory=set)
    """Incarnations that were declared dead: they may still run, and are nobody any more."""
    vault: list[Any] | None = None
    """[host, port] where its agent keeps snapshots of other nodes' ranks"""
    job_id: int | None = None
    """the standby job that it came with; None: it is one of the training job's own"""
    shunned: bool = False
    """It was lost, and Slurm may not know: not to be asked for, until the administrator resumes it."""

    def tell(self, roster: Nodes) -> None:
        """Have it hear of changes from now on."""
        self.__dict__["_roster"] = roster

    def __setattr__(self, name: str, value: Any) -> None:
        before = self.__dict__.get(name)
        object.__setattr__(self, name, value)
        roster: Nodes | None = self.__dict__.get("_roster")
        if roster is not None and name in TOLD_TO_THE_ROSTER and before != value:
            roster.changed(self, standing=name in WHERE_IT_STANDS)

    def is_plain(self) -> bool:
        """Whether it simply trains, or is to, or has left for good."""
        if self.standing == "released":
            return True
        return self.standing in ("active", "expected") and self.notice is None and not self.dead

    def well(self) -> bool:
        """Whether rank processes can be relied on to run here."""
        return self.agent_up and self.failures <= FAILURE_LIMIT

    def free_to_join(self) -> bool:
        """Whether ranks may be moved here."""
        return self.standing == "standby" and self.well() and self.notice is None


@dataclass
class Pair:
    """A leaver and the joiner that takes its ranks (all of them, or those that the node hosts for others)."""

    leaver: str
    joiner: str
    ranks: dict[int, int]
    """rank → slot on the joiner"""


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
    joined_after_s: dict[int, float] = field(default_factory=dict)
    resumed: dict[int, dict[str, float]] = field(default_factory=dict)
    """moved rank → the bytes that its joiner received, and in how many seconds"""
    stop_asked: bool = False
    stop_reason: str = ""
    joiner_lost: bool = False
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
class Absent:
    """A rank that was dropped for want of a place; a survivor does its share."""

    adopter: int
    seat: Place
    """where it was last"""


@dataclass
class Statement:
    """Where a living rank process has stopped, as it says."""

    rank: int
    committed: int
    """steps that it has applied"""
    at_vote: bool = False
    """whether it also has the gradients of the next one"""
    begun: bool = True
    """whether it has built its role"""
    torn: bool = False
    """whether it failed while it applied a step: it can neither go on nor back by itself"""
    wards: dict[int, list[int]] = field(default_factory=dict)
    """rank whose private state it keeps → the steps at whose beginning it was told"""
    nearly: dict[int, list[int]] = field(default_factory=dict)
    """the same for what was told before the vote of the step before: enough for a survivor"""
    adopted: list[int] = field(default_factory=list)
    """absent ranks whose share it does"""
    snapshots: list[int] = field(default_factory=list)
    """steps of the snapshots of itself that it keeps"""


@dataclass
class Ask:
    """One further node that Slurm is asked for, by a standby job. It is there until that job is over."""

    number: int
    at: float
    exclude: tuple[str, ...]
    minutes: int | None
    """what the standby job's time is limited to, if the training job's own is"""
    job_id: int | None = None
    node: str | None = None
    """the node that has joined by it"""
    unwanted: bool = False

    @property
    def is_coming(self) -> bool:
        """Whether a node may still join by it."""
        return self.node is None and not self.unwanted


@dataclass
class Recovery:
    """An unplanned failure being repaired: one epoch, any number of lost ranks (none: a step to redo)."""

    epoch: int
    how: str
    started_at: float
    """when the first failure that it repairs was heard of"""
    begun_at: float = 0.0
    """when it began, or began again, at this epoch"""
    asked: set[Place] = field(default_factory=set)
    """the processes that must say where they have stopped"""
    contested: dict[int, Place] = field(default_factory=dict)
    """rank → a process beside the one on its seat that may have taken it over, in a switch that failed"""
    unsure: set[int] = field(default_factory=set)
    """ranks that may be lost; once in question they are, whatever sits on their seats when it begins again"""
    moving: set[int] = field(default_factory=set)
    """ranks whose switch failed: their leavers may have handed them over to joiners that went ahead and
    died"""
    statements: dict[Place, Statement] = field(default_factory=dict)
    wards: dict[int, set[int]] = field(default_factory=dict)
    """rank → the steps at whose beginning somebody was told its private state"""
    nearly: dict[int, set[int]] = field(default_factory=dict)
    """rank → the steps before whose beginning somebody was told its private state, as it was at the vote"""
    refusals: set[Place] = field(default_factory=set)
    """asked processes that have no rank"""
    settled: bool = False
    """whether it is known which seats are lost"""
    lost: dict[int, str] = field(default_factory=dict)
    """rank without a process → the node that it was on"""
    places: dict[int, Place] = field(default_factory=dict)
    """lost rank → where it goes on"""
    dropped: dict[int, str] = field(default_factory=dict)
    """rank that goes on nowhere → the node that it was on"""
    adopters: dict[int, int] = field(default_factory=dict)
    """rank without a seat from now on → the survivor that does its share"""
    confirming: set[int] = field(default_factory=set)
    """survivors that have yet to say that they have taken over an absent rank's share"""
    cannot_shrink: str = ""
    target: int | None = None
    agreed_at: float = 0.0
    source: str = ""
    """where the lost ranks' state comes from: replicas, snapshot, checkpoint, or anew"""
    ready: dict[int, dict[int, list[Any]]] = field(default_factory=dict)
    """lost rank → share of its state → [host, port] where that can be fetched"""
    resumed: dict[int, dict[str, float]] = field(default_factory=dict)
    restarts: int = 0
    killed: bool = False
    """whether a rank process that somebody killed (SIGKILL) has been counted against the step"""
    damage: int = 0
    """seats without a process and nodes without an agent, when most were lost"""
    in_vain: int = 0
    """how often it began again though no more was lost"""
    waiting_since: float | None = None

    def survivors(self) -> dict[int, Statement]:
        """rank → what the process on its seat has said; complete once `settled`."""
        return {statement.rank: statement for statement in self.statements.values()}


@dataclass
class Accusation:
    """A rank whose collective has failed, and whom it holds to be lost (None: it cannot tell)."""

    rank: int
    lost: int | None
    why: str
    at: float


@dataclass
class Stored:
    """A state of the whole job that can be gone back to. `where`: rank → the node that keeps its part."""

    step: int
    epoch: int
    where: dict[int, str] = field(default_factory=dict)
    path: str = ""
    """of a checkpoint"""


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
    on_no_standby: tuple[str, ...] = ("fail",)
    refill_wait_s: float = 60.0
    failures_per_step: int = 2
    requeues_left: int = 1
    """how often the job may still go back into the queue"""
    window_lead_s: float | None = None
    stop_lead_s: float = 120.0
    finish_timeout_s: float = 600.0
    stop_timeout_s: float = 100.0
    batch_host_drain: str = "keep"
    refill: bool = False
    elastic: bool = False

    def transfer_timeout_s(self, nbytes: int) -> float:
        """How long it may take until `nbytes` of state are at another process, and links with them."""
        return self.switch_timeout_s + nbytes / SLOWEST_BYTES_S

    @property
    def world_size(self) -> int:
        return self.active_nodes * self.ranks_per_node

    @property
    def asks(self) -> bool:
        """Whether Slurm is asked for further nodes at all."""
        return self.refill or self.elastic

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
    nodes: Nodes
    seats: Seats
    """rank → (node, slot), of every rank that is not absent"""
    epoch: int = 0
    last_epoch: int = 0
    started: bool = False
    built_at: int = 0
    """the number of steps that were done when all ranks were built, together"""
    finishing: bool = False
    finishing_since: float = 0.0
    ended: bool = False
    verdict: dict[str, Any] | None = None
    move: Move | None = None
    done: dict[int, dict[str, Any]] = field(default_factory=dict)
    moves_done: int = 0
    recovery: Recovery | None = None
    recoveries_done: int = 0
    absent: dict[int, Absent] = field(default_factory=dict)
    """ranks without a seat"""
    unshared: dict[int, str] = field(default_factory=dict)
    """rank → why its script cannot do another one's share; absent: not known"""
    failures_at: dict[int, int] = field(default_factory=dict)
    """step → how often rank processes have died at it by themselves"""
    slow_on: dict[int, list[str]] = field(default_factory=dict)
    """rank → the nodes on which its own work was found to take longer than that of its replicas"""
    accused: dict[str, int] = field(default_factory=dict)
    """node → how many links to it have been called broken"""
    accusations: list[Accusation] = field(default_factory=list)
    """broken links that nothing else has explained yet"""
    changed: set[int] = field(default_factory=set)
    """ranks that have, or may be thought to have, another process than at the start: nobody knows who has
    heard of it"""
    replica_keys: dict[int, dict[int, str]] = field(default_factory=dict)
    """rank → step → digest of its parameters and optimizer state: ranks with equal ones are replicas"""
    keys_known: int = 0
    """of the ranks below this one both keys are known"""
    replicas: dict[tuple[int, str], set[int]] = field(default_factory=dict)
    """step and digest → the ranks that have told it"""
    first_peers: Mapping[str, list[Any]] = field(default_factory=dict)
    """where everybody was when training began"""
    nobody_leaves_at: int = -1
    """the version of `nodes` at which there was nobody to be moved"""
    ready_below: int = 0
    """before training begins: the ranks below this one were found to be there"""
    state_bytes: dict[int, int] = field(default_factory=dict)
    """rank → bytes of its parameters and optimizer state"""
    snapshot: Stored | None = None
    snapshot_in_work: Stored | None = None
    checkpoint: Stored | None = None
    older_checkpoints: list[Stored] = field(default_factory=list)
    """those that are still there, newest first, for when the newest is damaged"""
    checkpoints_given_up: set[str] = field(default_factory=set)
    """paths of those that ranks could not go back to"""
    refused: tuple[str, int, int] = ("", -1, 0)
    """source and step of the last state that a rank could not go back to, and how often that was so"""
    refused_in: int = -1
    """the epoch in which that was heard of last: a damaged one is refused by many at once"""
    checkpoint_in_work: Stored | None = None
    duties: dict[int, str] = field(default_factory=dict)
    """rank → what it was last told to do about snapshots and checkpoints"""
    duties_from_anew: bool = True
    """whether those of all ranks may be others now"""
    replica_groups: list[set[int]] = field(default_factory=list)
    """ranks that are replicas of each other after the first step, as known when duties were last assigned"""
    snapshots_wanted: bool = False
    """whether the loss of some node would lose parameters that no other node has"""
    reserving: set[int] = field(default_factory=set)
    """incarnations of standbys that were told to have memory ready for a snapshot"""
    redone: dict[int, int] = field(default_factory=dict)
    """step → how often it failed although no rank was lost"""
    crashes: list[dict[str, Any]] = field(default_factory=list)
    """rank processes that have ended by themselves at the step that the job is at, the first one first: node,
    ranks, how, log and last words"""
    recorded_bytes: dict[str, int] = field(default_factory=dict)
    """role class → bytes of its recording in the job directory"""
    stopping: str = ""
    """why the job goes back into the queue as soon as its checkpoint is written"""
    stopping_since: float = 0.0
    stopping_for: str = ""
    """id of the window that it stops for, or `node/NAME` of its batch host, if it does for such:
    then that may still be taken back"""
    stays_for: str = ""
    """`node/NAME` of the batch host for which it was to stop, and could write no checkpoint"""
    begins: float | None = None
    """Unix seconds: it is not to start again before"""
    outlook: dict[str, Any] = field(default_factory=dict)
    """what Slurm had in store when it was last asked, as it was told"""
    windows: list[ComingWindow] = field(default_factory=list)
    """over nodes of this job, the first first"""
    ends_at: float | None = None
    """when the job's time is over"""
    lasts_s: float = 0.0
    """seconds from its start to then"""
    prepared_s: float = 0.0
    """seconds that the longest preparation of a move has taken so far"""
    checkpoint_s: float = 0.0
    """seconds that the longest writing of a rank's part of a checkpoint has taken so far"""
    asks: dict[int, Ask] = field(default_factory=dict)
    """number → what Slurm is asked for, or has given, beyond the training job"""
    asked: int = 0
    """how often it was asked"""
    ask_failures: int = 0
    """how many of the last ones brought no node"""
    ask_again_at: float = 0.0
    """not before, unless what is excluded has changed since"""
    asked_in_vain: tuple[str, ...] = ()
    """what the last one that brought no node excluded"""

    def __post_init__(self) -> None:
        self._last_peers: PeerTable | None = None
        """what `peers` has made last, for the next who asks: no part of the state"""

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
        return cls(plan, Nodes(nodes), Seats(seats, plan.ranks_per_node))

    def has_own_nodes(self) -> bool:
        """Whether any node of the training job itself is still in it."""
        return any(n.job_id is None and n.standing != "released" for n in self.nodes.values())

    def process(self, rank: int) -> Process | None:
        """The process that sits on `rank` now."""
        name, slot = self.seats[rank]
        return self.nodes[name].processes.get(slot)

    def last_seat(self, rank: int) -> Place:
        """Where a rank is, or was before it was dropped."""
        return self.seats[rank] if rank in self.seats else self.absent[rank].seat

    def pacer(self) -> int:
        """The rank that asks the others for snapshots and checkpoints."""
        return min(self.seats)

    def ranks_on(self, name: str) -> dict[int, int]:
        """rank → slot for the ranks that sit on a node now."""
        return self.seats.on(name)

    def guests_on(self, name: str) -> dict[int, int]:
        """rank → slot for the ranks that a node hosts beyond its own slots."""
        return {r: slot for r, slot in self.ranks_on(name).items() if slot >= self.plan.ranks_per_node}

    def process_at(self, place: Place) -> Process | None:
        """The process in a slot of a node."""
        return self.nodes[place[0]].processes.get(place[1])

    def peers(self) -> PeerTable:
        """The table of peers at the current epoch, not to be changed: as it was at the start, with those that
        have changed."""
        if not self.first_peers or len(self.seats) < self.plan.world_size:
            return PeerTable(self._peers_of(self.seats), {})
        changes = self._peers_of(self.changed)
        if len(changes) < len(self.changed):  # one of them has no process now
            return PeerTable(self._peers_of(self.seats), {})
        last = self._last_peers
        if last is None or last.base is not self.first_peers or last.changes != changes:
            last = self._last_peers = PeerTable(self.first_peers, changes)
        return last

    def _peers_of(self, ranks: Iterable[int]) -> dict[str, list[Any]]:
        table = {}
        for rank in ranks:
            process = self.process(rank)
            if process is not None:
                table[str(rank)] = process.peer()
        return table

    def knows_replicas(self) -> bool:
        """Whether every rank has told both its keys."""
        while self.keys_known < self.plan.world_size and len(self.replica_keys.get(self.keys_known, ())) > 1:
            self.keys_known += 1
        return self.keys_known == self.plan.world_size
