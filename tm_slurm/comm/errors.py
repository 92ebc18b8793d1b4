"""What can go wrong in a collective, raised out of `work.wait()`, a future, or `backward()`."""

from __future__ import annotations

import re


class GroupInterrupted(RuntimeError):
    """The endpoint was interrupted, or has switched to another epoch, while the collective was in flight."""


class PeerLost(RuntimeError):
    """The link to a rank that the collective needs is broken, silent or refused.

    Attributes:
        rank: the global rank at the other end.
    """

    def __init__(self, message: str = "", rank: int | None = None) -> None:
        super().__init__(message)
        if rank is None:
            found = re.search(r"rank (\d+)", message)  # built in C++ from the message alone
            rank = int(found.group(1)) if found else -1
        self.rank = rank


class CollectiveTimeout(RuntimeError):
    """A collective took longer than its group's timeout; the message names the ranks that it waited for."""


class HandshakeRefused(RuntimeError):
    """`Endpoint.dial` could not open a link: refused for good, or not answered in time."""
