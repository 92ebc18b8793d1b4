"""A rank process's line to its node's agent: a thread that listens, so that training never has to.

Orders for the training thread (assign, warm, join, finish, retire) wait in a queue until it asks. What can be
done while training goes on (prepare, go, stop, cancel) is done at once, in the listening thread, by the
registered handlers.
"""

from __future__ import annotations

import atexit
import os
import select
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

from tm_slurm.control import FrameSocket

Message = dict[str, Any]
Handler = Callable[[Message], None]

BEAT_S = 0.2
STOP_S = 5.0
"""How long the end of the interpreter waits for what the listening thread is doing."""

EXIT_AGENT_GONE = 75
"""This process's exit code when its agent is gone (EX_TEMPFAIL)."""


class AgentLink:
    """`handlers` maps a message kind to what the listening thread does with it; every other kind is an
    order."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._frames = FrameSocket(sock)
        self._handlers: dict[str, Handler] = {}
        self._orders: deque[Message] = deque()
        self._arrived = threading.Condition()
        self._steps: list[list[Any]] = []
        self._worked: list[list[Any]] = []
        self._steps_lock = threading.Lock()
        self._head: Message | None = None
        self._every_beat: Callable[[], None] = self.beat
        self._at_work = threading.Lock()
        self._stopped = False

    @classmethod
    def from_environment(cls) -> AgentLink | None:
        """The link that the agent has laid; None outside a job."""
        descriptor = os.environ.pop("TM_SLURM_AGENT_FD", None)
        if descriptor is None:
            return None
        sock = socket.socket(fileno=int(descriptor))
        sock.set_inheritable(False)
        return cls(sock)

    def start(self, handlers: dict[str, Handler], every_beat: Callable[[], None]) -> None:
        """Begin to listen. `every_beat` is called at least every BEAT_S seconds, in the listening thread."""
        self._handlers = handlers
        self._every_beat = every_beat
        atexit.register(self.stop)
        threading.Thread(target=self._listen, name="tm-agent-link", daemon=True).start()

    def stop(self) -> None:
        """From now on the listening thread does nothing but hear whether the agent is there. The interpreter
        ends threads that come out of native code while it ends, and C++ takes that for a crash (SIGABRT)."""
        if self._at_work.acquire(timeout=STOP_S):
            self._stopped = True
            self._at_work.release()

    def _listen(self) -> None:
        try:
            while True:
                readable, _, _ = select.select([self._socket], [], [], BEAT_S)
                message = self._frames.receive() if readable else None
                with self._at_work:
                    if self._stopped:
                        continue
                    if message is not None:
                        self._take(message)
                    self._every_beat()
        except OSError as error:
            print(f"tm_slurm: the agent of this node is gone ({error}); ending", file=sys.stderr, flush=True)
            os._exit(EXIT_AGENT_GONE)
        except Exception:  # whatever it was, a rank that no longer listens must not go on training
            traceback.print_exc()
            os._exit(1)

    def _take(self, message: Message) -> None:
        handler = self._handlers.get(message["kind"])
        if handler is not None:
            handler(message)
            return
        with self._arrived:
            self._orders.append(message)
            self._arrived.notify_all()

    def send(self, message: Message) -> None:
        """To the agent, which passes it to the leader."""
        self._frames.send(message)

    def next_order(self, *kinds: str, timeout_s: float | None = None) -> Message:
        """Wait for the next order of one of `kinds` (any when none is given) and take it; others of no use
        any more are dropped. TimeoutError after `timeout_s`; without it as long as the agent lives, whose end
        ends this process."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._arrived:
            while True:
                while self._orders:
                    order = self._orders.popleft()
                    if not kinds or order["kind"] in kinds:
                        return order
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(
                        f"no order ({', '.join(kinds)}) from the coordinator within {timeout_s} s"
                    )
                self._arrived.wait(left)

    def has_order(self, timeout_s: float) -> bool:
        """Whether an order is there, or comes within so many seconds."""
        with self._arrived:
            return self._arrived.wait_for(lambda: bool(self._orders), timeout_s)

    # ---- heartbeats ----

    def committed(
        self,
        *,
        rank: int,
        epoch: int,
        step: int,
        at: float,
        seconds: float,
        loss: float | None,
        worked_s: float | None = None,
    ) -> None:
        """Step `step` is applied here; told with the next heartbeat. `at`: wall clock. `worked_s`: the part
        of `seconds` in which no collective was under way here."""
        with self._steps_lock:
            self._steps.append([step, at, seconds, loss])
            if worked_s is not None:
                self._worked.append([step, worked_s])
            self._head = {"kind": "beat", "rank": rank, "epoch": epoch, "step": step}

    def beat(self) -> None:
        """Tell now what has not been told yet."""
        with self._steps_lock:
            if self._head is None or not self._steps:
                return
            message = {**self._head, "steps": self._steps}
            if self._worked:
                message["worked"] = self._worked
            self._steps, self._worked = [], []
        self.send(message)
