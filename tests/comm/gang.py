"""Processes for the communication tests: each has an endpoint, and a pipe to the test that directs it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from tm_slurm import comm

SECRET = b"0123456789abcdef0123456789abcdef"
JOB = "job-1"
PATIENCE_S = 120.0


def _put(pipe: Connection, *message: Any) -> None:
    # Not pipe.send: torch would move tensors into memory that both processes share.
    pipe.send_bytes(pickle.dumps(message))


def _get(pipe: Connection) -> Any:
    return pickle.loads(pipe.recv_bytes())


# Processes are forked from one that has torch loaded; it finds this module by the path.
os.environ["PYTHONPATH"] = os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "gang",
        "torch._dynamo",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "torch.distributed.optim",
        "torch.distributed.pipelining",
        "torch.distributed.tensor.parallel",
    ]
)


@dataclass
class Member:
    """What a worker process holds."""

    pipe: Connection
    endpoint: comm.Endpoint
    rank: int
    incarnation: int

    def tell(self, value: Any) -> None:
        _put(self.pipe, "value", value)

    def hear(self, timeout_s: float = PATIENCE_S) -> Any:
        if not self.pipe.poll(timeout_s):
            raise TimeoutError(f"rank {self.rank}: the test said nothing for {timeout_s} s")
        return _get(self.pipe)[0]

    def join_world(self, *, epoch: int = 0, timeout_s: float = PATIENCE_S) -> int:
        """Configure from the table that the test sends, make the default group, and return its size."""
        peers = self.hear()
        self.endpoint.configure(rank=self.rank, epoch=epoch, term=1, peers=peers)
        comm.register(self.endpoint)
        dist.init_process_group(
            "tm",
            store=dist.HashStore(),
            rank=self.rank,
            world_size=len(peers),
            timeout=timedelta(seconds=timeout_s),
        )
        return len(peers)


def _main(pipe: Connection, worker: Callable[..., Any], rank: int, incarnation: int, *rest: Any) -> None:
    options, args = rest
    torch.set_num_threads(1)
    try:
        endpoint = comm.Endpoint(
            **{"secret": SECRET, "job": JOB, "host": "127.0.0.1", "incarnation": incarnation, **options}
        )
        _put(pipe, "value", endpoint.port)
        _put(pipe, "result", worker(Member(pipe, endpoint, rank, incarnation), *args))
    except BaseException:  # whatever it is, the test must see it
        _put(pipe, "error", traceback.format_exc())
    if pipe.poll(PATIENCE_S):  # stay until the test is done: a link must not break before
        with contextlib.suppress(EOFError):
            pipe.recv_bytes()
    os._exit(0)


@dataclass
class Process:
    rank: int
    incarnation: int
    pipe: Connection
    process: Any
    port: int = 0
    values: list[Any] = field(default_factory=list)

    @property
    def peer(self) -> comm.Peer:
        return comm.Peer("127.0.0.1", self.port, self.incarnation)

    def tell(self, value: Any) -> None:
        _put(self.pipe, value)

    def _next(self, timeout_s: float, kind: str) -> Any:
        if not self.pipe.poll(timeout_s):
            raise TimeoutError(f"rank {self.rank} said nothing for {timeout_s} s")
        found, value = _get(self.pipe)
        if found != kind:
            raise AssertionError(f"rank {self.rank} (incarnation {self.incarnation}): {found}: {value}")
        return value

    def hear(self, timeout_s: float = PATIENCE_S) -> Any:
        return self._next(timeout_s, "value")

    def result(self, timeout_s: float = PATIENCE_S) -> Any:
        return self._next(timeout_s, "result")

    def kill(self) -> None:
        self.process.kill()
        self.process.join(PATIENCE_S)

    def freeze(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)


class Gang:
    """The processes of one test."""

    def __init__(self) -> None:
        self.everyone: list[Process] = []

    def start(
        self, worker: Callable[..., Any], rank: int, *args: Any, incarnation: int = 0, **options: Any
    ) -> Process:
        ours, theirs = _context.Pipe()
        process = _context.Process(
            target=_main, args=(theirs, worker, rank, incarnation, options, args), daemon=True
        )
        process.start()
        theirs.close()
        started = Process(rank, incarnation, ours, process)
        self.everyone.append(started)
        return started

    def world(self, worker: Callable[..., Any], size: int, *args: Any, **options: Any) -> list[Process]:
        """Start `size` ranks, tell each who is who, and return them."""
        members = [self.start(worker, rank, *args, **options) for rank in range(size)]
        table = self.table(members)
        for member in members:
            member.tell(table)
        return members

    @staticmethod
    def table(members: list[Process]) -> dict[int, comm.Peer]:
        for member in members:
            if not member.port:
                member.port = member.hear()
        return {member.rank: member.peer for member in members}

    def end(self) -> None:
        for member in self.everyone:
            with contextlib.suppress(OSError):
                member.tell(None)
            member.pipe.close()
        for member in self.everyone:
            member.process.join(2)
            if member.process.is_alive():
                member.process.kill()
                member.process.join(5)


@contextlib.contextmanager
def gang() -> Iterator[Gang]:
    members = Gang()
    try:
        yield members
    finally:
        members.end()
