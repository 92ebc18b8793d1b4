"""A month's journal of a large job, and how long a new leader takes to replay it.

The journal is what the decisions were given by simulated nodes (simulated_nodes.py): the start, planned
moves, and nodes that are lost, as often as published for this many GPUs of one node each. No sockets, no
time passes.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from pathlib import Path
from typing import Any

from scale_leader import plan_of
from simulated_nodes import Message, SimulatedJob, SimulatedNode

from tm_slurm.control.frames import encode
from tm_slurm.control.handshake import SECRET_BYTES
from tm_slurm.coordinator import summary
from tm_slurm.coordinator.actions import Release, Spread, Tell
from tm_slurm.coordinator.decide import AGENT_INPUTS, Decisions
from tm_slurm.coordinator.election import Candidate, LeaderFile, LeaderWatch
from tm_slurm.coordinator.journal import create, journal_path
from tm_slurm.coordinator.leader import Leader, Limits
from tm_slurm.coordinator.memory import Memory
from tm_slurm.coordinator.peer_tables import PeerTables
from tm_slurm.planning.failures import published_mttf_h

PLANNED_PER_DAY = 4
STANDBYS = 64
GPUS_PER_NODE = 8


class JournalWriter:
    """Decisions and nodes in one process; every input is written down."""

    def __init__(self, job_dir: Path, active: int) -> None:
        plan = plan_of(active, STANDBYS)
        self.memory = Memory(plan, plan.order[-1])
        self._job_dir = job_dir
        self._summed_up = 0
        self.summary_s: list[float] = []
        """what a leader's loop has waited for each summary"""
        self.lines = 0
        self.cpu_s = 0.0
        """processor time of the leader's part: decisions, journal lines, encoding"""
        self.messages = self.bytes = 0
        self.counts = False
        self.tables = PeerTables(job_dir, 0, 1)
        self.now = time.time()
        self._queue: deque[Message] = deque()
        self._job = SimulatedJob(active, self._said)
        self.nodes = {name: SimulatedNode(self._job, name, number) for number, name in enumerate(plan.order)}
        self._journal = journal_path(job_dir, 0, 1).open("w")
        about = {"batch_host": None, "order": plan.order}
        self._write({"kind": "continues", "of": [], "about": about})
        self.give({"kind": "led", "node": plan.order[-1], "term": 1})
        for node in self.nodes.values():
            self.joins(node)

    def _write(self, record: Message) -> None:
        self._journal.write(json.dumps(record, separators=(",", ":")) + "\n")
        self.lines += 1

    def _said(self, node: SimulatedNode, message: Message) -> None:
        if message["kind"] == "agent_retired":
            self._queue.append({**message, "node": node.name})
            message = {"kind": "agent_gone"}
        if message["kind"] != "ward":  # those are not journalled
            self._queue.append({**message, "node": node.name})

    def joins(self, node: SimulatedNode) -> None:
        self._queue.append({"kind": "node_joined", "node": node.name})
        for fact in node.facts():
            self._said(node, fact)
        self._run()

    def give(self, given: Message) -> None:
        """An input, and all that it leads to."""
        self._queue.append(given)
        self._run()

    def _run(self) -> None:
        while self._queue:
            self.now += 0.001
            given = {"at": self.now, **self._queue.popleft()}
            began = time.process_time()
            self._write(given)
            actions = self.memory.take(given)
            for action in actions:
                if isinstance(action, Tell):
                    self.memory.orders.add(action, 1)
                elif isinstance(action, Spread):
                    self.memory.news.add(action.message)
            tells = [a.message for a in actions if isinstance(a, Tell)] if self.counts else []
            sizes = [len(encode(self.tables.to_send(message))) for message in tells]
            self.cpu_s += time.process_time() - began
            self.messages += len(sizes) + (given["kind"] in AGENT_INPUTS)
            self.bytes += sum(sizes)
            for action in actions:
                if isinstance(action, Tell):
                    self.nodes[action.node].hear(action.slot, action.message)
                elif isinstance(action, Release):
                    self._queue.append({"kind": "released", "node": action.node})

        if self.memory.inputs - self._summed_up >= summary.INPUTS:
            self._sum_up()

    def _sum_up(self) -> None:
        """As a leader does now and then; nobody is behind with what it was told."""
        for name in self.nodes:
            self.memory.orders.drop(name)
        self._summed_up = self.memory.inputs
        began = time.monotonic()
        whole = summary.pickled(self.memory)
        self.summary_s.append(time.monotonic() - began)
        self._journal.flush()
        position = [(1, journal_path(self._job_dir, 0, 1).stat().st_size)]
        summary.write(self._job_dir, 0, position, whole, b"s" * SECRET_BYTES)

    @property
    def decisions(self) -> Decisions:
        return self.memory.decisions

    def refill(self) -> None:
        """What was given back or lost is there again, as a standby of the pool."""
        for name in [n.name for n in self.decisions.state.nodes.special() if n.standing == "lost"]:
            node = self.nodes[name]
            node.incarnation = None
            node.spawn()
            self.joins(node)

    def moves(self, number: int) -> None:
        """A planned move off the node of some rank; the node stays as a standby."""
        state = self.decisions.state
        name = state.seats[(number * 7919) % state.plan.world_size][0]
        event = {"id": f"request/{name}/{number}", "kind": "request", "node": name, "source": "user"}
        self.give({"kind": "events", "events": [{**event, "reason": "bench", "at": self.now}]})

    def loses(self, number: int) -> None:
        """The node of some rank is lost without a word, and is back later."""
        state = self.decisions.state
        name = state.seats[(number * 6271) % state.plan.world_size][0]
        self.nodes[name].incarnation = self.nodes[name].rank = self.nodes[name].warm_for = None
        self.give({"kind": "node_lost", "node": name, "reason": "bench"})
        self.refill()

    def close(self) -> None:
        self._journal.close()


def write(job_dir: Path, active: int, days: float) -> dict[str, Any]:
    """Write the journal of so many days; what is in it."""
    failures = round(days * 24 / published_mttf_h(active * GPUS_PER_NODE))
    planned = round(days * PLANNED_PER_DAY)
    (job_dir / "secret").touch(0o600)
    (job_dir / "secret").write_bytes(b"s" * SECRET_BYTES)
    assert create(job_dir, 0, 1)
    writer = JournalWriter(job_dir, active)
    began_with = writer.lines
    for number in range(max(failures, planned)):
        if number < planned:
            writer.moves(number)
        if number < failures:
            writer.loses(number)
    writer.close()
    state = writer.decisions.state
    if state.ended or state.moves_done != planned or state.recoveries_done != failures:
        raise AssertionError(
            f"expected {planned} moves and {failures} recoveries, found {state.moves_done} and "
            f"{state.recoveries_done}, ended={state.verdict}"
        )
    LeaderFile("n00000", "127.0.0.1", 0, 1, 0, 1, writer.now, resigned=True).write(job_dir)
    size = journal_path(job_dir, 0, 1).stat().st_size
    about = {"failures": failures, "planned": planned, "lines": writer.lines, "bytes": size}
    about |= {"summaries": len(writer.summary_s), "summary_s": max(writer.summary_s, default=0.0)}
    return {"nodes": active, "days": days, "lines_at_start": began_with, **about}


def cost_of_moves(job_dir: Path, active: int, count: int) -> dict[str, Any]:
    """Milliseconds of processor time, messages and bytes (to the nodes) of each of so many moves, the ranks
    answering at once."""
    assert create(job_dir, 0, 1)
    writer = JournalWriter(job_dir, active)
    found: dict[str, Any] = {"start_cpu_s": writer.cpu_s, "move_cpu_ms": [], "messages": [], "bytes": []}
    writer.counts = True
    for number in range(count):
        writer.cpu_s, writer.messages, writer.bytes = 0.0, 0, 0
        writer.moves(number)
        found["move_cpu_ms"].append(writer.cpu_s * 1e3)
        found["messages"].append(writer.messages)
        found["bytes"].append(writer.bytes)
    writer.close()
    assert writer.decisions.state.moves_done == count, "a move was not finished"
    return found


async def _leads_after(job_dir: Path, active: int) -> float:
    """Seconds from a claim until the leader has replayed everything."""
    watch = LeaderWatch(job_dir, 0, 0.0)
    watch.look()
    leadership = Candidate(watch, node="n00000", host="127.0.0.1").claim()
    assert leadership is not None, "nobody else leads here"
    leadership.lease_s = 3600.0
    began = time.monotonic()
    leader = Leader(
        job_id=None,
        node="n00000",
        host="127.0.0.1",
        plan=plan_of(active, STANDBYS),
        leadership=leadership,
        secret=b"s" * SECRET_BYTES,
        slurm=None,
        limits=Limits(poll_interval_s=1.0, heartbeat_s=0.5, start_timeout_s=3600.0, reconnect_s=3600.0),
    )
    took_s = time.monotonic() - began
    leading = asyncio.create_task(leader.lead())
    leader.let_go()
    await leading
    return took_s


def replay_s(job_dir: Path, active: int) -> float:
    """How long a new leader takes over the journal in this directory."""
    return asyncio.run(_leads_after(job_dir, active))
