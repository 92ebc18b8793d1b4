"""A job whose leaders and connections are real and whose nodes are not: agents over loopback, with rank
processes that answer as the real ones do. Leaders can be lost at any moment."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tm_slurm.agent.facts import Facts
from tm_slurm.agent.following import Following, Silence
from tm_slurm.coordinator.clock import elapsed_s
from tm_slurm.coordinator.election import Candidate, Leadership, LeaderWatch
from tm_slurm.coordinator.leader import Leader, Limits
from tm_slurm.coordinator.model import Plan

SECRET = b"s" * 32
LEASE_S = 10.0
LIMIT_S = 10.0
LIMITS = Limits(poll_interval_s=1.0, heartbeat_s=0.05, start_timeout_s=60.0, reconnect_s=5.0)
SWITCHED_AT = 7

Message = dict[str, Any]


@dataclass
class Process:
    """One rank process. `leaving`, `joining`: the epoch of the move that it takes part in."""

    slot: int
    incarnation: int
    rank: int | None = None
    epoch: int = 0
    leaving: int | None = None
    joining: tuple[int, int] | None = None
    facts: Facts = field(default_factory=Facts)


class Job:
    """`nodes` nodes with one rank each, the last `standbys` of them in reserve.

    `hold`: kinds of what processes say that they do not get to yet (a joiner is slow, no vote is reached)."""

    def __init__(self, job_dir: Path, nodes: int = 4, standbys: int = 2, *, with_facts: bool = True) -> None:
        self.job_dir = job_dir
        self.plan = Plan([f"n{i}" for i in range(1, nodes + 1)], None, nodes - standbys, 1)
        self.hold: set[str] = set()
        self.held: list[tuple[SimulatedAgent, Process, Message]] = []
        self.incarnation = 0
        self.with_facts = with_facts
        self.agents = {name: SimulatedAgent(self, name) for name in self.plan.order}
        self.leaders: list[Leader] = []
        self.leading: list[asyncio.Task[str]] = []

    async def __aenter__(self) -> Job:
        for agent in self.agents.values():
            agent.task = asyncio.create_task(agent.follow_for_ever())
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self.leading:
            task.cancel()
        for agent in self.agents.values():
            assert agent.task is not None
            agent.task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await agent.task
        for task in self.leading:
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def claim(self, node: str) -> Leadership:
        """The next term for a node, to whose clock the lease of the leader before is over."""
        ahead_s = [0.0]
        watch = LeaderWatch(self.job_dir, 0, LEASE_S, lambda: elapsed_s() + ahead_s[0])
        watch.look()
        ahead_s[0] += LEASE_S
        leadership = Candidate(watch, node=node, host="127.0.0.1").claim()
        assert leadership is not None
        return leadership

    def lead(self, node: str, **options: Any) -> Leader:
        """Have a leader begin on a node."""
        leader = Leader(
            job_id=None,
            node=node,
            host="127.0.0.1",
            plan=self.plan,
            leadership=self.claim(node),
            secret=SECRET,
            slurm=None,
            limits=LIMITS,
            **options,
        )
        self.leaders.append(leader)
        self.leading.append(asyncio.create_task(leader.lead()))
        return leader

    async def lose_leader(self) -> None:
        """The leader's process is killed: it writes and tells nothing more."""
        leader, leading = self.leaders[-1], self.leading[-1]
        leader._leadership.step_down()
        leading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await leading

    @property
    def leader(self) -> Leader:
        return self.leaders[-1]

    async def until(self, what: str, test: Any) -> None:
        deadline = elapsed_s() + LIMIT_S
        while not test():
            assert elapsed_s() < deadline, f"not within {LIMIT_S:g} s: {what}; {self.describe()}"
            await asyncio.sleep(0.005)

    async def start(self) -> None:
        """Until all ranks are assigned and all standbys warm."""
        await self.until("the start", lambda: self.leader.state.started)
        standbys = [n for n in self.leader.state.nodes.values() if n.standing == "standby"]
        await self.until(
            "warm standbys",
            lambda: all(p.warm_for is not None for n in standbys for p in n.processes.values()),
        )

    def drain(self, node: str) -> None:
        """The administrator drains a node, and so the current leader sees it."""
        told = {"id": f"drain/{node}", "kind": "drain", "node": node, "source": "poll", "reason": "test"}
        self.leader._feed({"kind": "events", "events": [{**told, "at": 1.0, "deadline": None}]})

    def release_held(self) -> None:
        held, self.held, self.hold = self.held, [], set()
        for agent, process, message in held:
            if message["kind"] == "vote":
                self.switch(message["epoch"])
            else:
                agent.say(process, message)

    def seats(self) -> dict[int, str]:
        """rank → the nodes of the processes that hold it, in truth."""
        found: dict[int, str] = {}
        for name, agent in self.agents.items():
            for process in agent.processes.values():
                if process.rank is not None:
                    found[process.rank] = found.get(process.rank, "") + name
        return found

    def describe(self) -> str:
        state = self.leader.state
        nodes = {node.name: node.standing for node in state.nodes.values()}
        return f"{nodes} move={state.move} recovery={state.recovery} seats={self.seats()}"

    # ---- what rank processes do together ----

    def switch(self, epoch: int) -> None:
        """A vote has carried the epoch: leavers hand over, stayers go on."""
        for agent in self.agents.values():
            for process in list(agent.processes.values()):
                if process.leaving == epoch:
                    agent.say(process, {"kind": "switching", "epoch": epoch, "step": SWITCHED_AT})
                elif process.rank is not None:
                    process.epoch = epoch
        for agent in self.agents.values():
            for process in list(agent.processes.values()):
                if process.joining is not None and process.joining[0] == epoch:
                    resumed = {"epoch": epoch, "rank": process.joining[1], "step": SWITCHED_AT}
                    agent.say(process, {"kind": "resumed", **resumed})

    def took_over(self, agent: SimulatedAgent, process: Process) -> None:
        assert process.joining is not None
        process.epoch, process.rank = process.joining
        process.joining = None
        for other in self.agents.values():
            for leaver in other.processes.values():
                if leaver is not process and leaver.rank == process.rank:
                    assert leaver.leaving == process.epoch, f"rank {process.rank} was taken twice"
                    leaver.rank = None


class SimulatedAgent:
    """Follows leaders as the real agent does; its rank processes are plain data."""

    def __init__(self, job: Job, node: str) -> None:
        self.job = job
        self.node = node
        self.processes: dict[int, Process] = {}
        self.ends: dict[int, Message] = {}
        self.obeyed: list[Message] = []
        self.task: asyncio.Task[None] | None = None
        self.left = False
        self.watch = LeaderWatch(job.job_dir, 0, LEASE_S)
        self.following = Following(
            self.watch,
            SECRET,
            {"node": node},
            Silence(heartbeat_s=LIMITS.heartbeat_s, keepalive_s=LIMITS.reconnect_s),
            led=self._led,
            obey=self._from_leader,
        )

    async def follow_for_ever(self) -> None:
        self._spawn()
        beating = asyncio.create_task(self._beat_for_ever())
        try:
            while not self.left:
                known = self.watch.look()
                if known is not None and self.watch.over_for_s() is None:
                    await self.following.follow(known)
                await asyncio.sleep(0.005)
        finally:
            beating.cancel()

    async def _beat_for_ever(self) -> None:
        while True:
            await asyncio.sleep(LIMITS.heartbeat_s)
            self.following.send({"kind": "beat", "ranks": [], "place": self.following.place})

    def _led(self) -> None:
        for process in self.processes.values() if self.job.with_facts else ():
            for fact in process.facts.told():
                self.following.send(fact)
        for end in self.ends.values():
            self.following.send(end)

    def _spawn(self) -> None:
        if 0 not in self.processes:
            self.job.incarnation += 1
            process = self.processes[0] = Process(0, self.job.incarnation)
            self.ends.pop(0, None)
            self.say(process, {"kind": "process_ready", "host": self.node, "port": 1000})

    def say(self, process: Process, message: Message) -> None:
        """What a process says; what it is about happens now, unless it is held."""
        if message["kind"] in self.job.hold:
            self.job.held.append((self, process, message))
            return
        if message["kind"] == "resumed":
            self.job.took_over(self, process)
        message = {**message, "slot": process.slot, "incarnation": process.incarnation}
        process.facts.take(message)
        self.following.send(message)

    def _ends(self, process: Process, code: int = 0) -> None:
        del self.processes[process.slot]
        end = {"kind": "process_exited", "slot": process.slot, "incarnation": process.incarnation}
        self.ends[process.slot] = {**end, "code": code, "how": f"exit code {code}"}
        self.following.send(self.ends[process.slot])

    async def _from_leader(self, frame: Message) -> None:
        message = frame["message"]
        self.obeyed.append(message)
        if frame["slot"] is not None:
            process = self.processes.get(frame["slot"])
            if process is not None:
                self._order(process, message)
        elif message["kind"] == "spawn":
            self._spawn()
        elif message["kind"] == "kill":
            for process in list(self.processes.values()):
                self._ends(process, -9)
        elif message["kind"] == "retire":
            await self.following.last_word({"kind": "agent_retired"})
            self.left = True
        elif message["kind"] == "exit":
            self.left = True

    def _order(self, process: Process, message: Message) -> None:
        kind, epoch = message["kind"], message.get("epoch", 0)
        if kind == "assign" and process.rank is None:
            process.rank, process.epoch = message["rank"], epoch
        elif kind == "warm":
            self.say(process, {"kind": "process_warm", "rank": message["rank"]})
        elif kind == "prepare_leave" and epoch > process.epoch and process.rank is not None:
            process.leaving = epoch
            linked = [r for r in range(self.job.plan.world_size) if r != process.rank]
            prepared = {"epoch": epoch, "rank": process.rank, "linked": linked, "source": [self.node, 1]}
            self.say(process, {"kind": "leaver_prepared", **prepared})
        elif kind == "join" and process.rank is None and process.joining is None:
            process.joining = (epoch, message["rank"])
            self.say(process, {"kind": "joined", "epoch": epoch, "rank": message["rank"]})
        elif kind == "go" and epoch > process.epoch and process.leaving == epoch:
            if "vote" in self.job.hold:
                self.job.held.append((self, process, {"kind": "vote", "epoch": epoch}))
            else:
                self.job.switch(epoch)
        elif kind == "stop":
            votes = [held for held in self.job.held if held[2] == {"kind": "vote", "epoch": epoch}]
            for vote in votes:
                self.job.held.remove(vote)
            self.say(process, {"kind": "stopped" if votes else "too_late", "epoch": epoch})
        elif kind == "cancel":
            process.leaving = None if process.leaving == epoch else process.leaving
            if process.joining is not None and process.joining[0] == epoch:
                process.joining = None
        elif kind in ("retire", "finish"):
            self._ends(process)
