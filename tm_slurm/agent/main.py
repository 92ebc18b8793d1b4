"""Runs on every node of the job: `python -m tm_slurm.agent --job-dir DIR`, started by srun or inside a
submitit task."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from tm_slurm.agent.facts import LASTING
from tm_slurm.agent.following import CONNECT_TIMEOUT_S, EVERYBODY, LOOK_S, Following, Silence
from tm_slurm.agent.leading import Leading
from tm_slurm.agent.orphans import adopt_orphans
from tm_slurm.agent.ranks import Command, Ranks, argv_of
from tm_slurm.agent.surroundings import Standby, Surroundings
from tm_slurm.agent.vault import Vault
from tm_slurm.config import Config, load
from tm_slurm.control import ChannelClosed, read_secret
from tm_slurm.coordinator.awaiting import first_of
from tm_slurm.coordinator.election import Leadership, LeaderWatch
from tm_slurm.coordinator.leader import Leader, Limits
from tm_slurm.coordinator.model import Plan
from tm_slurm.coordinator.peer_tables import as_sent
from tm_slurm.coordinator.training import Training, has_ended
from tm_slurm.slurm import Slurm, SlurmUnavailable, reachable_address
from tm_slurm.slurm import connect as connect_to_slurm

log = logging.getLogger("tm_slurm.agent")

LEADER_GONE_LIMIT_S = 60.0
"""An agent that has had no leader for so long ends its ranks and itself."""

ASK_SLURM_S = 3.0
"""An agent on the node of a standby job that has had no leader for so long asks Slurm about the training
job."""

RECENT = 64
"""So many messages that may have been lost with a connection are sent again on the next one. Heartbeats, most
of them: every one of the last half a minute."""

NOT_TOLD_AGAIN = frozenset({"ward", "link_ended"})
"""What is of no use to another leader, or was true only then."""

EXIT_TERMINATED = 143


class Agent:
    """Links the rank processes of this node to whoever leads; leads itself when nobody else does."""

    def __init__(
        self, job_dir: Path, config: Config, surroundings: Surroundings, slurm: Slurm | None
    ) -> None:
        policy = config.policy
        self._heartbeat_s = policy.heartbeat_of(config.job.all_nodes)
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
            compile_cache=job_dir / "compiled" if config.standby.shared_compile_cache else None,
        )
        self._ranks = Ranks(
            command, config.job.ranks_per_node, self._report, stopped_limit_s=policy.keepalive_s
        )
        self._vault = Vault(self._secret, self._host, max_bytes=policy.snapshot_memory << 20)
        self._exit: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._watch = LeaderWatch(job_dir, surroundings.attempt, policy.lease_s)
        self._leading = Leading(
            self._watch,
            node=surroundings.node,
            host=self._host,
            plan=self._plan,
            make=self._make_leader,
            finish=self._finish,
        )
        self._following = Following(
            self._watch,
            self._secret,
            {"node": surroundings.node, "job": surroundings.job_id, **surroundings.brought},
            Silence(heartbeat_s=self._heartbeat_s, keepalive_s=policy.keepalive_s),
            led=self._led,
            obey=self._from_leader,
            number=self._number(),
        )
        self._recent: deque[dict[str, Any]] = deque(maxlen=RECENT)
        self._work: set[asyncio.Task[None]] = set()

    def _number(self) -> int:
        nodes, node = self._surroundings.nodes, self._surroundings.node
        return nodes.index(node) if node in nodes else len(nodes)

    def _make_plan(self) -> Plan:
        batch_host = None
        has_script = self._config.job.launch == "batch"
        if has_script and self._slurm is not None and self._surroundings.job_id is not None:
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
            on_no_standby=tuple(self._config.policy.on_no_standby),
            refill_wait_s=self._config.policy.refill_wait_s,
            failures_per_step=self._config.policy.max_failures_per_step,
            requeues_left=self._config.job.max_requeues - self._surroundings.attempt,
            finish_timeout_s=self._config.policy.finish_timeout_s,
            stop_timeout_s=self._config.policy.stop_timeout_s or self._config.job.stop_timeout_s,
            window_lead_s=self._config.policy.window_lead_s,
            stop_lead_s=float(self._config.job.signal_delay_s),
            refill=self._config.policy.refill,
            elastic=self._config.policy.elastic,
            batch_host_drain=self._config.policy.batch_host_drain,
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
            await self._leading.ended(CONNECT_TIMEOUT_S)
            self._vault.close()

    # ---- the leader ----

    async def _follow_for_ever(self) -> None:
        while True:
            if not self._leading.is_on and self._has_ended():
                log.info("ending reason=the job has ended already")
                self._finish(0)
                return
            known = self._watch.look()
            if known is not None and self._watch.over_for_s() is None:
                await self._following.follow(known)
            else:
                self._leading.consider()
            if self._surroundings.brought and self._following.alone_for_s() > ASK_SLURM_S:
                await self._end_with_the_training_job()
            if self._following.alone_for_s() > LEADER_GONE_LIMIT_S:
                log.error("no leader for %.0f s, ending", LEADER_GONE_LIMIT_S)
                self._finish(1)
            await asyncio.sleep(LOOK_S)

    async def _end_with_the_training_job(self) -> None:
        """Nobody leads: this agent's job is another than the one that may have been cancelled."""
        if self._slurm is None or self._surroundings.job_id is None or self._leading.is_on:
            return
        job_id, attempt = self._surroundings.job_id, self._surroundings.attempt
        training = Training.of(self._job_dir, job_id, attempt)
        if await asyncio.to_thread(has_ended, self._slurm, training):
            log.info("ending reason=the training job has ended job=%d", job_id)
            self._finish(0)

    def _has_ended(self) -> bool:
        """Whether this start of the job has a verdict; that of an earlier one, which was requeued, is no
        matter."""
        try:
            verdict = json.loads((self._job_dir / "verdict.json").read_text())
        except (OSError, ValueError):
            return False
        return bool(verdict.get("attempt", self._surroundings.attempt) == self._surroundings.attempt)

    def _make_leader(self, leadership: Leadership, sure: bool) -> Leader:
        policy = self._config.policy
        return Leader(
            job_id=self._surroundings.job_id,
            node=self._surroundings.node,
            host=self._host,
            plan=self._plan,
            leadership=leadership,
            secret=self._secret,
            slurm=self._slurm,
            limits=Limits(
                poll_interval_s=policy.poll_interval_s,
                heartbeat_s=self._heartbeat_s,
                start_timeout_s=policy.start_timeout_s,
                reconnect_s=policy.keepalive_s,
                watchdog_floor_s=policy.watchdog_floor_s,
                watchdog_factor=policy.watchdog_factor,
                metrics_port=policy.metrics_port,
                signed_events=policy.signed_events,
                straggler_slower=policy.straggler_slower,
                straggler_steps=policy.straggler_steps,
            ),
            sure=sure,
        )

    def terminated(self) -> None:
        """SIGTERM: somebody cancels the job. The leader says so, every other agent just ends. Where only a
        standby job is cancelled, training goes on without this node."""
        if self._surroundings.brought:
            self._leading.let_go()
            self._finish(EXIT_TERMINATED)
        elif not self._leading.stop("the job was cancelled (SIGTERM)"):
            self._finish(EXIT_TERMINATED)

    def time_is_nearly_over(self) -> None:
        """SIGUSR2: Slurm's warning before the time limit (sbatch --signal), or before preemption."""
        self._say({"kind": "time_limit", "reason": f"Slurm's warning (SIGUSR2) on {self._surroundings.node}"})

    def _led(self) -> None:
        """A leader has greeted: it must know what is true here, and what the one before may not have
        heard."""
        self._following.send({"kind": "vault", "host": self._host, "port": self._vault.port})
        for message in (*self._ranks.facts(), *self._recent):
            self._following.send(message)

    async def _from_leader(self, message: dict[str, Any]) -> None:
        if message["slot"] == EVERYBODY:
            self._ranks.tell_all(message["message"])
        elif message["slot"] is not None:
            try:
                order = as_sent(message["message"], self._job_dir)
            except (OSError, ValueError) as error:  # it is said again on the next connection
                raise ChannelClosed(f"a table of peers cannot be read: {error}") from None
            self._ranks.tell(int(message["slot"]), order)
        else:
            await self._obey(message["message"])

    async def _obey(self, order: dict[str, Any]) -> None:
        kind = order["kind"]
        if kind == "spawn":
            await self._ranks.start_missing(order.get("slots"))
        elif kind == "keep":
            self._vault.saw_epoch(int(order["epoch"]))
            self._vault.keep(int(order["step"]))
            self._vault.forget_all_but(order["ranks"], step=int(order["step"]), epoch=int(order["epoch"]))
        elif kind == "epoch":
            self._vault.saw_epoch(int(order["epoch"]))
        elif kind == "kill":
            await self._ranks.end_all(grace_s=0.0)
        elif kind == "retire":
            await self._retire()
        elif kind == "exit":
            log.info("ending reason=%s", order.get("reason"))
            self._finish(0)
        elif kind == "lead":
            self._in_background(self._leading.take_over())
        else:
            log.warning("refused an order kind=%s reason=unknown kind", kind)

    async def _retire(self) -> None:
        """Leave for good: no rank is here any more. Exit 0 comes before Slurm takes the node."""
        await self._ranks.end_all()
        await self._following.last_word({"kind": "agent_retired"})
        self._finish(0)

    def _finish(self, code: int) -> None:
        if not self._exit.done():
            self._exit.set_result(code)

    # ---- the ranks ----

    def _report(self, message: dict[str, Any]) -> None:
        """A rank process has said something, or has ended."""
        beat = message.pop("beat", None)
        beats = self._ranks.take_beats() if beat is None else [beat]
        if beats:  # what a message leads to may be the end of the job: nothing said before may be lost
            self._say({"kind": "beat", "ranks": beats})
        if message["kind"] == "process_exited" and message.get("tail"):
            log.warning("last lines of slot %d:\n%s", message["slot"], message["tail"])
        if message["kind"] in LASTING or message["kind"] in NOT_TOLD_AGAIN:
            self._following.send(message)
        else:
            self._say(message)

    def _say(self, message: dict[str, Any]) -> None:
        """Tell the leader what nobody would say again if it were lost."""
        self._recent.append(message)
        self._following.send(message)

    async def _beat_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            self._ranks.look(time.monotonic())
            beats = self._ranks.take_beats()
            message = {"kind": "beat", "ranks": beats, "place": self._following.place}
            if beats:
                self._say(message)
            else:  # nothing in it that a new leader would miss
                self._following.send(message)

    def _in_background(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)


async def _main(job_dir: Path, standby: Standby | None) -> int:
    adopt_orphans()
    surroundings = Surroundings.from_environment()
    if standby is not None:
        surroundings = surroundings.with_standby(standby, job_dir)
    _log_to(job_dir / "logs" / f"agent-{surroundings.node}.log")
    slurm = connect_to_slurm(by="best") if surroundings.job_id is not None else None
    agent = Agent(job_dir, load(job_dir / "config.yaml"), surroundings, slurm)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR2, agent.time_is_nearly_over)
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


def run(job_dir: Path | str, standby: Standby | None = None) -> int:
    """Run this node's agent until the job has ended or the node is left; the exit code to end with.
    `standby`: where the node has come with a standby job."""
    directory = Path(job_dir)
    (directory / "logs").mkdir(mode=0o700, exist_ok=True)
    os.umask(0o077)
    return asyncio.run(_main(directory, standby))
