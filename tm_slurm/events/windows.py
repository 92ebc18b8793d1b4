"""Windows: times in which Slurm keeps nodes of this job for something else, by its reservations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tm_slurm.slurm.interface import ReservationInfo


@dataclass(frozen=True, kw_only=True)
class Window:
    """`nodes` are those of the job that it covers, in the job's order; `opens` and `closes` are seconds of
    the wall clock (Unix time), as slurmctld has it."""

    name: str
    nodes: tuple[str, ...]
    opens: float
    closes: float

    @property
    def id(self) -> str:
        """The same for the same window; another for one that was put off, or for the next of a daily one."""
        return f"window/{self.name}/{self.opens:.0f}"

    def to_json(self) -> dict[str, Any]:
        """Return the window as plain JSON values."""
        return {"name": self.name, "nodes": list(self.nodes), "opens": self.opens, "closes": self.closes}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Window:
        """Read what `to_json` wrote; raises KeyError, TypeError or ValueError for anything else."""
        return cls(
            name=str(value["name"]),
            nodes=tuple(map(str, value["nodes"])),
            opens=float(value["opens"]),
            closes=float(value["closes"]),
        )


def windows_of(
    reservations: Iterable[ReservationInfo],
    *,
    nodes: Sequence[str],
    own: Iterable[str],
    cpus: Mapping[str, int],
    now: float,
    ends: float | None = None,
) -> list[Window]:
    """Return the windows over `nodes`, the job's, that are not over at `now` (Unix seconds), the first first.

    What begins at `ends` or later, when the job's time is over, does not concern it: Slurm has put the job
    before it. Else a reservation is a window unless the job runs in it (`own`: the names of its
    reservations), or never gets to its start (TIME_FLOAT), or holds only some CPUs of its nodes and is not
    for maintenance. `cpus`: how many a node has; of a reservation with a node that is not named there, the
    nodes count as held whole.
    """
    at_home = set(own)
    found = []
    for reservation in reservations:
        held = set(reservation.nodes)
        covered = tuple(node for node in nodes if node in held)
        skipped = reservation.name in at_home or "TIME_FLOAT" in reservation.flags
        beyond = reservation.end_time <= now or (ends is not None and reservation.start_time >= ends)
        if not covered or skipped or beyond or _holds_parts(reservation, cpus):
            continue
        found.append(
            Window(
                name=reservation.name,
                nodes=covered,
                opens=reservation.start_time,
                closes=reservation.end_time,
            )
        )
    return sorted(found, key=lambda window: (window.opens, window.name))


def is_for_maintenance(reservation: ReservationInfo) -> bool:
    """Whether its nodes are to be worked on, whatever else it says."""
    return "MAINT" in reservation.flags


def _holds_parts(reservation: ReservationInfo, cpus: Mapping[str, int]) -> bool:
    """Whether others may use what it leaves of its nodes: a job on them is not in its way."""
    if is_for_maintenance(reservation) or reservation.cpus is None:
        return False
    if not all(node in cpus for node in reservation.nodes):
        return False
    return reservation.cpus < sum(cpus[node] for node in reservation.nodes)
