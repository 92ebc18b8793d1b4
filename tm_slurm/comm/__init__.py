"""Delta communication groups: a backend whose connections are replaced one by one (section 5)."""

from __future__ import annotations

from tm_slurm.comm import native as _native  # noqa: F401  (first: it says why it does not load)
from tm_slurm.comm.backend import register
from tm_slurm.comm.endpoint import UNRECORDED_TAG, Endpoint, Peer
from tm_slurm.comm.errors import CollectiveTimeout, GroupInterrupted, HandshakeRefused, PeerLost

__all__ = [
    "UNRECORDED_TAG",
    "CollectiveTimeout",
    "Endpoint",
    "GroupInterrupted",
    "HandshakeRefused",
    "Peer",
    "PeerLost",
    "register",
]
