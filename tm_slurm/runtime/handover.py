"""The state's way from leaver to joiner. The connection is made and the layout exchanged in the preparation
phase, so that in the pause only data flows (TrainMover §7: one pair each, in parallel, from memory to
memory)."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from tm_slurm.control import accept_socket, connect_socket, listening_at
from tm_slurm.runtime.limits import AWAIT_SWITCH_S, HANDSHAKE_TIMEOUT_S, TransferLimits
from tm_slurm.state import Receiver, ReceiveReport, Sender, SendReport, Snapshot, StateError


class Outgoing:
    """The leaver's side, for one epoch. A thread waits for the joiner; training goes on."""

    def __init__(
        self,
        *,
        host: str,
        secret: bytes,
        rank: int,
        epoch: int,
        share: tuple[int, int] = (0, 1),
        limits: TransferLimits,
        ahead: bool = True,
    ) -> None:
        """Not `ahead`: the joiner is let in when the pause begins, and not before."""
        self.epoch = epoch
        self._begun = threading.Event()
        if ahead:
            self._begun.set()
        self._limits = limits
        self._share = share
        self._rank = rank
        self._secret = secret
        self._listener = listening_at(host)
        self._listener.settimeout(limits.prepare_s)
        self.source = [host, int(self._listener.getsockname()[1])]
        self._snapshot: Snapshot | None = None
        self._captured = threading.Event()
        self._socket: socket.socket | None = None
        self._sender: Sender | None = None
        self._ready = threading.Event()
        self._failure: str = "no joiner has connected"
        self._closed = False
        threading.Thread(target=self._await_joiner, name="tm-outgoing", daemon=True).start()

    @property
    def wants_layout(self) -> bool:
        """Whether the training thread should capture the state at its next step boundary."""
        return not self._captured.is_set()

    def give_layout(self, snapshot: Snapshot) -> None:
        """The training thread's capture; only names, shapes and dtypes of it are used."""
        self._snapshot = snapshot
        self._captured.set()

    def _await_joiner(self) -> None:
        self._begun.wait(self._limits.prepare_s)
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return  # closed, or nobody came within the preparation's limit
            try:
                identity = accept_socket(sock, self._secret, timeout_s=HANDSHAKE_TIMEOUT_S)
                if (identity.get("rank"), identity.get("epoch")) != (self._rank, self.epoch):
                    sock.close()
                    continue
                if not self._captured.wait(self._limits.prepare_s) or self._snapshot is None:
                    raise StateError("no step boundary came within the preparation's limit")
                sender = Sender(sock, share=self._share)
                sender.prepare(self._snapshot, timeout_s=self._limits.prepare_s)
            except Exception as error:  # whoever it was and whatever it sent: the joiner may still come
                self._failure = str(error)
                sock.close()
                continue
            self._socket, self._sender = sock, sender
            self._ready.set()
            return

    def send(self, snapshot: Snapshot) -> SendReport:
        """In the pause: everything, until the joiner has verified it. StateError when that fails. After a
        failure the joiner may still have its role to build."""
        self._begun.set()
        if not self._ready.wait(self._limits.prepare_s) or self._sender is None:
            raise StateError(f"the joiner of rank {self._rank} is not there: {self._failure}")
        return self._sender.send(snapshot, timeout_s=self._limits.transfer_s(snapshot.nbytes))

    def cancel(self) -> None:
        """Wake whoever sends in here, with a StateError: the switch has come to nothing."""
        self._failure = "a failure came first"
        self._closed = True
        self._ready.set()
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._closed = True
        self._listener.close()
        if self._socket is not None:
            self._socket.close()


Address = tuple[str, int]


def call_sources(
    sources: Sequence[Address], secret: bytes, *, rank: int, epoch: int, limits: TransferLimits
) -> list[socket.socket]:
    """Connections to those that have a rank's state, as soon as they let its joiner in."""
    identity = {"role": "joiner", "rank": rank, "epoch": epoch}
    sockets: list[socket.socket] = []
    try:
        for source in sources:
            sockets.append(connect_socket(source, secret, identity, timeout_s=limits.prepare_s))
    except BaseException:
        for sock in sockets:
            sock.close()
        raise
    return sockets


class Incoming:
    """The joiner's side, for one epoch. `cancel` may be called from another thread."""

    def __init__(
        self,
        *,
        sources: Sequence[Address],
        secret: bytes,
        rank: int,
        epoch: int,
        state: Mapping[str, Any],
        limits: TransferLimits,
        called: list[socket.socket] | None = None,
    ) -> None:
        """`called`: connections to the sources, if there are any yet (see `call_sources`)."""
        self.epoch = epoch
        self._limits = limits
        self._sockets = (
            called
            if called is not None
            else call_sources(sources, secret, rank=rank, epoch=epoch, limits=limits)
        )
        names = [f"the source at {host}:{port}" for host, port in sources]
        self._receiver = Receiver.of_sources(self._sockets, state, names=names)

    def prepare(self) -> None:
        """Agree with the leaver on what will come. StateError when that fails."""
        self._receiver.prepare(timeout_s=self._limits.prepare_s)

    def receive(self) -> ReceiveReport:
        """Wait for the switch, then take the state in place. StateError when it fails or was cancelled."""
        return self._receiver.receive(timeout_s=AWAIT_SWITCH_S)

    def cancel(self) -> None:
        """Wake whoever waits in here, with a StateError."""
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.close()
