"""The endpoint of a process: its listener, and its links to other processes (paper, section 5).

Links belong to pairs of processes, not to groups. A replacement happens in two phases: `prepare` and `dial`
open links to the joiner beside those in use, while training goes on; `switch` puts them in place between
two steps.
"""

from __future__ import annotations

import atexit
import socket
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch  # noqa: F401  (its libraries must be loaded before the extension)

from tm_slurm.comm import _tm
from tm_slurm.comm.errors import CollectiveTimeout, GroupInterrupted, HandshakeRefused, PeerLost

UNRECORDED_TAG = _tm.UNRECORDED_TAG
"""Of point-to-point traffic that the runtime has in real steps only: it is not recorded."""

_tm.set_errors(GroupInterrupted, PeerLost, CollectiveTimeout, HandshakeRefused)


@dataclass(frozen=True)
class Peer:
    """Where the process that holds a rank listens, and which of the rank's processes it is.

    Args:
        host: numeric address or name.
        port: TCP port.
        incarnation: tells this process from every other that holds, held or will hold the rank. Which of two
            is the newer shows in the epoch, not here.
    """

    host: str
    port: int
    incarnation: int


def _numeric(host: str) -> str:
    """Resolve here, where waiting is allowed: the thread that dials must never ask a name server."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    by_preference = sorted(found, key=lambda entry: entry[0] != socket.AF_INET)
    return str(by_preference[0][4][0])


def _table(peers: Mapping[int, Peer]) -> dict[int, tuple[str, int, int]]:
    return {rank: (_numeric(peer.host), peer.port, peer.incarnation) for rank, peer in peers.items()}


class Endpoint:
    """One a process. All methods may be called from any thread; none holds Python's lock while it waits.

    Args:
        secret: the job's secret; every connection proves knowledge of it (HMAC-SHA-256, both ways).
        job: the job's name; connections of other jobs are refused.
        host: address to listen at (a port is chosen); also what others must be able to reach.
        incarnation: a number that no other process of the job has had.
        timeout_s: of collectives whose group has no timeout of its own, in seconds.
        keepalive_s: a link on which nothing is heard for this many seconds counts as lost; 0 turns this off.

    Raises:
        RuntimeError: the address cannot be listened at.
    """

    def __init__(
        self,
        *,
        secret: bytes,
        job: str,
        host: str,
        incarnation: int,
        timeout_s: float = 300.0,
        keepalive_s: float = 2.0,
    ) -> None:
        self.host = host
        self.incarnation = incarnation
        self.timeout_s = timeout_s
        self._native = _tm.Endpoint(
            secret=secret,
            job=job,
            host=_numeric(host),
            incarnation=incarnation,
            timeout_s=timeout_s,
            keepalive_s=keepalive_s,
        )
        # The threads must be gone before the interpreter is: a future's callback may want Python.
        _open.add(self)

    @property
    def port(self) -> int:
        """The TCP port that this endpoint listens at."""
        return self._native.port

    @property
    def sandbox(self) -> bool:
        """If true, every collective answers alone and at once: as the attached tape says, else as if all
        ranks were copies of this one (section 4).

        Allreduce and broadcast leave the tensor, allgather puts the own input into every slot,
        reduce-scatter takes the own slice of the own input, all-to-all returns the own input, recv leaves
        the tensor; barrier and send do nothing.
        """
        return self._native.sandbox

    @sandbox.setter
    def sandbox(self, value: bool) -> None:
        self._native.sandbox = value

    def attach(self, tape: _tm.Tape | None) -> None:
        """Have the collectives from now on taken down on `tape`, or in the sandbox answered by it; None: no
        tape, and no trace of one in the path of a collective."""
        self._native.attach(tape)

    def share_sandbox(self, ranks: Iterable[int], *, limit_s: float) -> None:
        """In the sandbox, have the calls that concern none but these ranks (this one among them) go to the
        peers that `configure` has named for them; no ranks: all are answered alone.

        Calls that are under way are answered alone. The first such call that fails, or takes longer than
        `limit_s` seconds, is answered alone, and so is all that comes later; `why_alone` says why.
        """
        self._native.share_sandbox(set(ranks), limit_s)

    @property
    def why_alone(self) -> str:
        """What has ended the calls among the ranks of `share_sandbox`; nothing if nothing has."""
        return self._native.why_alone()

    @property
    def has_tape(self) -> bool:
        """Whether a tape is attached."""
        return self._native.has_tape

    def configure(
        self, *, rank: int, epoch: int, term: int, peers: Mapping[int, Peer], absent: Iterable[int] = ()
    ) -> None:
        """Say who this process is now, and who is who at this epoch (the own rank included).

        Collectives in flight are interrupted. Links to processes that keep their rank stay open if this
        one's rank stays the same.

        Args:
            rank: global rank.
            epoch: number of the membership; grows with every replacement.
            term: the leader's term, stated in handshakes.
            peers: every rank of the job that is not absent.
            absent: ranks that take no part. Groups keep their ranks and sizes; allreduce, reduce, broadcast
                and barrier go over those present (an absent root's part falls to the lowest of them, averages
                are over all), and what needs every rank's part raises RuntimeError.
        """
        self._native.configure(rank, epoch, term, _table(peers), set(absent))

    def prepare(self, *, epoch: int, changes: Mapping[int, Peer], absent: Iterable[int] = ()) -> None:
        """Phase 1 at a stayer: from now on accept and stage links from these incarnations of these ranks.

        Returns at once and touches nothing that is in use. A second call for the same epoch replaces the
        first. `absent`: the ranks that take no part from that epoch on, as for `configure`.

        Raises:
            RuntimeError: the epoch is not after the current one.
        """
        self._native.prepare(epoch, _table(changes), set(absent))

    def dial(self, *, epoch: int, ranks: Sequence[int], timeout_s: float) -> None:
        """Phase 1 at a joiner, after `configure` for the new epoch: open links to these ranks, which stage
        them.

        Ranks that are not prepared yet are tried again until the timeout.

        Raises:
            HandshakeRefused: not all links could be opened; names the first missing rank, its address and
            why.
        """
        self._native.dial(epoch, list(ranks), timeout_s)

    def wait_staged(self, *, epoch: int, ranks: Sequence[int], timeout_s: float) -> bool:
        """Wait until links from all these ranks are staged; False on timeout or if the epoch is not
        prepared."""
        return self._native.wait_staged(epoch, list(ranks), timeout_s)

    def cancel(self, *, epoch: int) -> None:
        """Drop what `prepare` staged for this epoch."""
        self._native.cancel(epoch)

    def switch(self, *, epoch: int) -> None:
        """Phase 2: staged links take the place of the old ones, and the peers of `prepare` become current.

        Old links are closed by another thread. Collectives in flight are interrupted. Legal with nothing
        staged: links are then opened on first use. Switching to the current epoch does nothing.

        Raises:
            RuntimeError: the epoch is before the current one.
        """
        self._native.switch(epoch)

    def interrupt(self, *, epoch: int) -> None:
        """Make every collective, in flight or posted later, raise GroupInterrupted until a switch beyond
        `epoch`.

        An epoch before the current one is old news and does nothing.
        """
        self._native.interrupt(epoch)

    def update(self, *, epoch: int, peers: Mapping[int, Peer]) -> None:
        """Take the addresses that ranks have since `epoch`, unless newer ones are known.

        An open link to the same incarnation stays.
        """
        self._native.update(epoch, _table(peers))

    def linked(self) -> list[int]:
        """Ranks to which a link is open now."""
        return self._native.linked()

    def stats(self) -> dict[str, int]:
        """Count bytes, frames, links and refused handshakes by reason, since the endpoint was made.

        Two figures are of this moment: `operations_in_flight` (collectives that wait for somebody) and
        `oldest_operation_ms` (for how long the oldest of them has; 0 when there is none).
        `in_collectives_us`: for how long at least one was under way, all times together.
        """
        return self._native.stats()

    def close(self) -> None:
        """Close all links and end the threads. Collectives in flight fail; closing twice is harmless."""
        self._native.close()
        _open.discard(self)


_open: weakref.WeakSet[Endpoint] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for endpoint in list(_open):
        endpoint.close()
