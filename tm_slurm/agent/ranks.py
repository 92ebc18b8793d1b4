"""The rank processes of one node: started, listened to, watched, ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tm_slurm.agent.facts import Facts
from tm_slurm.agent.orphans import end_orphans
from tm_slurm.agent.standstill import Standstill, state_of
from tm_slurm.control.channel import Channel, ChannelClosed

log = logging.getLogger("tm_slurm.agent")

TERMINATE_GRACE_S = 3.0
STOPPED_LIMIT_S = 2.0
TAIL_CHARS = 4000
LOOK_BACK_BYTES = 64 << 10
"""How much of the end of a log is searched for a traceback."""

TRACEBACK = "Traceback (most recent call last):"
CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
CRASH = "Fatal Python error: "
"""What faulthandler writes of a crash in native code begins so; after it come the stacks of all threads."""

CRASH_ENDS = "Extension modules: "
TRACEBACK_CHARS = 12000
"""Of a longer one, the beginning and the end."""

LAST_WORDS_S = 1.0
"""How long after a process's end what it said last is still waited for."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """What a rank process runs, and what it needs to know."""

    argv: tuple[str, ...]
    job_dir: Path
    node: str
    host: str
    cpus_per_rank: int
    compile_cache: Path | None = None
    """where torch.compile keeps what it has made, unless the environment says otherwise"""


@dataclass
class RankProcess:
    """One running rank process. `facts`: what it has said that a new leader must hear again."""

    slot: int
    incarnation: int
    process: asyncio.subprocess.Process
    channel: Channel
    log_path: Path
    standstill: Standstill
    listener: asyncio.Task[None] | None = None
    watcher: asyncio.Task[None] | None = None
    ending: bool = False
    """it was told to end, or has ended"""
    facts: Facts = field(default_factory=Facts)
    beat: dict[str, Any] | None = None
    committed: int | None = None
    """steps that it has applied, as far as it has told"""
    failing: dict[str, Any] | None = None
    """where an exception of the user's came up: rank, step, data position"""


class Ranks:
    """`report` is called with each message of a rank process, with `process_exited` when one ends, and with
    `process_stopped` when one has been stopped (SIGSTOP) for `stopped_limit_s` seconds."""

    def __init__(
        self,
        command: Command,
        slots: int,
        report: Callable[[dict[str, Any]], None],
        *,
        stopped_limit_s: float = STOPPED_LIMIT_S,
    ) -> None:
        self._command = command
        self._slots = slots
        self._report = report
        self._stopped_limit_s = stopped_limit_s
        self._running: dict[int, RankProcess] = {}
        self._exits: dict[int, dict[str, Any]] = {}
        self._watchers: set[asyncio.Task[None]] = set()

    async def start_missing(self, slots: Iterable[int] | None = None) -> None:
        """Start a process for each of `slots` (None: all of a standby's) that has none, or whose last one is
        just ending."""
        for slot in range(self._slots) if slots is None else slots:
            rank = self._running.get(slot)
            if rank is not None and rank.ending and rank.watcher is not None:
                await asyncio.wait({rank.watcher}, timeout=LAST_WORDS_S + TERMINATE_GRACE_S)
            if slot not in self._running:
                await self._start(slot)

    async def _start(self, slot: int) -> None:
        command = self._command
        incarnation = time.time_ns() // 1000
        ours, theirs = socket.socketpair()
        log_path = command.job_dir / "logs" / f"{command.node}.{slot}.{incarnation}.log"
        environment = {
            **os.environ,
            "TM_SLURM_AGENT_FD": str(theirs.fileno()),
            "TM_SLURM_JOB_DIR": str(command.job_dir),
            "TM_SLURM_SLOT": str(slot),
            "TM_SLURM_INCARNATION": str(incarnation),
            "TM_SLURM_HOST": command.host,
            "PYTHONUNBUFFERED": "1",
        }
        environment.setdefault("PYTHONFAULTHANDLER", "1")  # a crash in native code says where it was
        environment.setdefault("OMP_NUM_THREADS", str(command.cpus_per_rank))
        if command.compile_cache is not None:
            environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(command.compile_cache))
        with log_path.open("ab") as output, theirs:
            log_path.chmod(0o600)
            process = await asyncio.create_subprocess_exec(
                *command.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                env=environment,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                preexec_fn=_ignore_warnings,
            )
        reader, writer = await asyncio.open_connection(sock=ours)
        standstill = Standstill(self._stopped_limit_s)
        rank = RankProcess(slot, incarnation, process, Channel(reader, writer), log_path, standstill)
        self._running[slot] = rank
        self._exits.pop(slot, None)
        log.info("started a rank process slot=%d pid=%d", slot, process.pid)
        rank.listener = asyncio.create_task(self._listen(rank))
        rank.watcher = watcher = asyncio.create_task(self._await_exit(rank, rank.listener))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)

    async def _listen(self, rank: RankProcess) -> None:
        with contextlib.suppress(ChannelClosed):
            while True:
                message = await rank.channel.receive()
                if message.get("kind") == "beat":
                    self._take_beat(rank, message)
                    continue
                if message.get("kind") == "failing":
                    rank.failing = message
                    continue
                self._said(rank, message)

    def _said(self, rank: RankProcess, message: dict[str, Any]) -> None:
        message |= {"slot": rank.slot, "incarnation": rank.incarnation}
        rank.facts.take(message)
        self._report(message)

    @staticmethod
    def _take_beat(rank: RankProcess, message: dict[str, Any]) -> None:
        """Keep what has not been passed on yet together with what is new."""
        if rank.beat is not None:
            for key in ("steps", "worked"):
                if key in rank.beat:
                    message[key] = rank.beat[key] + message.get(key, [])
        rank.committed = int(message["step"]) + 1
        if rank.failing is not None and rank.committed > int(rank.failing["step"]):
            rank.failing = None  # it has got over it
        rank.beat = message
        rank.facts.runs_at(int(message["epoch"]))

    def look(self, now: float) -> None:
        """Look whether the processes here run at all; to be called with every beat. `now`: monotonic."""
        for rank in list(self._running.values()):
            found = rank.standstill.look(state_of(rank.process.pid), now)
            if found is None:
                continue
            log.warning("%s slot=%d pid=%d how=%s", found.kind, rank.slot, rank.process.pid, found.how)
            if found.kind == "process_goes_on":
                rank.facts.end("process_stopped")
                rank.facts.end("process_unwell")
            else:
                self._said(rank, {"kind": found.kind, "how": found.how})

    async def _await_exit(self, rank: RankProcess, listener: asyncio.Task[None]) -> None:
        code = await rank.process.wait()
        rank.ending = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.process.pid, signal.SIGKILL)  # what it started must not outlive it
        await asyncio.wait({listener}, timeout=LAST_WORDS_S)
        rank.channel.abort()
        self._running.pop(rank.slot, None)
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        log.info("a rank process ended slot=%d pid=%d how=%s", rank.slot, rank.process.pid, how)
        exited = {
            "kind": "process_exited",
            "slot": rank.slot,
            "incarnation": rank.incarnation,
            "code": code,
            "how": how,
            "log": str(rank.log_path),
            "beat": rank.beat,
            "committed": rank.committed,
        }
        if code != 0:
            written = _end_of(rank.log_path)
            exited |= {"tail": written[-TAIL_CHARS:], "traceback": last_traceback(written)}
            exited["failing"] = rank.failing
        self._exits[rank.slot] = exited
        self._report(exited)
        end_orphans(rank.incarnation)  # after the report: a machine may have many processes to look through

    def tell(self, slot: int, message: dict[str, Any]) -> None:
        """Pass a leader's message to a slot's process; dropped when there is none."""
        rank = self._running.get(slot)
        if rank is not None:
            with contextlib.suppress(ChannelClosed):
                rank.channel.send(message)

    def tell_all(self, message: dict[str, Any]) -> None:
        """Pass a leader's message to every process here."""
        for slot in self._running:
            self.tell(slot, message)

    def facts(self) -> list[dict[str, Any]]:
        """What a new leader must hear about the processes here: how those ended that were not started again,
        and what the others have said that is still true."""
        said = [fact for rank in self._running.values() for fact in rank.facts.told()]
        return [*self._exits.values(), *said]

    def take_beats(self) -> list[dict[str, Any]]:
        """The heartbeats since the last call."""
        beats = [rank.beat for rank in self._running.values() if rank.beat is not None]
        for rank in self._running.values():
            rank.beat = None
        return beats

    def __len__(self) -> int:
        return len(self._running)

    async def end_all(self, grace_s: float = TERMINATE_GRACE_S) -> None:
        """TERM, then KILL after `grace_s`; returns when every process has ended."""
        for rank in self._running.values():
            rank.ending = True
        processes = [rank.process for rank in self._running.values()]
        waits = [asyncio.ensure_future(process.wait()) for process in processes]
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in processes:
                _send(process, number)
            if waits:
                await asyncio.wait(waits, timeout=grace_s)
        for rank in list(self._running.values()):
            rank.channel.abort()


def _ignore_warnings() -> None:
    """Slurm sends its warning before the time limit (SIGUSR2) to every process of the step, not only to the
    agent. A rank process must not end by it before it handles signals itself."""
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def _send(process: asyncio.subprocess.Process, number: int) -> None:
    """Signal a process. Not by `Process.send_signal`: that looks whether the process has ended, takes its
    exit code, and leaves none for whoever waits."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def argv_of(*, module: str | None, script: str | None, args: tuple[str, ...]) -> tuple[str, ...]:
    """The command line of a rank process."""
    target = ("-m", module) if module is not None else (str(script),)
    return (sys.executable, *target, *args)


def _end_of(log_path: Path) -> str:
    with contextlib.suppress(OSError), log_path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - LOOK_BACK_BYTES))
        lines = file.read().decode(errors="replace").splitlines(keepends=True)
        return "".join(line for line in lines if not line.startswith(CRASH_ENDS))
    return ""


def last_traceback(written: str) -> str:
    """Python's last traceback in a log, with those of the exceptions that led to it, or what faulthandler has
    written of a crash after that; empty when there is none."""
    *before, last = written.split(TRACEBACK)
    if CRASH in last:
        found = CRASH + last.rpartition(CRASH)[2].rstrip()
    elif before:
        found = last
        while len(before) > 1 and before[-1].rstrip().endswith(CHAINED):
            found = before.pop() + TRACEBACK + found
        found = (TRACEBACK + found).rstrip()
    else:
        return ""
    if len(found) <= TRACEBACK_CHARS:
        return found
    half = TRACEBACK_CHARS // 2
    return f"{found[:half]}\n  …\n{found[-half:]}"
