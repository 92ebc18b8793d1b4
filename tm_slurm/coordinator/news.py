"""What every rank is to hear sometime soon: it goes with the next sign of life to its agent, so that a move
sends nothing of its own to those that took no part in it (design "Coordinator").

Each piece has a number, the same for every leader, since all of them replay one journal. An agent says
which it has heard last when it connects; on a connection what was sent arrives.
"""

from __future__ import annotations

from collections import deque
from typing import Any

KEPT = 4096
"""Pieces kept for agents that connect again."""

Message = dict[str, Any]


class News:
    """Of one start of the job."""

    def __init__(self) -> None:
        self.count = 0
        """the number of the newest piece"""
        self._kept: deque[tuple[int, Message]] = deque(maxlen=KEPT)

    def add(self, message: Message) -> None:
        """A further piece."""
        self.count += 1
        self._kept.append((self.count, message))

    def after(self, number: int) -> list[tuple[int, Message]]:
        """The pieces that came after this one, the oldest first."""
        new: list[tuple[int, Message]] = []
        for piece in reversed(self._kept):
            if piece[0] <= number:
                break
            new.append(piece)
        return new[::-1]
