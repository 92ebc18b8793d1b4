"""Runs on every node of the job: `python -m tm_slurm.agent --job-dir DIR`, started by srun or inside a
submitit task."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tm_slurm.agent.orphans import adopt_orphans
from tm_slurm.agent.ranks import Command, Ranks, argv_of
from tm_slurm.agent.surroundings import Surroundings
from tm_slurm.config import Config, load
from tm_slurm.control import Channel, ChannelClosed, HandshakeRefused, connect, read_secret
from tm_slurm.coordinator.awaiting import first_of
from tm_slurm.coordinator.election import LeaderFile, Leadership
from tm_slurm.coordinator.leader import Leader, Limits
from tm_slurm.coordinator.model import Plan
from tm_slurm.slurm import Slurm, SlurmUnavailable, reachable_address
from tm_slurm.slurm import connect as connect_to_slurm

log = logging.getLogger("tm_slurm.agent")

CONNECT_TIMEOUT_S = 3.0
RETRY_S = 0.05
STAND_BACK_S = 1.0
"""How long an agent leaves the lead to those who are better placed for it."""

LEADER_GONE_LIMIT_S = 60.0
"""An agent that has had no leader for so long ends its ranks and itself."""

EXIT_TERMINATED = 143


class Agent:
    """Links the rank processes of this node to whoever leads; leads itself when nobody else does."""

    def __init__(
        self, job_dir: Path, config: Config, surroundings: Surroundings, slurm: Slurm | None
    ) -> None:
        self._job_dir = job_dir
        self._config = config
        self._surroundings = surroundings
        self._slurm = slurm
        self._secret = read_secret(job_dir)
        self._host = reachable_address(surroundings.node) if slurm is not None else "127.0.0.1"
        self._plan = self._make_plan()
        command = Command(
            argv=argv_of(
                module=config.train.module, script=config.train.script, args=tuple(config.train.args)
            ),
            job_dir=job_dir,
            node=surroundings.node,
            host=self._host,
            cpus_per_rank=config.job.cpus_per_rank,
        )
        self._ranks = Ranks(command, config.job.ranks_per_node, self._report)
        self._channel: Channel | None = None
        self._term = 0
        self._exit: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._leading: asyncio.Task[None] | None = None
        self._leader: Leader | None = None
        self._work: set[asyncio.Task[None]] = set()
        self._unsent: list[dict[str, Any]] = []

    def _make_plan(self) -> Plan:
        batch_host = None
        if self._slurm is not None and self._surroundings.job_id is not None:
            with contextlib.suppress(SlurmUnavailable):
                batch_host = self._slurm.job(self._surroundings.job_id).batch_host
        return Plan(
            order=list(self._surroundings.nodes),
            batch_host=batch_host,
            active_nodes=self._config.job.nodes,
            ranks_per_node=self._config.job.ranks_per_node,
            prepare_timeout_s=self._config.policy.prepare_timeout_s,
            switch_timeout_s=self._config.policy.switch_timeout_s,
            release=self._config.policy.release,
            on_no_standby=self._config.policy.on_no_standby,
        )

    async def run(self) -> int:
        """Until the leader says that this agent may go. Returns the exit code."""
        await self._ranks.start_missing()
        loops = [asyncio.create_task(self._follow_for_ever()), asyncio.create_task(self._beat_for_ever())]
        try:
            return await first_of(self._exit, loops)
        finally:
            for task in (*loops, *self._work):
                task.cancel()
            await self._ranks.end_all()
            if self._channel is not None:
                await self._channel.close()
            if self._leading is not None:
                await asyncio.wait({self._leading}, timeout=CONNECT_TIMEOUT_S)

    # ---- the leader ----

    async def _follow_for_ever(self) -> None:
        attempt = self._surroundings.attempt
        alone_since = time.monotonic()
        while True:
            if self._leading is None and (self._job_dir / "verdict.json").exists():
                log.info("ending reason=the job has ended already")
                self._finish(0)
                return
            known = LeaderFile.read(self._job_dir)
            if known is not None and known.is_current(attempt):
                if await self._follow(known):
                    alone_since = time.monotonic()
            elif self._leading is None and time.monotonic() - alone_since >= self._stand_back_s():
                self._try_to_lead()
            if time.monotonic() - alone_since > LEADER_GONE_LIMIT_S:
                log.error("no leader for %.0f s, ending", LEADER_GONE_LIMIT_S)
                self._finish(1)
            await asyncio.sleep(RETRY_S)

    def _stand_back_s(self) -> float:
        """0 for the batch host, then the other standbys, then everybody else."""
        node = self._surroundings.node
        if node == self._plan.batch_host or len(self._plan.order) == 1:
            return 0.0
        return STAND_BACK_S if node in self._plan.first_standbys() else 2 * STAND_BACK_S

    def _try_to_lead(self) -> None:
        leadership = Leadership(self._job_dir, self._surroundings.attempt)
        if leadership.try_to_lead():
            self._leading = asyncio.create_task(self._lead(leadership))

    def _make_leader(self, leadership: Leadership) -> Leader:
        policy = self._config.policy
        return Leader(
            job_dir=self._job_dir,
            job_id=self._surroundings.job_id,
            node=self._surroundings.node,
            host=self._host,
            plan=self._plan,
            attempt=self._surroundings.attempt,
            leadership=leadership,
            secret=self._secret,
            slurm=self._slurm,
            limits=Limits(
                poll_interval_s=policy.poll_interval_s,
                lease_s=policy.lease_s,
                start_timeout_s=policy.start_timeout_s,
                reconnect_s=policy.keepalive_s,
            ),
        )

    async def _lead(self, leadership: Leadership) -> None:
        try:
            leader = self._leader = self._make_leader(leadership)
            if await leader.lead() == "ended":
                self._finish(0)
        except Exception:
            log.exception("the leader failed")  # whatever it was, the agent must not be left without an end
            leadership.resign()
            self._finish(1)
        finally:
            self._leading = self._leader = None

    def terminated(self) -> None:
        """SIGTERM: somebody cancels the job. The leader says so, every other agent just ends."""
        if self._leader is not None:
            self._leader.stop("the job was cancelled (SIGTERM)")
        else:
            self._finish(EXIT_TERMINATED)

    async def _follow(self, known: LeaderFile) -> bool:
        """Serve one leader until its connection ends. True if there was a connection."""
        identity = {"role": "agent", "node": self._surroundings.node, "job": self._surroundings.job_id}
        try:
            channel = await connect(
                known.host, known.port, self._secret, identity, timeout_s=CONNECT_TIMEOUT_S
            )
        except (OSError, HandshakeRefused, ChannelClosed, asyncio.TimeoutError) as error:
            log.debug("the leader cannot be reached host=%s port=%d reason=%s", known.host, known.port, error)
            return False
        self._channel = channel
        try:
            while True:
                await self._from_leader(await channel.receive())
        except ChannelClosed:
            log.info("the connection to the leader ended node=%s", known.node)
        finally:
            self._channel = None
        return True

    async def _from_leader(self, message: dict[str, Any]) -> None:
        term = int(message["term"])
        if term < self._term:
            log.warning("refused a message of an old leader term=%d known=%d", term, self._term)
            return
        self._term = term
        if message.get("kind") == "led":
            for fact in self._ranks.facts():
                self._send(fact)
            unsent, self._unsent = self._unsent, []
            for report in unsent:
                self._send(report)
        elif message["slot"] is not None:
            self._ranks.tell(int(message["slot"]), message["message"])
        else:
            await self._obey(message["message"])

    async def _obey(self, order: dict[str, Any]) -> None:
        kind = order["kind"]
        if kind == "spawn":
            await self._ranks.start_missing()
        elif kind == "kill":
            await self._ranks.end_all(grace_s=0.0)
        elif kind == "retire":
            await self._retire()
        elif kind == "exit":
            log.info("ending reason=%s", order.get("reason"))
            self._finish(0)
        elif kind == "lead":
            self._in_background(self._take_over())
        else:
            log.warning("refused an order kind=%s reason=unknown kind", kind)

    async def _take_over(self) -> None:
        """The leader hands over to this agent: lead as soon as it has let go."""
        deadline = time.monotonic() + LEADER_GONE_LIMIT_S
        while self._leading is None and time.monotonic() < deadline:
            known = LeaderFile.read(self._job_dir)
            if known is not None and known.term > self._term:
                return
            self._try_to_lead()
            await asyncio.sleep(RETRY_S)

    async def _retire(self) -> None:
        """Leave for good: no rank is here any more. Exit 0 comes before Slurm takes the node."""
        await self._ranks.end_all()
        self._send({"kind": "agent_retired"})
        if self._channel is not None:
            await self._channel.drain(CONNECT_TIMEOUT_S)
            self._channel.hold_open_to_the_end()
        self._finish(0)

    def _finish(self, code: int) -> None:
        if not self._exit.done():
            self._exit.set_result(code)

    # ---- the ranks ----

    def _report(self, message: dict[str, Any]) -> None:
        """A rank process has said something, or has ended."""
        beat = message.pop("beat", None)
        if beat is not None:
            self._send({"kind": "beat", "ranks": [beat]})
        if message["kind"] == "process_exited" and message.get("tail"):
            log.warning("last lines of slot %d:\n%s", message["slot"], message.pop("tail"))
        if not self._send(message) and message["kind"] == "process_exited":
            self._unsent.append(message)

    def _send(self, message: dict[str, Any]) -> bool:
        if self._channel is None:
            return False
        try:
            self._channel.send(message)
        except ChannelClosed:
            return False
        return True

    async def _beat_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._config.policy.heartbeat_s)
            if self._channel is not None:
                beats = self._ranks.take_beats()
                self._send({"kind": "beat", "ranks": beats})

    def _in_background(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)


async def _main(job_dir: Path) -> int:
    adopt_orphans()
    surroundings = Surroundings.from_environment()
    _log_to(job_dir / "logs" / f"agent-{surroundings.node}.log")
    slurm = connect_to_slurm() if surroundings.job_id is not None else None
    agent = Agent(job_dir, load(job_dir / "config.yaml"), surroundings, slurm)
    loop = asyncio.get_running_loop()
    # SIGUSR2 is Slurm's warning before the time limit; until checkpoints exist it must at least not kill the
    # agent.
    loop.add_signal_handler(signal.SIGUSR2, lambda: log.warning("SIGUSR2: the time limit is near"))
    loop.add_signal_handler(signal.SIGTERM, agent.terminated)
    return await agent.run()


def _log_to(path: Path) -> None:
    handlers: list[logging.Handler] = [logging.FileHandler(path), logging.StreamHandler(sys.stderr)]
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
        handlers=handlers,
        force=True,
    )


def run(job_dir: Path | str) -> int:
    """Run this node's agent until the job has ended or the node is left; the exit code to end with."""
    directory = Path(job_dir)
    (directory / "logs").mkdir(mode=0o700, exist_ok=True)
    os.umask(0o077)
    return asyncio.run(_main(directory))
