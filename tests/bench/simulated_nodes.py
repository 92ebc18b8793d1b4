"""Nodes of a large job for bench_scale: an agent and one rank process each, that say what real ones say and
do nothing else. No sockets here: see light_agents.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]

COMMITTED = 100
"""Steps that a rank says to have done when it is interrupted."""

PRIVATE_BYTES = 6000
"""Of a rank's private state (random generators, data position), as JSON: what char_gpt's takes."""


def links(rank: int, world_size: int) -> list[int]:
    """The ranks that a rank of one group has links to (tm_slurm/comm/src/algorithms.cpp): neighbours on the
    ring, and those at distances of powers of two."""
    found = {(rank - 1) % world_size, (rank + 1) % world_size}
    distance = 1
    while distance < world_size:
        found.add(rank ^ distance)
        distance *= 2
    return sorted(other for other in found if other < world_size and other != rank)


@dataclass
class SimulatedJob:
    """What the nodes do together. `say`: a node's message to the leader."""

    world_size: int
    say: Callable[[SimulatedNode, Message], None]
    incarnation: int = 0
    joining: dict[int, list[SimulatedNode]] = field(default_factory=dict)
    step: int = 0

    def switch(self, epoch: int) -> None:
        """A vote has carried this epoch: joiners have the state, all are at it."""
        for joiner in self.joining.pop(epoch, []):
            joiner.resume(epoch)


class SimulatedNode:
    """`number`: of the node in the job's order."""

    def __init__(self, job: SimulatedJob, name: str, number: int) -> None:
        self.job = job
        self.name = name
        self.number = number
        self.incarnation: int | None = None
        self.rank: int | None = None
        self.warm_for: int | None = None
        self.taking: int | None = None
        self.epoch = 0
        self.leaves = False
        self.spawn()

    def spawn(self) -> None:
        """Start a rank process, unless there is one."""
        if self.incarnation is None:
            self.job.incarnation += 1
            self.incarnation = self.job.incarnation

    def facts(self) -> list[Message]:
        """What a new leader hears: what is still true."""
        said: list[Message] = [{"kind": "vault", "host": "127.0.0.1", "port": 1}]
        if self.incarnation is None:
            return said
        said.append(self._of_process("process_ready", host="10.77.120.200", port=40000 + self.number % 20000))
        if self.warm_for is not None:
            said.append(self._of_process("process_warm", rank=self.warm_for, seconds=1.0))
        if self.rank is not None:
            said += self._replica_keys()
        return said

    def _of_process(self, kind: str, **fields: Any) -> Message:
        return {"kind": kind, **fields, "slot": 0, "incarnation": self.incarnation}

    def _replica_keys(self) -> list[Message]:
        """All ranks are replicas of each other."""
        key = {"rank": self.rank, "key": "0123456789abcdef", "bytes": 1 << 30}
        return [
            self._of_process("replica_key", **key, step=0),
            self._of_process("replica_key", **key, step=1, unshared=""),
        ]

    def say(self, kind: str, **fields: Any) -> None:
        """What the rank process says."""
        self.job.say(self, self._of_process(kind, **fields))

    def resume(self, epoch: int) -> None:
        """It has a rank's state now."""
        self.rank, self.epoch, self.taking = self.taking, epoch, None
        self.say("resumed", epoch=epoch, rank=self.rank, step=self.job.step, bytes=1 << 30, state_s=0.0)

    def hear(self, slot: int | None, message: Message) -> None:
        """Take an order and say what comes of it."""
        if slot is None:
            self._agent_hears(message)
        elif self.incarnation is not None:
            handler = getattr(self, f"_on_{message['kind']}", None)
            if handler is not None:
                handler(message)

    def _agent_hears(self, message: Message) -> None:
        if message["kind"] == "spawn":
            self.spawn()
            self.job.say(self, self.facts()[1])
        elif message["kind"] == "retire":
            self.job.say(self, {"kind": "agent_retired"})
            self.leaves = True
        elif message["kind"] == "exit":
            self.leaves = True
        elif message["kind"] == "kill" and self.incarnation is not None:
            self._ends(-9)

    def _ends(self, code: int) -> None:
        self.say("process_exited", code=code, how=f"exit code {code}", log="none")
        self.incarnation = self.rank = self.warm_for = self.taking = None

    def _on_assign(self, message: Message) -> None:
        if self.rank is None:
            self.rank = int(message["rank"])
            for said in self._replica_keys():
                self.job.say(self, said)

    def _on_warm(self, message: Message) -> None:
        self.warm_for = int(message["rank"])
        self.say("process_warm", rank=self.warm_for, seconds=1.0)

    def _on_prepare_leave(self, message: Message) -> None:
        if self.rank is not None:
            linked = links(self.rank, self.job.world_size)
            source = ["10.77.120.200", 40000]
            self.say("leaver_prepared", epoch=message["epoch"], rank=self.rank, linked=linked, source=source)

    def _on_join(self, message: Message) -> None:
        epoch, self.taking = int(message["epoch"]), int(message["rank"])
        self.job.joining.setdefault(epoch, []).append(self)
        self.say("joined", epoch=epoch, rank=self.taking)

    def _on_go(self, message: Message) -> None:
        epoch = int(message["epoch"])
        self.say("switching", epoch=epoch, step=self.job.step)
        self.job.switch(epoch)

    def _on_retire(self, message: Message) -> None:
        self._ends(0)

    def _on_interrupt(self, message: Message) -> None:
        epoch = int(message["epoch"])
        if self.rank is None:
            self.say("not_joined", epoch=epoch)
            return
        wards = {}
        for lost in message["lost"]:
            if (int(lost) + 1) % self.job.world_size == self.rank:  # it is the buddy
                private = {"python": "x" * PRIVATE_BYTES}
                self.say("ward", epoch=epoch, rank=lost, step=COMMITTED, private=private, buffers=None)
                wards[str(lost)] = [COMMITTED - 1, COMMITTED]
        stopped = {"committed": COMMITTED, "at_vote": False, "begun": True, "torn": False}
        told = {"wards": wards, "nearly": {}, "adopted": [], "snapshots": []}
        self.say("survivor", epoch=epoch, rank=self.rank, **stopped, **told)

    def _on_resolve(self, message: Message) -> None:
        self.epoch = int(message["epoch"])
        for rank in message["serve"]:
            share = message["shares"][str(rank)]
            source = ["10.77.120.200", 40000]
            self.say("source_ready", epoch=self.epoch, rank=rank, source=source, share=share)

    def _on_replace(self, message: Message) -> None:
        self.taking = int(message["rank"])
        self.resume(int(message["epoch"]))

    def beat(self, place: tuple[int, int], at: float, *, committed: bool) -> bytes:
        """The body of a heartbeat; `committed`: with a step that was done since the last one."""
        ranks = ""
        if committed and self.rank is not None:
            ranks = (
                f'{{"kind":"beat","rank":{self.rank},"epoch":{self.epoch},"step":{self.job.step},'
                f'"steps":[[{self.job.step},{at:.6f},1.0,2.5]]}}'
            )
        return f'{{"kind":"beat","ranks":[{ranks}],"place":{json.dumps(place)}}}'.encode()
