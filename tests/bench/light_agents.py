"""Thousands of agents in one process: each has a socket of its own, proves the job's secret, and speaks the
real protocol with the leader (simulated_nodes.py says what). A program of bench_scale:

    python light_agents.py JOB_DIR ACTIVE STANDBYS HEARTBEAT_S STEP_S

It takes commands, a JSON object a line, on its standard input, and answers each with one on its standard
output.
"""

from __future__ import annotations

import contextlib
import json
import math
import select
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path

from simulated_nodes import Message, SimulatedJob, SimulatedNode

from tm_slurm.agent.following import DIAL_APART_S
from tm_slurm.control.frames import LENGTH_BYTES, MAX_FRAME_BYTES, decode, encode, length_of
from tm_slurm.control.handshake import Dialler, read_secret
from tm_slurm.coordinator.election import LeaderFile

SLOTS = 50
"""Heartbeats are spread over so many moments of an interval."""

LOOK_S = 0.02
AT_ONCE = 256
"""Sockets that are read before it is looked whether a heartbeat is due."""

ALIVE = b'{"renewal"'
AGAIN_AT_ONCE = 200
WANTED = frozenset({"left", "lost", "newer leader"})
"""Why a connection is closed, and not opened again."""

AFFECTED = frozenset({"prepare", "prepare_leave", "join", "go"})


IP_BIND_ADDRESS_NO_PORT = 24  # linux/in.h; Python does not name it
AT_AN_ADDRESS = 4096
"""Simulated nodes. The more ports of an address are taken, the longer the kernel looks for another."""


class Connection:
    """One agent's connection to the leader."""

    def __init__(self, node: SimulatedNode) -> None:
        self.node = node
        self.place = (0, 0)
        self.news: int | None = None
        self.term = 0
        self.sock: socket.socket | None = None
        self.dialler: Dialler | None = None
        self.led = False
        self.come = bytearray()
        self.to_send = bytearray()
        self.heard_at = math.inf

    def frames(self, data: bytes) -> Iterator[bytes]:
        """The bodies of the frames that are complete by now."""
        self.come += data
        while len(self.come) >= LENGTH_BYTES:
            end = LENGTH_BYTES + length_of(self.come[:LENGTH_BYTES], MAX_FRAME_BYTES)
            if len(self.come) < end:
                return
            body = bytes(self.come[LENGTH_BYTES:end])
            del self.come[:end]
            yield body


class LightAgents:
    """All nodes of a job."""

    def __init__(self, job_dir: Path, active: int, standbys: int, heartbeat_s: float, step_s: float) -> None:
        self.job_dir = job_dir
        self.secret = read_secret(job_dir)
        self.heartbeat_s, self.step_s = heartbeat_s, step_s
        self.job = SimulatedJob(active, self._say)
        self.connections = [
            Connection(SimulatedNode(self.job, f"n{number:05d}", number))
            for number in range(active + standbys)
        ]
        self.by_name = {connection.node.name: connection for connection in self.connections}
        self.epoll = select.epoll()
        self.by_socket: dict[int, Connection] = {}
        self.leader: LeaderFile | None = None
        self.dial_from = 0.0
        self.dialled = len(self.connections)
        self.renewal = 0
        self.again: deque[Connection] = deque()
        """those that were cut off, and dial again when the leader is seen to be there"""
        self.heard: Counter[str] = Counter()
        self.heard_bytes: Counter[str] = Counter()
        self.said: Counter[str] = Counter()
        self.said_bytes: Counter[str] = Counter()
        self.affected_at = 0.0
        self.longest_silence_s = 0.0
        self.beats = 0
        self.errors: Counter[str] = Counter()

    # ---- what is said ----

    def _say(self, node: SimulatedNode, message: Message) -> None:
        self._send(self.connections[node.number], message)

    def _send(self, connection: Connection, message: Message) -> None:
        if connection.sock is not None and connection.led:
            frame = encode(message)
            self.said[message["kind"]] += 1
            self.said_bytes[message["kind"]] += len(frame)
            self._write(connection, frame)

    def _write(self, connection: Connection, data: bytes) -> None:
        assert connection.sock is not None
        if connection.to_send:
            connection.to_send += data
            return
        try:
            sent = connection.sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._closed(connection, type(error).__name__)
            return
        if sent < len(data):
            connection.to_send += data[sent:]
            self.epoll.modify(connection.sock, select.EPOLLIN | select.EPOLLOUT)

    # ---- connections ----

    def dial(self, connection: Connection) -> None:
        """Begin to connect to the leader."""
        assert self.leader is not None
        if connection.sock is not None:
            self._closed(connection, "newer leader")
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1)
        sock.bind((f"127.0.1.{1 + connection.node.number // AT_AN_ADDRESS}", 0))
        sock.connect_ex((self.leader.host, self.leader.port))
        connection.sock, connection.led = sock, False
        connection.come.clear()
        connection.to_send.clear()
        about = {"role": "agent", "place": connection.place, "news": connection.news}
        connection.dialler = Dialler(self.secret, {"node": connection.node.name, "job": None, **about})
        connection.to_send += encode(connection.dialler.hello)
        self.by_socket[sock.fileno()] = connection
        self.epoll.register(sock, select.EPOLLIN | select.EPOLLOUT)

    def _closed(self, connection: Connection, why: str) -> None:
        assert connection.sock is not None
        self.errors[why] += 1
        self.by_socket.pop(connection.sock.fileno(), None)
        with contextlib.suppress(OSError):
            self.epoll.unregister(connection.sock)
        connection.sock.close()
        connection.sock, connection.led, connection.heard_at = None, False, math.inf
        if why not in WANTED:
            self.again.append(connection)

    def _readable(self, connection: Connection) -> None:
        assert connection.sock is not None
        try:
            data = connection.sock.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError as error:
            self._closed(connection, type(error).__name__)
            return
        if not data:
            self._closed(connection, "closed by the leader")
            return
        for body in connection.frames(data):
            if connection.sock is None:
                return
            self._take(connection, body)

    def _writable(self, connection: Connection) -> None:
        assert connection.sock is not None
        try:
            sent = connection.sock.send(connection.to_send)
        except BlockingIOError:
            return
        except OSError as error:
            self._closed(connection, type(error).__name__)
            return
        del connection.to_send[:sent]
        if not connection.to_send:
            self.epoll.modify(connection.sock, select.EPOLLIN)

    def _take(self, connection: Connection, body: bytes) -> None:
        now = time.monotonic()
        self.longest_silence_s = max(self.longest_silence_s, now - connection.heard_at)
        connection.heard_at = now
        if connection.dialler is not None:
            answer = connection.dialler.answer(decode(body))
            connection.dialler = None
            self._write(connection, encode(answer))
            return
        if body.startswith(ALIVE):
            self._heard("alive", len(body))
            if b'"news"' in body:
                for number, _ in decode(body)["news"]:
                    connection.news = max(connection.news or 0, int(number))
                    self.heard["news"] += 1
            return
        message = decode(body)
        connection.term = int(message["term"])
        if message.get("kind") == "led":
            self._heard("led", len(body))
            connection.led = True
            if connection.news is None:
                connection.news = int(message["news"])
            for fact in connection.node.facts():
                self._send(connection, fact)
            return
        order = message["message"]
        self._heard(order["kind"], len(body))
        if order["kind"] in AFFECTED:
            self.affected_at = time.time()
        place = tuple(message["place"]) if message.get("place") is not None else None
        if place is None or place > connection.place:
            connection.place = place or connection.place  # type: ignore[assignment]
            connection.node.hear(message["slot"], order)
            if connection.node.leaves and connection.sock is not None:
                self._closed(connection, "left")

    def _heard(self, kind: str, nbytes: int) -> None:
        self.heard[kind] += 1
        self.heard_bytes[kind] += nbytes + LENGTH_BYTES

    # ---- time ----

    def run(self) -> None:
        """Until standard input ends."""
        self.epoll.register(sys.stdin.fileno(), select.EPOLLIN)
        looked_at = 0.0
        slot, next_slot, slot_s = 0, time.monotonic(), self.heartbeat_s / SLOTS
        began = time.monotonic()
        while True:
            now = time.monotonic()
            if now - looked_at >= LOOK_S:
                looked_at = now
                self._look(now)
            self._dial_those_whose_turn_it_is(now)
            next_slot = max(next_slot, now - self.heartbeat_s)
            while now >= next_slot:  # several, where reading took long: agents of their own would not wait
                next_slot += slot_s
                slot += 1
                self.job.step = int((now - began) / self.step_s)
                self._beat(slot)
            for fd, events in self.epoll.poll(max(0.0, min(next_slot - now, 0.005)), AT_ONCE):
                if fd == sys.stdin.fileno():
                    line = sys.stdin.readline()
                    if not line:
                        return
                    print(json.dumps(self._command(json.loads(line))), flush=True)
                    continue
                connection = self.by_socket.get(fd)
                if connection is not None and events & select.EPOLLOUT:
                    self._writable(connection)
                if connection is not None and connection.sock is not None and events & ~select.EPOLLOUT:
                    self._readable(connection)

    def _look(self, now: float) -> None:
        """Whether there is a new leader."""
        found = LeaderFile.read(self.job_dir)
        if found is None or not found.port or found.resigned:
            return
        if self.leader is None or found.term > self.leader.term:
            self.leader, self.dial_from, self.dialled = found, now, 0
            self.again.clear()
        if found.renewal != self.renewal:
            self.renewal = found.renewal
            for connection in [self.again.popleft() for _ in range(min(AGAIN_AT_ONCE, len(self.again)))]:
                if connection.sock is None and not connection.node.leaves:
                    self.dial(connection)

    def _dial_those_whose_turn_it_is(self, now: float) -> None:
        """As Following does: one after the other."""
        while self.dialled < len(self.connections) and now >= self.dial_from + self.dialled * DIAL_APART_S:
            connection = self.connections[self.dialled]
            self.dialled += 1
            if not connection.node.leaves:
                self.dial(connection)

    def _beat(self, slot: int) -> None:
        """Of the nodes whose moment it is; each second one with a step, if a step takes two intervals."""
        at = time.time()
        every = max(1, round(self.step_s / self.heartbeat_s))
        committed = (slot // SLOTS) % every == 0
        for connection in self.connections[slot % SLOTS :: SLOTS]:
            if connection.led:
                body = connection.node.beat(connection.place, at, committed=committed)
                frame = len(body).to_bytes(LENGTH_BYTES, "big") + body
                self.beats += 1
                self.said["beat"] += 1
                self.said_bytes["beat"] += len(frame)
                self._write(connection, frame)

    # ---- commands ----

    def _command(self, command: Message) -> Message:
        if command["do"] == "forget":
            for counter in (self.heard, self.heard_bytes, self.said, self.said_bytes):
                counter.clear()
            self.affected_at = self.longest_silence_s = 0.0
        elif command["do"] == "lose":
            connection = self.by_name[command["node"]]
            if connection.sock is not None:
                self._closed(connection, "lost")
            connection.node.leaves, connection.node.rank = True, None
        newest = max((connection.news or 0 for connection in self.connections), default=0)
        return {
            "connected": sum(connection.led for connection in self.connections),
            "ranks": sum(connection.node.rank is not None for connection in self.connections),
            "warm": sum(connection.node.warm_for is not None for connection in self.connections),
            "behind": sum(c.led and (c.news or 0) < newest for c in self.connections),
            "heard": self.heard,
            "heard_bytes": self.heard_bytes,
            "said": self.said,
            "said_bytes": self.said_bytes,
            "affected_at": self.affected_at,
            "longest_silence_s": self.longest_silence_s,
            "beats": self.beats,
            "errors": self.errors,
            "cpu_s": time.process_time(),
        }


if __name__ == "__main__":
    LightAgents(
        Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), float(sys.argv[5])
    ).run()
