"""Whether an agent whose connection has closed is there at all: its node itself knows."""

from __future__ import annotations

import asyncio


async def nobody_listens(host: str, port: int, timeout_s: float) -> bool:
    """Whether the host says that nothing listens at that TCP port. A host that is silent for `timeout_s`
    seconds, or is not reached, says nothing about the process either."""
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), timeout_s)
    except ConnectionRefusedError:
        return True
    except (OSError, asyncio.TimeoutError):
        return False
    writer.close()
    return False
