"""Sockets that others connect to."""

from __future__ import annotations

import socket


def listening_at(host: str, *, backlog: int = 128) -> socket.socket:
    """A TCP socket that takes connections at an address of this machine, IPv4 or IPv6, on a free port.
    OSError if the address is not one of its own."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=backlog)
