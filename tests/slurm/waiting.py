"""Waiting for something to become true, by looking and never by a fixed time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(look: Callable[[], T], *, timeout_s: float = 20.0) -> T:
    """What `look` returns as soon as that is true."""
    deadline = time.monotonic() + timeout_s
    while not (found := look()):
        assert time.monotonic() < deadline, f"{look} was never true within {timeout_s:g} s: last {found!r}"
        time.sleep(0.02)
    return found
