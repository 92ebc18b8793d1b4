"""The control channel: length-prefixed JSON between agents, the leader and rank processes, and who may speak
on it."""

from tm_slurm.control.channel import Channel, ChannelClosed, accept, connect
from tm_slurm.control.frames import FrameSocket
from tm_slurm.control.handshake import HandshakeRefused, accept_socket, connect_socket, read_secret
from tm_slurm.control.listening import listening_at

__all__ = [
    "Channel",
    "ChannelClosed",
    "FrameSocket",
    "HandshakeRefused",
    "accept",
    "accept_socket",
    "connect",
    "connect_socket",
    "listening_at",
    "read_secret",
]
