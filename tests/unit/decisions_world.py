"""A job without a network for tests of the decisions: agents and ranks that answer as the real ones do."""

from __future__ import annotations

from collections import deque
from typing import Any

from tm_slurm.coordinator.actions import Action, Comment, End, Note, Release, Resign, Spread, Tell
from tm_slurm.coordinator.decide import Decisions
from tm_slurm.coordinator.model import JobState, Plan


class World:
    """`hold`: kinds of messages that reach nobody, so that a test can stop the job in any phase."""

    def __init__(
        self, nodes: int = 6, active: int = 4, ranks_per_node: int = 1, batch_host: str | None = "n1"
    ) -> None:
        order = [f"n{i}" for i in range(1, nodes + 1)]
        self.plan = Plan(order, batch_host, active, ranks_per_node)
        self.decisions = Decisions(JobState.initial(self.plan), batch_host or "n1")
        self.journal: list[dict[str, Any]] = []
        self.hold: set[str] = set()
        self.held: list[Tell] = []
        self.actions: list[Action] = []
        self.clock = 0.0
        self.incarnation = 0
        self.leader_at = batch_host or "n1"
        self.killed: list[str] = []
        self.resigns_to_nobody: set[str] = set()
        self.switching: set[int] = set()
        self.committed: dict[int, tuple[int, bool]] = {}
        """rank → (steps committed, whether it stands at the vote); 7 and False for those not named"""
        self.seated: dict[tuple[str, int], int] = {}
        """who has a rank, as the processes themselves know it"""
        self.key_of = lambda rank: "the same"
        self.no_wards: set[int] = set()
        self.not_begun: set[int] = set()
        """ranks that have not built their role, or could not go back"""
        self.unshared = ""
        """why the script cannot do another rank's share"""
        self.adopted: dict[int, set[int]] = {}
        """rank → the absent ranks whose share it does"""
        self._queue: deque[dict[str, Any]] = deque()

    @property
    def state(self) -> JobState:
        return self.decisions.state

    def start(self, *, without: tuple[str, ...] = ()) -> None:
        """Every agent and process reports."""
        for name in self.plan.order:
            if name not in without:
                self.give({"kind": "node_joined", "node": name})
                self.spawn(name)

    def spawn(self, name: str, slots: list[int] | None = None) -> None:
        for slot in range(self.plan.ranks_per_node) if slots is None else slots:
            if slot not in self.state.nodes[name].processes:
                self.incarnation += 1
                ready = {"slot": slot, "incarnation": self.incarnation, "host": name, "port": 1000 + slot}
                self.give({"kind": "process_ready", "node": name, **ready})

    def give(self, given: dict[str, Any]) -> None:
        """An input, then everything that its actions lead to."""
        self._queue.append(given)
        if len(self._queue) > 1:
            return
        while self._queue:
            given = self._queue[0]
            self.clock += 1.0
            given = {"at": self.clock, **given}
            self.journal.append(given)
            for action in self.decisions.handle(given):
                self.actions.append(action)
                self._act(action)
            self._queue.popleft()

    def event(self, kind: str, *nodes: str, source: str = "poll") -> None:
        """The same happens to each of `nodes` at one time."""
        at = self.clock
        events = [
            {"id": f"{kind}:{node}:{at}", "kind": kind, "node": node, "source": source, "reason": "test"}
            for node in nodes
        ]
        self.give({"kind": "events", "events": events})

    def dies(self, node: str, slot: int = 0, *, code: int = -9, **fields: Any) -> None:
        """A rank process of a node is killed, or ends with a code of its own."""
        process = self.state.nodes[node].processes[slot]
        self.seated.pop((node, slot), None)
        exited = {"slot": slot, "incarnation": process.incarnation, "code": code}
        exited["how"] = "signal SIGKILL" if code == -9 else f"exit code {code}"
        self.give({"kind": "process_exited", "node": node, **exited, "log": "x.log", **fields})

    def leads(self, node: str, *, without: tuple[str, ...] = ()) -> None:
        """Another leads, and the agents come to it, except for `without`."""
        self.give({"kind": "led", "node": node, "term": 2})
        for name, known in self.state.nodes.items():
            if known.agent_up and known.standing != "leaving" and name not in without:
                self.give({"kind": "node_joined", "node": name})

    def release_held(self) -> None:
        held, self.held, self.hold = self.held, [], set()
        for tell in held:
            self._act(tell)

    def _act(self, action: Action) -> None:
        if isinstance(action, Release):
            self.give({"kind": "released", "node": action.node})
        elif isinstance(action, Resign):
            if action.to in self.resigns_to_nobody:
                self.give({"kind": "resign_failed", "to": action.to})
                return
            self.leader_at = action.to
            self.leads(action.to)
        elif isinstance(action, Tell):
            if action.message["kind"] in self.hold:
                self.held.append(action)
            elif action.slot is None:
                self._agent(action.node, action.message)
            else:
                self._rank(action.node, action.slot, action.message)

    def _agent(self, node: str, message: dict[str, Any]) -> None:
        if message["kind"] == "spawn":
            self.spawn(node, message.get("slots"))
        elif message["kind"] == "kill":
            self.killed.append(node)
            for place in [place for place in self.seated if place[0] == node]:
                del self.seated[place]
        elif message["kind"] == "retire":
            self.give({"kind": "agent_retired", "node": node})
            self.give({"kind": "agent_gone", "node": node})

    def _rank(self, node: str, slot: int, message: dict[str, Any]) -> None:
        process = self.state.nodes[node].processes.get(slot)
        if process is None:
            return
        me = {"node": node, "slot": slot, "incarnation": process.incarnation}
        kind, epoch = message["kind"], message.get("epoch")
        if kind == "assign" and (node, slot) not in self.seated:
            self.seated[node, slot] = message["rank"]
            key = self.key_of(message["rank"])
            for step in (0, 1):
                told = {"rank": message["rank"], "step": step, "key": key}
                told |= {"unshared": self.unshared} if step else {}
                self.give({"kind": "replica_key", **me, **told})
        elif kind == "warm":
            self.give({"kind": "process_warm", **me, "rank": message["rank"]})
        elif kind == "prepare_leave":
            rank = next(r for r, seat in self.state.seats.items() if seat == (node, slot))
            peers = [r for r in self.state.seats if abs(r - rank) == 1]
            prepared = {"epoch": epoch, "rank": rank, "linked": peers, "source": [node, 1]}
            self.give({"kind": "leaver_prepared", **me, **prepared})
        elif kind == "join":
            self.give({"kind": "joined", **me, "epoch": epoch, "rank": message["rank"]})
        elif kind == "go":
            self.switching.add(message["epoch"])
            self.give({"kind": "switching", **me, "epoch": epoch, "step": 7})
            for rank, pair in list(self.state.move.ranks().items()) if self.state.move else []:
                self.take_over(epoch, rank, (pair.joiner, pair.ranks[rank]))
        elif kind == "interrupt":
            if (node, slot) not in self.seated:
                self.give({"kind": "not_joined", **me, "epoch": epoch})
                return
            rank = self.seated[node, slot]
            committed, at_vote = self.committed.get(rank, (7, False))
            wards = {str(r): [committed - 1, committed] for r in message["lost"] if r not in self.no_wards}
            where = {"rank": rank, "committed": committed, "at_vote": at_vote, "wards": wards}
            where["begun"] = rank not in self.not_begun
            where["adopted"] = sorted(self.adopted.get(rank, ()))
            self.give({"kind": "survivor", **me, "epoch": epoch, **where})
        elif kind == "resolve":
            self.adopted[self.seated[node, slot]] = {*message["keep"], *map(int, message["adopt"])}
            if message["adopt"]:
                self.give({"kind": "adopted", **me, "epoch": epoch, "rank": self.seated[node, slot]})
            for rank in message["serve"]:
                ready = {"epoch": epoch, "rank": rank, "source": [node, 2]}
                self.give({"kind": "source_ready", **me, **ready})
        elif kind == "replace":
            self.take_over(epoch, message["rank"], (node, slot), message["target"])
        elif kind == "stop":
            kind = "too_late" if message["epoch"] in self.switching else "stopped"
            self.give({"kind": kind, **me, "epoch": epoch})
        elif kind in ("retire", "finish"):
            self.seated.pop((node, slot), None)
            self.give({"kind": "process_exited", **me, "code": 0, "how": "exit code 0"})

    def take_over(self, epoch: int, rank: int, place: tuple[str, int], step: int = 7) -> None:
        """A joiner has the state of a rank now."""
        self.seated[place] = rank
        me = {"node": place[0], "slot": place[1]}
        self.give({"kind": "resumed", **me, "epoch": epoch, "rank": rank, "step": step})

    def notes(self, what: str) -> list[dict[str, Any]]:
        return [a.fields for a in self.actions if isinstance(a, Note) and a.what == what]

    def comments(self) -> list[str]:
        return [a.text for a in self.actions if isinstance(a, Comment)]

    def releases(self) -> list[Release]:
        return [a for a in self.actions if isinstance(a, Release)]

    def ends(self) -> list[End]:
        return [a for a in self.actions if isinstance(a, End)]

    def spread(self, kind: str) -> list[Spread]:
        return [a for a in self.actions if isinstance(a, Spread) and a.message["kind"] == kind]

    def told(self, kind: str) -> list[Tell]:
        return [a for a in self.actions if isinstance(a, Tell) and a.message["kind"] == kind]

    def seats(self) -> dict[int, str]:
        return {rank: node for rank, (node, _) in self.state.seats.items()}
