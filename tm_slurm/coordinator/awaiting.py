"""Waiting for an outcome beside tasks that should run for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def first_of(outcome: asyncio.Future[T], loops: Sequence[asyncio.Task[Any]]) -> T:
    """The outcome, once it is there; or the exception of the first of `loops` that ends before."""
    waited: set[asyncio.Future[Any]] = {outcome, *loops}
    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    if not outcome.done():
        for loop in loops:
            if loop.done():
                loop.result()
    return outcome.result()
