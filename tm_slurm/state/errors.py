"""The exceptions of this package."""

from __future__ import annotations


class StateError(RuntimeError):
    """State could not be captured, moved or restored. The message names where, and what to do."""


class StateRefused(StateError):
    """The other side of a transfer said no; the message has its reason."""
