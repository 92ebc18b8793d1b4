"""What goes wrong with a local cluster, in one line for people."""

from __future__ import annotations


class LocalClusterError(RuntimeError):
    """A local cluster cannot do what was asked; the message is one line: expected, found, what to do."""
