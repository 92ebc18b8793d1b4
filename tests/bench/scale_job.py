"""One large job for bench_scale: a process that leads, another that would take over, and one with all
agents."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tm_slurm.config.model import PolicyConfig
from tm_slurm.control.frames import FrameSocket
from tm_slurm.control.handshake import SECRET_BYTES, connect_socket, read_secret
from tm_slurm.coordinator.election import LeaderFile
from tm_slurm.events.signed import signed_frame
from tm_slurm.observe.follow import JsonLines

HERE = Path(__file__).parent
POLICY = PolicyConfig()
"""What a job has unless its config says otherwise."""

STEP_S = 1.0
LOOK_S = 0.005
LIMIT_S = 180.0
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")

Message = dict[str, Any]


class Program:
    """A Python program of this directory, running."""

    def __init__(self, *words: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *map(str, words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def ask(self, **command: Any) -> Message:
        """A command and its answer."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise AssertionError(f"{self.process.args[1]} has ended: exit code {self.process.wait(5.0)}")
        return dict(json.loads(answer))

    def await_ready(self) -> None:
        """Until it says so."""
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        assert said == "ready\n", f"expected ready, found {said!r}"

    def cpu_s(self) -> float:
        """Processor seconds so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS

    def memory_mb(self, which: str = "VmHWM") -> float:
        """Resident memory, in MB: the most so far, or that of now (VmRSS)."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith(f"{which}:"):
                return int(line.split()[1]) / 1024
        raise AssertionError(f"no {which}")

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


class ScaleJob:
    """`active` nodes with a rank each, and standbys."""

    def __init__(self, job_dir: Path, active: int, standbys: int) -> None:
        self.job_dir = job_dir
        self.active, self.standbys = active, standbys
        job_dir.mkdir(parents=True)
        (job_dir / "secret").touch(0o600)
        (job_dir / "secret").write_bytes(secrets.token_bytes(SECRET_BYTES))
        self.secret = read_secret(job_dir)
        self._timeline = JsonLines(job_dir / "timeline.jsonl")
        self._entries: list[Message] = []
        self.heartbeat_s = POLICY.heartbeat_of(active + standbys)
        self.agents = Program(HERE / "light_agents.py", job_dir, active, standbys, self.heartbeat_s, STEP_S)
        self.began = time.monotonic()
        self.leaders = [self._leader(0)]
        self.requests = 0

    def _leader(self, number: int) -> Program:
        node = f"n{self.active + self.standbys - 1 - number:05d}"
        limits = (self.heartbeat_s, POLICY.keepalive_s, POLICY.lease_s)
        leader = Program(HERE / "scale_leader.py", self.job_dir, self.active, self.standbys, node, *limits)
        leader.await_ready()
        return leader

    def successor(self) -> None:
        """Another agent that would lead, if nobody did."""
        self.leaders.append(self._leader(len(self.leaders)))

    @property
    def leader(self) -> Program:
        return self.leaders[-1]

    def notes(self, what: str) -> list[Message]:
        self._entries += self._timeline.new()
        return [entry for entry in self._entries if entry["what"] == what]

    def until(
        self, what: str, test: Callable[[], Any], limit_s: float = LIMIT_S, look_s: float = LOOK_S
    ) -> Any:
        """The first true value of `test`; AssertionError saying what was awaited."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            value = test()
            if value:
                return value
            time.sleep(look_s)
        said = self.agents.ask(do="report")
        last = [entry["what"] for entry in self._entries[-10:]]
        raise AssertionError(
            f"not within {limit_s:.0f} s: {what}; agents: connected {said['connected']}, errors "
            f"{said['errors']}; timeline ends with {last}"
        )

    def start(self) -> float:
        """Until training has begun and standbys are warm; seconds since the agents were started."""
        self.until("the start", lambda: self.notes("started"))
        took_s = time.monotonic() - self.began
        self.until_calm()
        return took_s

    def until_calm(self) -> None:
        """Until all agents are there, all seats are taken, and nothing is under way."""

        def calm() -> bool:
            said = self.agents.ask(do="report")
            return said["ranks"] == self.active and said["behind"] == 0 and bool(said["connected"])

        self.until("all ranks and all news", calm, look_s=0.1)

    # ---- what is asked of the leader ----

    def connection(self, role: str = "user") -> FrameSocket:
        """A proved connection, as the command line has it."""
        leader = LeaderFile.read(self.job_dir)
        assert leader is not None
        sock = connect_socket((leader.host, leader.port), self.secret, {"role": role}, timeout_s=30.0)
        return FrameSocket(sock)

    def event(self, kind: str, node: str) -> float:
        """Tell of an event, as a user does; the wall-clock instant at which it was sent."""
        self.requests += 1
        event = {"id": f"{kind}/{node}/{self.requests}", "kind": kind, "node": node, "source": "user"}
        connection = self.connection()
        at = time.time()
        connection.send({"kind": "event", "event": {**event, "reason": "bench", "at": at}})
        answer = connection.receive()
        connection.close()
        assert answer.get("ok"), answer
        return at

    def signed(
        self, count: int, node: Callable[[int], str], kind: str = "drain", *, connections: int = 1
    ) -> tuple[float, float]:
        """As many signed events, dealt to `connections`, each of which sends without waiting for answers; the
        instants (wall clock) when the first was sent and the last was answered."""
        leader = LeaderFile.read(self.job_dir)
        assert leader is not None
        about = {"v": 1, "job": 0, "restart": 0, "term": leader.term, "source": "strigger", "reason": "bench"}
        every = []
        for _ in range(connections):
            sock = socket.create_connection((leader.host, leader.port), timeout=60.0)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            every.append(FrameSocket(sock))
        at = time.time()
        for number in range(count):
            told = {"at": at, "nonce": secrets.token_hex(8), "node": node(number), "kind": kind, "fact": "f"}
            every[number % connections].send(signed_frame(self.secret, {**about, **told}))
        for number in range(count):
            answer = every[number % connections].receive()
            assert answer.get("ok"), answer
        for frames in every:
            frames.close()
        return at, time.time()

    def end(self) -> None:
        for program in (*self.leaders, self.agents):
            program.end()
