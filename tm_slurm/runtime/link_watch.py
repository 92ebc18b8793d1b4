"""Links that end while no collective waits for them: a step may be long, and a death should be heard soon."""

from __future__ import annotations

from tm_slurm.comm import Endpoint


class LinkWatch:
    """Looks at an endpoint's links from time to time."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._epoch = 0
        self._linked: set[int] = set()

    def look(self) -> tuple[int, list[int]]:
        """The epoch, and the ranks to which a link has ended since the last look at this same epoch. Whether
        they were closed or broke, only others can tell; a link that a switch has replaced is none of them."""
        epoch = self._endpoint.stats()["epoch"]
        linked = set(self._endpoint.linked())
        if self._endpoint.stats()["epoch"] != epoch:
            return epoch, []  # in the middle of a switch: the next look tells
        gone = self._linked - linked if epoch == self._epoch else set()
        self._epoch, self._linked = epoch, linked
        return epoch, sorted(gone)
