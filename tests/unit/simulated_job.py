"""A whole job without a network or a clock, for tests of the decisions: agents, the leader's shell, and rank
processes, where whatever can happen next is a move, and faults come in between.

What the leader tells a node arrives in order and once, unless the node is declared lost before. What agents
tell the leader arrives in order, and is lost when the connection breaks; then they repeat what is still true.
"""

from __future__ import annotations

import json
import pickle
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from simulated_rank import COLLECTIVES, Contribution, Message, RankProcess, State, Violation

from tm_slurm.agent.facts import Facts
from tm_slurm.coordinator.actions import Action, End, Note, Release, Resign, Spread, Tell
from tm_slurm.coordinator.decide import Decisions
from tm_slurm.coordinator.model import FAILURE_LIMIT, JobState, Node, Plan

Moves = list[tuple[str, Callable[[], None]]]

START_LIMIT_S = 60.0
REPLICA_KINDS = ("replicas", "pairs", "shards", "shards of the optimizer")


@dataclass(frozen=True)
class Shape:
    """Of a job and what it is configured for."""

    nodes: int = 5
    active: int = 3
    ranks_per_node: int = 1
    replicas: str = "replicas"
    batch_host: bool = True
    steps: int = 6
    on_no_standby: tuple[str, ...] = ("fail",)
    failures_per_step: int = 1000
    exchange_every: int = 2
    snapshot_every: int = 2
    checkpoint_every: int = 0
    late_collectives: bool = False
    shares: bool = True
    """whether the script takes its work from tm_slurm.shares()"""
    restored: int = 0
    """the step of the checkpoint that an earlier start has left"""

    @property
    def world_size(self) -> int:
        return self.active * self.ranks_per_node

    def shard(self, rank: int, step: int) -> int:
        """Ranks with the same one after `step` steps are replicas."""
        if self.replicas == "replicas" or (self.replicas == "shards of the optimizer" and step == 0):
            return 0
        return rank % 2 if self.replicas == "pairs" else rank

    def key(self, rank: int, step: int) -> str:
        return f"{self.shard(rank, step)} at {step}"


class SimulatedFacts(Facts):
    """What an agent repeats to a leader. Whoever has said that a collective failed has stopped, whatever
    epochs it speaks of then."""

    def take(self, message: Message) -> None:
        if message["kind"] == "broken":
            message = {key: value for key, value in message.items() if key != "epoch"}
        super().take(message)


@dataclass
class Agent:
    """Of one node. `orders`: what the leader has told the node and it has not obeyed yet; `news`: what its
    ranks are to hear sometime."""

    node: str
    alive: bool = True
    connected: bool = False
    processes: dict[int, RankProcess] = field(default_factory=dict)
    facts: dict[int, SimulatedFacts] = field(default_factory=dict)
    exits: dict[int, Message] = field(default_factory=dict)
    orders: deque[tuple[int | None, Message]] = field(default_factory=deque)
    news: deque[Message] = field(default_factory=deque)
    to_leader: deque[Message] = field(default_factory=deque)
    vault: dict[int, dict[int, State]] = field(default_factory=dict)
    """rank → the steps, two at most, of its snapshots here"""
    kept: tuple[int, int] = (-1, -1)
    """the step that is not overwritten, and the epoch in which that was said"""
    vault_epoch: int = 0
    put_in: dict[tuple[int, int], int] = field(default_factory=dict)
    """rank and step → the epoch in which that snapshot came"""

    def forget_all_but(self, ranks: list[int], newest: tuple[int, int]) -> None:
        for rank in [rank for rank in self.vault if rank not in ranks]:
            if all((self.put_in[rank, step], step) <= newest for step in self.vault[rank]):
                del self.vault[rank]


class SimulatedJob:
    """`moves()` is what could happen next; the other public methods are faults and the passing of time."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        order = [f"n{number}" for number in range(1, shape.nodes + 1)]
        self.plan = Plan(
            order,
            "n1" if shape.batch_host else None,
            shape.active,
            shape.ranks_per_node,
            on_no_standby=shape.on_no_standby,
            failures_per_step=shape.failures_per_step,
        )
        self.clock = 0.0
        self.log: list[str] = []
        self.journal: list[str] = []
        self.leader: str | None = order[0]
        self.decisions = Decisions(JobState.initial(self.plan), order[0])
        self.agents = {name: Agent(name) for name in order}
        self.cut_off: set[str] = set()
        self.everybody: dict[int, RankProcess] = {}
        self.contributions: dict[tuple[str, int, int], dict[int, Contribution]] = {}
        self.transfers: dict[tuple[int, int], Contribution] = {}
        self.taken: set[tuple[int, int]] = set()
        self.holders: dict[tuple[int, int], RankProcess] = {}
        self.disk: dict[tuple[int, int], dict[int | None, State]] = {}
        self.published: dict[int, dict[int | None, State]] = {}
        self.wards: dict[tuple[int, int], dict[int, Any]] = {}
        self.nearly: dict[tuple[int, int], dict[int, Any]] = {}
        self.held: list[tuple[str, int | None, Message]] = []
        self.work: list[Message] = []
        self.finished_ranks: set[int] = set()
        self.has_gone_back = False
        self.shrunk = self.grown = 0
        self.start_expired_at = 0.0
        self.faults = 0
        self.kills = 0
        self.dies_after: int | None = None
        self.ended: End | None = None
        self.slow: tuple[str, ...] = ()
        """nodes where nothing happens as long as anything happens elsewhere"""
        for name in order:
            self._spawn(name, None)
        self.feed({"kind": "led", "node": order[0], "term": 1})
        if shape.restored:
            self._left_by_an_earlier_start(shape.restored)

    @property
    def state(self) -> JobState:
        return self.decisions.state

    # ---- what the ranks use ----

    def process_of(self, incarnation: int) -> RankProcess | None:
        return self.everybody.get(incarnation)

    def connected(self, one: str, other: str) -> bool:
        return one == other or not ({one, other} & self.cut_off)

    def send(self, source: RankProcess, epoch: int, rank: int) -> None:
        self.transfers[epoch, rank] = Contribution(source, source.state, frozenset(self.cut_off))

    def said(self, process: RankProcess, message: Message) -> None:
        agent = self.agents[process.node]
        message |= {"slot": process.slot, "incarnation": process.incarnation}
        agent.facts[process.slot].take(message)
        self._to_leader(agent, message)

    def put(self, process: RankProcess, vault: list[Any], state: State, epoch: int, complete: int) -> bool:
        """Store a snapshot as tm_slurm/agent/vault.py does."""
        keeper = self.agents[vault[0]]
        unreachable = not keeper.alive or not self.connected(process.node, keeper.node)
        if unreachable or epoch < keeper.vault_epoch:
            return False
        keeper.vault_epoch = epoch
        if complete > keeper.kept[0] or (state.step < keeper.kept[0] and epoch > keeper.kept[1]):
            keeper.kept = complete, epoch
        slots = keeper.vault.setdefault(state.private[0], {})
        slots[state.step] = state
        keeper.put_in[state.private[0], state.step] = epoch
        others = sorted(step for step in slots if step not in (state.step, keeper.kept[0]))
        for step in others[: len(slots) - 2]:
            del slots[step]
        return True

    def fetch(self, process: RankProcess, vault: list[Any] | None, rank: int, step: int) -> State | None:
        if vault is None:
            return None
        keeper = self.agents[vault[0]]
        if not keeper.alive or not self.connected(process.node, keeper.node):
            return None
        found = keeper.vault.get(rank, {}).get(step)
        if found is None:
            raise Violation(f"{keeper.node} has no snapshot of rank {rank} at step {step}")
        return found

    def checkpointed(self, step: int, rank: int) -> State:
        return self.published[step][rank]

    def publish(self, step: int, epoch: int) -> None:
        parts = self.disk.get((step, epoch), {})
        if set(parts) != set(range(self.shape.world_size)):
            raise Violation(f"the checkpoint of step {step} is published, and is not whole")
        self.published[step] = parts

    def _left_by_an_earlier_start(self, step: int) -> None:
        ranks = range(self.shape.world_size)
        history = tuple(tuple((rank, before) for rank in ranks) for before in range(step))
        self.published[step] = {
            rank: State(self.shape.shard(rank, step), history, (rank, step)) for rank in ranks
        }
        self.feed({"kind": "checkpoint_found", "step": step, "path": "x"})

    def holds(self, process: RankProcess) -> None:
        """This process is a rank at an epoch now: nobody else may ever be, at the same one."""
        assert process.rank is not None
        key = process.rank, process.epoch
        if self.holders.setdefault(key, process) is not process:
            raise Violation(f"{process} and {self.holders[key]} are both rank {key[0]} at epoch {key[1]}")

    def committed(self, process: RankProcess) -> None:
        """Every commit of every process, those included that were declared dead."""
        state, rank = process.state, process.rank
        assert state is not None and rank is not None
        self.agents[process.node].facts[process.slot].runs_at(process.epoch)
        expected = tuple(
            tuple((r, step) for r in range(self.shape.world_size)) for step in range(len(state.history))
        )
        if state.history != expected:
            raise Violation(f"rank {rank} has applied {state.history[-3:]}, not {expected[-3:]}")
        if state.private != (rank, state.step):
            raise Violation(f"rank {rank} after {state.step} steps has the private state {state.private}")
        for other, private in process.adopted_mark.items():
            if private != (other, state.step):
                raise Violation(f"rank {rank} after {state.step} steps has {private} of rank {other}")
        if state.shard != self.shape.shard(rank, 1):
            raise Violation(f"rank {rank} has the parameters of shard {state.shard}")
        for (_, epoch), other in self.holders.items():
            if epoch == process.epoch == other.epoch and abs(other.step - process.step) > 1:
                raise Violation(f"{process} is at step {process.step}, {other} at {other.step}")

    def finished(self, process: RankProcess) -> None:
        if process.step != self.shape.steps or process.rank is None:
            raise Violation(f"{process} is told to finish at step {process.step}")
        self.finished_ranks.add(process.rank)

    # ---- agents ----

    def _spawn(self, node: str, slots: list[int] | None) -> None:
        agent = self.agents[node]
        for slot in range(self.shape.ranks_per_node) if slots is None else slots:
            if slot not in agent.processes:
                process = RankProcess(self, node, slot, len(self.everybody) + 1)
                self.everybody[process.incarnation] = process
                agent.processes[slot] = process
                agent.facts[slot] = SimulatedFacts()
                agent.exits.pop(slot, None)

    def process_ends(self, process: RankProcess, code: int, how: str = "") -> None:
        agent = self.agents[process.node]
        if not process.alive:
            return
        process.alive = False
        process.point = "dead"
        del agent.processes[process.slot]
        del agent.facts[process.slot]
        exited = {
            "kind": "process_exited",
            "slot": process.slot,
            "incarnation": process.incarnation,
            "code": code,
            "how": how or f"exit code {code}",
            "log": "x.log",
        }
        agent.exits[process.slot] = exited
        self._to_leader(agent, exited)

    def _to_leader(self, agent: Agent, message: Message) -> None:
        if agent.connected:
            agent.to_leader.append(message)

    def _connect(self, agent: Agent) -> None:
        agent.connected = True
        agent.to_leader.clear()
        self.feed({"kind": "node_joined", "node": agent.node})
        if not agent.connected:  # the leader has died over it
            return
        self._to_leader(agent, {"kind": "vault", "host": agent.node, "port": 1})
        for exited in agent.exits.values():
            self._to_leader(agent, exited)
        for slot in agent.processes:
            for fact in agent.facts[slot].told():
                self._to_leader(agent, fact)

    def _obey(self, agent: Agent) -> None:
        slot, message = agent.orders.popleft()
        kind = message["kind"]
        self.log.append(f"    {agent.node}.{slot} obeys {message}")
        if slot is not None:
            if slot in agent.processes:
                agent.processes[slot].hear(message)
        elif kind == "spawn":
            self._spawn(agent.node, message.get("slots"))
        elif kind == "kill":
            for process in list(agent.processes.values()):
                self.process_ends(process, -9, "signal SIGKILL")
        elif kind == "retire":
            for process in list(agent.processes.values()):
                self.process_ends(process, -15, "signal SIGTERM")
            self._to_leader(agent, {"kind": "agent_retired"})
            self._to_leader(agent, {"kind": "agent_gone"})
            self._agent_dies(agent)
        elif kind == "exit":
            self._agent_dies(agent)
        elif kind == "keep":
            agent.vault_epoch = max(agent.vault_epoch, message["epoch"])
            agent.kept = message["step"], agent.vault_epoch
            agent.forget_all_but(message["ranks"], (message["epoch"], message["step"]))
        elif kind == "epoch":
            agent.vault_epoch = max(agent.vault_epoch, message["epoch"])

    def _hear_news(self, agent: Agent) -> None:
        message = agent.news.popleft()
        for process in agent.processes.values():
            process.hear(message)

    # ---- the leader's shell ----

    def feed(self, given: Message) -> None:
        if self.leader is None or self.ended is not None:
            return
        given = {"at": self.clock, **given}
        text = json.dumps(given)
        self.log.append(f"leader {self.leader} takes {text}")
        self.journal.append(text)
        if given["kind"] == "node_lost":
            self.agents[given["node"]].orders.clear()
            self.agents[given["node"]].news.clear()
        before = self.state.epoch, self.state.last_epoch
        actions = self.decisions.handle(json.loads(text))
        for action in actions:
            if isinstance(action, Tell):  # the next leader finds it in the journal, should this one die now
                self._tell(action.node, action.slot, json.loads(json.dumps(action.message)))
            elif isinstance(action, Spread):
                for agent in self.agents.values():
                    agent.news.append(json.loads(json.dumps(action.message)))
        for number, action in enumerate(actions):
            if self.dies_after is not None and number >= self.dies_after:
                break
            self._perform(action)
        self._check(before)
        if self.dies_after is not None:
            self.dies_after = None
            self.leader_dies()

    def _check(self, before: tuple[int, int]) -> None:
        state = self.state
        there = {str(r): p.peer() for r in state.seats if (p := state.process(r)) is not None}
        if state.recovery is None and not state.finishing and state.peers() != there:
            raise Violation(f"peers are told as {state.peers()}, they are {there}")
        if (state.epoch, state.last_epoch) < before or state.epoch > state.last_epoch:
            raise Violation(f"epochs went from {before} to {state.epoch}, {state.last_epoch}")
        places = list(state.seats.values())
        everybody = sorted([*state.seats, *state.absent])
        if len(set(places)) != len(places) or everybody != list(range(self.shape.world_size)) or not places:
            raise Violation(f"seats {state.seats}, absent {state.absent}")
        if state.recovery is not None:
            places += state.recovery.places.values()
        for name, _ in places:
            if state.nodes[name].standing == "released" and not state.finishing:
                raise Violation(f"{name} was released and has ranks")

    def _perform(self, action: Action) -> None:
        if isinstance(action, Note):
            self.log.append(f"  note {action.what} {action.fields}")
            self.shrunk += action.what == "shrunk"
            self.grown += action.what == "grown"
            self.has_gone_back |= action.what == "resolve" and action.fields["source"] != "replicas"
        elif isinstance(action, Release):
            self.work.append({"kind": "released", "node": action.node})
        elif isinstance(action, Resign):
            if self.agents[action.to].connected and action.to not in self.cut_off:
                self.work.append({"kind": "resign", "to": action.to})
            else:
                self.work.append({"kind": "resign_failed", "to": action.to})
        elif isinstance(action, End):
            self.ended = action
            self.log.append(f"  end {action}")

    def _tell(self, node: str, slot: int | None, message: Message) -> None:
        if message["kind"] == "replace" and "back_to" not in message and "private" not in message:
            known = self.wards.get((message["epoch"], message["rank"]), {})
            fit = [step for step in known if step <= message["target"]]
            if not fit:
                self.held.append((node, slot, message))
                return
            message |= {"private": known[max(fit)], "private_step": max(fit)}
        if message.get("adopt"):
            adopt = {}
            for rank in message["adopt"]:
                key = message["epoch"], int(rank)
                known = {**self.nearly.get(key, {}), **self.wards.get(key, {})}
                if message["target"] not in known:
                    self.held.append((node, slot, message))
                    return
                adopt[rank] = {"private": known[message["target"]], "common": []}
            message |= {"adopt": adopt}
        self.log.append(f"  tell {node}.{slot} {message}")
        self.agents[node].orders.append((slot, message))

    def _hear(self, agent: Agent) -> None:
        message = agent.to_leader.popleft()
        if message["kind"] == "ward":
            wards = self.nearly if "common" in message else self.wards
            kept = wards.setdefault((message["epoch"], message["rank"]), {})
            kept[message["step"]] = message["private"]
            held, self.held = self.held, []
            for node, slot, order in held:
                self._tell(node, slot, order)
            return
        if message["kind"] == "agent_gone":
            agent.connected = False
        self.feed({**message, "node": agent.node})

    def _work(self, number: int) -> None:
        done = self.work.pop(number)
        if done["kind"] == "resign":
            self.leader_dies(counts=False)
            self.lead(done["to"])
        else:
            self.feed(done)

    # ---- what could happen next ----

    def moves(self) -> Moves:
        found: Moves = []
        for name, agent in self.agents.items():
            if not agent.alive:
                if agent.connected and agent.to_leader and self.leader is not None:
                    found.append((f"{name} is heard", lambda a=agent: self._hear(a)))
                continue
            if self.leader is not None and name not in self.cut_off:
                if not agent.connected:
                    found.append((f"{name} connects", lambda a=agent: self._connect(a)))
                else:
                    if agent.to_leader:
                        found.append((f"{name} is heard", lambda a=agent: self._hear(a)))
                    if agent.orders:
                        found.append((f"{name} obeys", lambda a=agent: self._obey(a)))
                    if agent.news:
                        found.append((f"{name} hears news", lambda a=agent: self._hear_news(a)))
            for process in agent.processes.values():
                for which in process.alternatives():
                    what = f"{process} rank {process.rank} {process.point} {which}"
                    found.append((what, lambda p=process, w=which: p.take(w)))
                if process.background:
                    found.append((f"{process} stores", process.work_behind))
        if self.leader is not None:
            found += [(f"done: {w}", lambda n=n: self._work(n)) for n, w in enumerate(self.work)]
        return found

    def move(self, choice: int) -> bool:
        """Make one of the moves; False when there is none."""
        moves = self.moves()
        if not moves or self.ended is not None:
            return False
        if self.slow:
            moves = [move for move in moves if not move[0].startswith(self.slow)] or moves
        what, do = moves[choice % len(moves)]
        self.log.append(what)
        self.clock += 0.001
        do()
        return True

    # ---- faults ----

    def kill(self, choice: int) -> None:
        """A rank process dies."""
        processes = [p for agent in self.agents.values() for p in agent.processes.values()]
        if processes:
            self.faults += 1
            self.kills += 1
            process = processes[choice % len(processes)]
            self.log.append(f"FAULT {process} rank {process.rank} {process.point} dies")
            self.process_ends(process, -9, "signal SIGKILL")

    def power_off(self, choice: int) -> None:
        """A node is gone for good."""
        agents = [agent for agent in self.agents.values() if agent.alive]
        if len(agents) > 1:
            self.faults += 1
            agent = agents[choice % len(agents)]
            self.log.append(f"FAULT {agent.node} is powered off")
            self._agent_dies(agent)

    def _agent_dies(self, agent: Agent) -> None:
        agent.alive = False
        for process in agent.processes.values():
            process.alive = False
            process.point = "dead"
        agent.processes.clear()
        if self.leader == agent.node:
            self.leader_dies(counts=False)

    def cut(self, choice: int) -> None:
        """A node has no network any more; what runs there goes on."""
        names = [name for name in self.agents if name not in self.cut_off and self.agents[name].alive]
        if len(names) > 1:
            self.faults += 1
            name = names[choice % len(names)]
            self.log.append(f"FAULT {name} is cut off")
            self.cut_off.add(name)
            if self.leader == name:
                self.leader_dies(counts=False)

    def heal(self, choice: int) -> None:
        names = sorted(self.cut_off)
        if names:
            self.log.append(f"{names[choice % len(names)]} has a network again")
            self.cut_off.discard(names[choice % len(names)])

    def reset(self, choice: int) -> None:
        """An agent's connection to the leader breaks; what it has just said is lost."""
        agents = [a for a in self.agents.values() if a.connected and a.alive]
        if agents:
            self.faults += 1
            agent = agents[choice % len(agents)]
            self.log.append(f"FAULT {agent.node}'s connection breaks, {len(agent.to_leader)} messages lost")
            agent.connected = False
            agent.to_leader.clear()
            self.feed({"kind": "agent_away", "node": agent.node})

    def break_link(self, choice: int, blames: bool) -> None:
        """A collective fails at one rank although all are well."""
        processes = [p for agent in self.agents.values() for p in agent.processes.values()]
        waiting = [p for p in processes if p.point in COLLECTIVES]
        if waiting:
            self.faults += 1
            process = waiting[choice % len(waiting)]
            assert process.rank is not None
            lost = (process.rank + 1 + choice) % self.shape.world_size if blames else None
            self.log.append(f"FAULT a link of {process}, rank {process.rank}, breaks: {lost}")
            process.break_link(lost if lost != process.rank else None)

    def fail_to_join(self, choice: int) -> None:
        joining = [
            p for a in self.agents.values() for p in a.processes.values() if p.point in ("dial", "receive")
        ]
        if joining:
            self.faults += 1
            joining[choice % len(joining)].take("fail")

    def accuse(self, choice: int) -> None:
        """The watchdog finds a rank stuck, rightly or not."""
        rank = choice % self.shape.world_size
        if self.state.started:
            self.faults += 1
            self.log.append(f"FAULT rank {rank} is stuck")
            self.feed({"kind": "step_stuck", "ranks": [rank], "step": 1, "how": "does not get on"})

    def event(self, kind: str, choice: int) -> None:
        """Slurm says something of a node, or of the job."""
        if kind == "reservation":
            self._reserve(choice)
            return
        name = self.plan.order[choice % len(self.plan.order)]
        if self.state.nodes[name].standing in ("released", "lost") and kind == "resume":
            return
        self.log.append(f"EVENT {kind} {name}")
        event = {"id": f"{kind}:{len(self.journal)}", "kind": kind, "node": name, "source": "poll"}
        self.feed({"kind": "events", "events": [event]})

    def _reserve(self, choice: int) -> None:
        """A reservation of any nodes, now or soon, takes the place of those before; or of none."""
        order = self.plan.order
        names = [name for place, name in enumerate(order) if choice >> place & 1]
        opens = self.clock + (0.0, 30.0, 650.0)[choice % 3]
        listed = [{"name": "r", "nodes": names, "opens": opens, "closes": opens + 300.0}] if names else []
        self.log.append(f"EVENT reservation {names} in {opens - self.clock:g} s")
        outlook = {"wall": self.clock, "windows": listed, "starts": None, "ends": None}
        self.feed({"kind": "outlook", **outlook})

    def lose(self, choice: int) -> bool:
        """The leader gives up a node that it does not hear."""
        if self.leader is None:
            return False
        silent = [
            a
            for a in self.agents.values()
            if self.state.nodes[a.node].agent_up
            and (not a.connected or not a.alive or a.node in self.cut_off)
        ]
        if not silent:
            return False
        agent = silent[choice % len(silent)]
        agent.connected = False
        agent.to_leader.clear()
        self.feed({"kind": "node_lost", "node": agent.node, "reason": "its agent is silent"})
        return True

    # ---- the leader comes and goes ----

    def leader_dies(self, *, counts: bool = True) -> None:
        """And with it what was on the way to it, and what it had begun."""
        if self.leader is None:
            return
        self.faults += counts
        self.log.append(f"LEADER {self.leader} leads no more")
        self.leader = None
        self.work.clear()
        self.held.clear()
        self.wards.clear()
        self.nearly.clear()
        for agent in self.agents.values():
            agent.connected = False
            agent.to_leader.clear()

    def lead(self, node: str) -> None:
        """The next leader: it has the journal and nothing else, and of its first half what it came to."""
        again = Decisions(JobState.initial(self.plan), self.plan.order[0])
        half = len(self.journal) // 2
        for text in self.journal[:half]:
            again.handle(json.loads(text))
        again = pickle.loads(pickle.dumps(again))
        for text in self.journal[half:]:
            again.handle(json.loads(text))
        if again.state != self.state:
            raise Violation("the journal leads to another state")
        self.decisions = again
        self.leader = node
        self.log.append(f"LEADER {node} leads")
        self.feed({"kind": "led", "node": node, "term": 2})
        if self.state.verdict is not None:
            self.ended = End(**self.state.verdict)

    def elect(self, choice: int) -> bool:
        names = [a.node for a in self.agents.values() if a.alive and a.node not in self.cut_off]
        if self.leader is not None or not names:
            return False
        self.lead(names[choice % len(names)])
        return True

    # ---- time ----

    def pass_time(self, seconds: float) -> bool:
        """Whether anything was due."""
        self.clock += seconds
        if self.leader is None or self.ended is not None:
            return False
        due = self.decisions.due(self.clock)
        if not self.state.started and self.clock - self.start_expired_at > START_LIMIT_S:
            self.start_expired_at = self.clock
            due.append({"kind": "start_expired"})
        for given in due:
            self.feed(given)
        return bool(due)

    # ---- the end ----

    def settle(self, choose: Callable[[], int]) -> None:
        """No more faults: everything is delivered, time passes, until the job has ended."""
        quiet = 0
        for _ in range(20000):
            if self.ended is not None:
                self._check_end(self.ended)
                return
            if self.move(choose()):
                quiet = 0
                continue
            if self.leader is None:
                if self.elect(choose()):
                    continue
                return  # no node is left
            if self.lose(choose()):
                continue
            self.pass_time(130.0)
            quiet += 1
            if quiet > 20:
                break
        for process in self.everybody.values():
            if process.alive:
                self.log.append(f"{process} {vars(process)}")
        self.log.append(repr(self.state))
        raise Violation("the job neither ends nor gets on")

    def _check_end(self, end: End) -> None:
        if end.state == "completed":
            return
        state = self.state
        if "ended with" in end.reason and (state.finishing or not state.started):
            return
        if "no standby is left" in end.reason and "shrink" in self.plan.on_no_standby:
            recovery = state.recovery
            if recovery is None or not recovery.cannot_shrink:
                raise Violation(f"{end} although nothing is said against going on with fewer")
        if "no standby" in end.reason or "did not start" in end.reason:
            spare = [f"{n.name} ({n.standing})" for n in state.nodes.values() if self._is_usable(n)]
            since = state.recovery.waiting_since if state.recovery is not None else None
            waited = since is not None and self.clock - since >= self.plan.refill_wait_s
            if spare and not waited:
                raise Violation(f"{end} although {spare} could be used")
        elif "times at step" in end.reason:
            if self.kills < self.shape.failures_per_step:
                raise Violation(f"{end} after {self.kills} deaths")
        elif "no snapshot or checkpoint" in end.reason:
            self._check_no_source(end)
        elif not (end.state == "requeue" and state.stopping):
            raise Violation(f"{end}")

    def _is_usable(self, node: Node) -> bool:
        agent = self.agents[node.name]
        recovery = self.state.recovery
        if recovery is not None and any(place[0] == node.name for place in recovery.places.values()):
            return False
        there = agent.alive and agent.connected and node.name not in self.cut_off
        well = node.failures <= FAILURE_LIMIT and node.notice is None
        ready = self.state.started or len(node.processes) == self.shape.ranks_per_node
        return there and well and ready and node.agent_up and not self.state.ranks_on(node.name)

    def _check_no_source(self, end: End) -> None:
        recovery = self.state.recovery
        assert recovery is not None
        survivors = recovery.survivors()
        if "failed while it applied" in end.reason or "no rank has survived" in end.reason:
            possible = False
        elif "private state" in end.reason or "no replica" in end.reason:
            possible = all(self._replaceable(rank, set(survivors)) for rank in recovery.lost)
        elif "has committed" in end.reason and self.has_gone_back:
            possible = False  # some have gone back already, and now it cannot be finished
        else:
            raise Violation(f"{end}")
        if possible:
            raise Violation(f"{end} although there is a replica and a ward of {sorted(recovery.lost)}")

    def _replaceable(self, rank: int, survivors: set[int]) -> bool:
        if not self.state.replica_keys.get(rank):
            return False
        replica = any(self.shape.shard(other, 1) == self.shape.shard(rank, 1) for other in survivors)
        seated = [self.state.process(other) for other in survivors]
        there = [self.everybody[process.incarnation] for process in seated if process is not None]
        return replica and any(p.wards.get(rank) for p in there)
