"""How the cost of an interruption grows: of a planned move with ranks, leavers at once, the size of the state
and process groups, and on slower links; of a rank's death with ranks and the size of the state (parts of
bench_downtime.py). Nodes of real jobs are drained by `scontrol`, and resumed.

A step of these jobs waits 0.1 s as for a device and computes next to nothing, so that what is measured is the
switch. Downtime is the job's own figure, by the design's definition.

ranks      2, 4, 8 and 16 ranks with 64 MB each, and a standby; drains, and deaths of a rank's process. CPU
           over-subscription is taken out by having it the same at every size: the jobs of 2, 4 and 8 ranks
           run side by side (14 ranks, 3 standbys), then the job of 16 alone (and 1 standby): 17 processes
           on the same processors each time. No figure is divided by anything. What is left speaks against
           us: the 16 come to a step's end together, the ranks of three jobs do not. `crowding` (how much
           longer than its processor time a fixed piece of computing takes just before each interruption)
           says how equal it was.
leavers    8 ranks and 4 standbys; 1, 2 or 4 nodes are drained by one command, in turn: first with links that
           are not what a move waits for, then with slow ones, each node's its own. Then the processes of 1, 2
           or 4 ranks are killed at once; a rank and both neighbours that keep its private state never are.
sizes      2 ranks; states of 1 MB to 1 GB a rank. The floor: the same bytes, at the rate that raw sockets
           had just before, from the same node to the same node, while the job trained. Then deaths of a
           rank's process, whose successor gets the state from the other rank.
bandwidth  2 ranks with 64 MB; no node sends faster than 0.05 to 1 GB/s (`tc`), the raw sockets neither.
groups     4 ranks with 1, 4 and 16 process groups, all in use in every step.

Where a part says nothing of its state, it has 1 MB. A downtime is the difference of two steps' times: how
much these differ by themselves is kept with each (`step_spread_s`), and growth_figures says what can be told
apart.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from growing_job import GrowingJob, Row
from growth_figures import BARS, figures, limit_s
from raw_link import RawLink, shaped

from tm_slurm.localcluster import LocalCluster

SIDE_BY_SIDE = ((2, 4, 8), (16,))
"""Ranks of the jobs that run at the same time; with a standby for each job there are 17 processes each
time."""

OVER_SUBSCRIPTION = (
    "the same at every size: 17 processes, of the jobs of 2, 4 and 8 ranks side by side, or of the job of 16;"
    " nothing is divided; crowding_by_ranks is the wall time of a fixed piece of computing over its CPU time"
)
RANKS_WITH_LEAVERS, LEAVERS = 8, (1, 2, 4)
APART = RANKS_WITH_LEAVERS // max(LEAVERS)
"""From one to the next: a rank's private state is kept by its next two neighbours, of whom one must live."""

SLOW_GB_S = 0.01
"""At which a state of 1 MB takes a tenth of a second."""
SIZES = (1 << 20, 16 << 20, 256 << 20, 1 << 30)
GB_S = (0.05, 0.1, 0.25, 0.5, 1.0)
STATE_BYTES = 64 << 20
"""Of the parts `ranks` and `bandwidth`."""

RANKS_WITH_GROUPS, GROUPS = 4, (1, 4, 16)
NODES = {
    "ranks": max(sum(sizes) + len(sizes) for sizes in SIDE_BY_SIDE),
    "leavers": RANKS_WITH_LEAVERS + max(LEAVERS),
    "sizes": 3,
    "bandwidth": 3,
    "groups": RANKS_WITH_GROUPS + 1,
}
PARTS = tuple(NODES)
RAW_TRANSFERS = 2
"""Before each move; the faster one counts."""


@contextlib.contextmanager
def in_order_afterwards(cluster: LocalCluster) -> Iterator[None]:
    """Jobs that are submitted inside have ended behind it, and all nodes are idle."""
    try:
        yield
    finally:
        cluster.reset()


def ranks(cluster: LocalCluster, directory: Path, repeat: int) -> list[Row]:
    rows = []
    for sizes in SIDE_BY_SIDE:
        with in_order_afterwards(cluster):
            jobs = [
                GrowingJob(cluster, directory / str(size), ranks=size, state_bytes=STATE_BYTES)
                for size in sizes
            ]
            for kind in ("drain", "process_death"):
                for number in range(repeat):
                    for job in jobs:
                        for each in jobs:
                            each.calm()
                        rank = number % job.ranks
                        row = job.drain([job.seats()[rank]]) if kind == "drain" else job.lose([rank])
                        rows.append(shown({"ranks": job.ranks, **row}))
    return rows


def leavers(cluster: LocalCluster, directory: Path, repeat: int) -> list[Row]:
    rows = []
    with in_order_afterwards(cluster):
        job = GrowingJob(cluster, directory, ranks=RANKS_WITH_LEAVERS, standbys=max(LEAVERS))

        def in_turn() -> Iterator[tuple[int, list[int]]]:
            """How many leave, and which ranks, each time when all is calm."""
            for number in range(repeat):
                for count in LEAVERS:
                    job.calm()
                    yield count, [(number + APART * n) % job.ranks for n in range(count)]

        for gb_s in (None, SLOW_GB_S):
            links = shaped(cluster, gb_s * 1e9) if gb_s is not None else contextlib.nullcontext()
            with links:
                for count, leaving in in_turn():
                    nodes = [job.seats()[rank] for rank in leaving]
                    rows.append(shown({"leavers": count, "gb_s": gb_s, **job.drain(nodes)}))
        for count, dying in in_turn():
            rows.append(shown({"leavers": count, "gb_s": None, **job.lose(dying)}))
    return rows


def sizes(cluster: LocalCluster, directory: Path, repeat: int) -> list[Row]:
    rows = []
    for size in SIZES:
        with in_order_afterwards(cluster):
            job = GrowingJob(cluster, directory / str(size), ranks=2, state_bytes=size)
            with back_and_forth(cluster, job) as move:
                rows += [shown({"state_bytes": size, **move(size)}) for _ in range(repeat)]
                for number in range(repeat):
                    job.calm()
                    rows.append(shown({"state_bytes": size, **job.lose([number % job.ranks])}))
    return rows


def bandwidth(cluster: LocalCluster, directory: Path, repeat: int) -> list[Row]:
    rows = []
    with in_order_afterwards(cluster):
        job = GrowingJob(cluster, directory, ranks=2, state_bytes=STATE_BYTES)
        with back_and_forth(cluster, job) as move:
            for gb_s in GB_S:
                with shaped(cluster, gb_s * 1e9):
                    rows += [shown({"gb_s": gb_s, **move(STATE_BYTES)}) for _ in range(repeat)]
    return rows


def groups(cluster: LocalCluster, directory: Path, repeat: int) -> list[Row]:
    rows = []
    for count in GROUPS:
        with in_order_afterwards(cluster):
            job = GrowingJob(cluster, directory / str(count), ranks=RANKS_WITH_GROUPS, groups=count)
            for number in range(repeat):
                job.calm()
                row = job.drain([job.seats()[number % job.ranks]])
                rows.append(shown({"groups": count, **row}))
    return rows


@contextlib.contextmanager
def back_and_forth(cluster: LocalCluster, job: GrowingJob) -> Iterator[Callable[[int], Row]]:
    """Moves of a rank between two nodes, with the floor of each: raw sockets go the same way just before."""
    job.calm()
    nodes = [job.seats()[0], job.reserve()[0]]
    with RawLink(cluster, nodes) as raw:

        def move(total_bytes: int) -> Row:
            job.calm()
            leaver = next(node for node in nodes if node in job.seats())
            joiner = next(node for node in nodes if node != leaver)
            bytes_s = max(raw.bytes_s(leaver, joiner, total_bytes) for _ in range(RAW_TRANSFERS))
            row = job.drain([leaver])
            if row["joiners"] != [joiner]:
                raise AssertionError(f"expected a move to {joiner}, found one to {row['joiners']}")
            floor_s = row["bytes"] / bytes_s
            return {**row, "raw_bytes_s": bytes_s, "floor_s": floor_s, "limit_s": limit_s(floor_s)}

        yield move


MEASURES: dict[str, Callable[[LocalCluster, Path, int], list[Row]]] = {
    "ranks": ranks,
    "leavers": leavers,
    "sizes": sizes,
    "bandwidth": bandwidth,
    "groups": groups,
}


@contextlib.contextmanager
def growing(parts: Sequence[str], repeat: int) -> Iterator[Callable[[str], list[Row]]]:
    """What measures one of these parts, on one cluster that has nodes for all of them: its rows."""
    nodes = max(NODES[part] for part in parts)
    with (
        LocalCluster(nodes=nodes, mode="namespaces", name="bench-growth") as cluster,
        tempfile.TemporaryDirectory(prefix="tm-slurm-bench-") as jobs,
    ):
        yield lambda part: MEASURES[part](cluster, Path(jobs) / part, repeat)


def shown(row: Row) -> Row:
    name, size = next(iter(row.items()))
    words = [f"{name} {size:>10} {row['kind']:>13}  downtime {row['downtime_s']:7.4f} s"]
    words += [f"step {row['steady_step_s']:.4f} s", f"crowding {row['crowding']:.2f}"]
    if "floor_s" in row:
        words += [f"floor {row['floor_s']:.4f} s", f"limit {row['limit_s']:.4f} s"]
        words.append(f"raw {row['raw_bytes_s'] / 1e9:.3f} GB/s")
    print("  ".join(words), flush=True)
    return row


def table(planned: dict[str, list[Row]]) -> None:
    """The figures that are one for each size, a line each."""
    found: dict[str, Any] = figures(planned)
    for name, value in found.items():
        if isinstance(value, dict):
            print(f"{name:>42} " + "  ".join(f"{size}: {seconds:.4f}" for size, seconds in value.items()))
        elif name not in BARS:
            print(f"{name:>42} {value:.4f}")
