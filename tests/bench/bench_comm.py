"""Collectives of backend "tm" against gloo, replacement against new_group, and interrupt latency.

    python tests/bench/bench_comm.py [--part collectives|replacement|interrupt] [--ranks 2,4]

Ours and gloo's run in the same processes, alternating; a ratio is the median over the pairs of ours ÷ gloo's.
Writes build/bench/comm.json; a part that is not run keeps its figures from the run before.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "comm"))

import torch
import torch.distributed as dist
from gang import Member, gang
from one_process import all_reduce, backend, peer, world

from tm_slurm import comm

RESULT = Path(__file__).parents[2] / "build" / "bench" / "comm.json"
ALLREDUCE_BYTES = [
    4,
    1 << 10,
    4 << 10,
    16 << 10,
    64 << 10,
    256 << 10,
    1 << 20,
    4 << 20,
    16 << 20,
    64 << 20,
    256 << 20,
]
OTHER_BYTES = [4, 4 << 10, 64 << 10, 1 << 20, 16 << 20]
OTHERS = ["broadcast", "all_gather", "reduce_scatter", "all_to_all", "send_recv"]
PAIRS = 5


def gloo_beside(rank: int, size: int, directory: str) -> dist.ProcessGroup:
    store = dist.FileStore(os.path.join(directory, "store"), size)
    group = dist.ProcessGroup(store, rank, size)
    backend = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60))
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    known = dist.distributed_c10d._world
    known.pg_map[group] = ("gloo", None)
    known.pg_names[group] = "gloo-beside"
    known.pg_group_ranks[group] = {other: other for other in range(size)}
    known.pg_backend_config[group] = "cpu:gloo"
    return group


def call(collective: str, nbytes: int, rank: int, size: int) -> Callable[[Any], None]:
    """One collective that moves `nbytes` a rank, as a function of the group."""
    count = max(1, nbytes // 4)
    whole = torch.ones(count)
    part = max(1, count // size)
    pieces, piece = torch.ones(part * size), torch.ones(part)
    if collective == "all_reduce":
        return lambda group: dist.all_reduce(whole, group=group)
    if collective == "broadcast":
        return lambda group: dist.broadcast(whole, 0, group=group)
    if collective == "all_gather":
        return lambda group: dist.all_gather_into_tensor(pieces, piece, group=group)
    if collective == "reduce_scatter":
        return lambda group: dist.reduce_scatter_tensor(piece, pieces, group=group)
    if collective == "all_to_all":
        received = torch.empty_like(pieces)
        return lambda group: dist.all_to_all_single(received, pieces, group=group)

    def send_recv(group: Any) -> None:
        """There and back between ranks in pairs."""
        other = rank ^ 1
        if other >= size:
            return
        if rank < other:
            dist.send(whole, other, group=group)
            dist.recv(whole, other, group=group)
        else:
            dist.recv(whole, other, group=group)
            dist.send(whole, other, group=group)

    return send_recv


def measure(me: Member, directory: str, plan: list[tuple[str, int]]) -> list[dict[str, Any]]:
    size = me.join_world(timeout_s=120)
    gloo = gloo_beside(me.rank, size, directory)
    rows = []
    for collective, nbytes in plan:
        run = call(collective, nbytes, me.rank, size)
        repeats = torch.tensor([0])
        for group in (None, gloo):
            run(group)
        start = time.perf_counter()
        run(gloo)
        if me.rank == 0:
            repeats[0] = int(min(200, max(1, 0.05 / (time.perf_counter() - start))))
        dist.broadcast(repeats, 0)
        times: dict[str, list[float]] = {"tm": [], "gloo": []}
        for _ in range(PAIRS):
            for name, group in (("tm", None), ("gloo", gloo)):
                dist.barrier()
                start = time.perf_counter()
                for _ in range(int(repeats)):
                    run(group)
                dist.barrier()
                times[name].append((time.perf_counter() - start) / int(repeats))
        ratios = [ours / theirs for ours, theirs in zip(times["tm"], times["gloo"], strict=True)]
        rows.append(
            {
                "collective": collective,
                "ranks": size,
                "bytes": nbytes,
                "tm_ms": statistics.median(times["tm"]) * 1e3,
                "gloo_ms": statistics.median(times["gloo"]) * 1e3,
                "ratio": statistics.median(ratios),
                "ratio_min": min(ratios),
                "ratio_max": max(ratios),
            }
        )
    return rows


def collectives(ranks: list[int], largest: int) -> list[dict[str, Any]]:
    plan = [("all_reduce", nbytes) for nbytes in ALLREDUCE_BYTES if nbytes <= largest]
    plan += [(collective, nbytes) for collective in OTHERS for nbytes in OTHER_BYTES if nbytes <= largest]
    rows = []
    for size in ranks:
        with gang() as members, tempfile.TemporaryDirectory() as directory:
            world = members.world(measure, size, directory, plan)
            for row in next(iter([member.result(600) for member in world])):
                rows.append(row)
                print(
                    f"{row['collective']:>15} {size:2} ranks {row['bytes']:>10} B  tm {row['tm_ms']:9.3f} ms"
                    f"  gloo {row['gloo_ms']:9.3f} ms  ratio {row['ratio']:5.2f}"
                    f" ({row['ratio_min']:.2f} to {row['ratio_max']:.2f})",
                    flush=True,
                )
    return rows


def replacement_times(size: int, groups: int, rounds: int = 15) -> dict[str, Any]:
    """Switch and resume at the slowest stayer, in milliseconds; all endpoints live in this process."""
    slowest = []
    before = resident_kb()
    with world(size, keepalive_s=0) as w:
        others = [w.group(w.ranks, f"group{index}") for index in range(groups - 1)]
        for of in [w.backends, *others]:
            all_reduce(of, 10)
        all_reduce(w.backends, 10_000)
        for epoch in range(1, rounds + 1):
            rank = epoch % size
            joiner = w.joiner(rank, epoch)
            linked = w.endpoints[rank].linked()
            for other, of in enumerate(w.endpoints):
                if other != rank:
                    of.prepare(epoch=epoch, changes={rank: peer(joiner)})
            joiner.dial(epoch=epoch, ranks=linked, timeout_s=20)
            times = []
            for other in linked:
                assert w.endpoints[other].wait_staged(epoch=epoch, ranks=[rank], timeout_s=20)
            time.sleep(0.02)  # preparation is over; its threads share this process's cores
            for other, of in enumerate(w.endpoints):
                if other == rank:
                    continue
                start = time.perf_counter()
                of.switch(epoch=epoch)
                times.append(time.perf_counter() - start)
            slowest.append(max(times) * 1e3)
            w.endpoints[rank].close()
            w.endpoints[rank] = joiner
            w.backends[rank] = backend(joiner, rank, w.ranks, "world")
            for index, of in enumerate(others):
                of[rank] = backend(joiner, rank, w.ranks, f"group{index}")
            for of in [w.backends, *others]:
                all_reduce(of, 10)
        sockets = max(len(of.linked()) for of in w.endpoints)
        memory = (resident_kb() - before) / size
    return {
        "ranks": size,
        "groups": groups,
        "ms": statistics.median(slowest),
        "ms_max": max(slowest),
        "links": sockets,
        "memory_kb": memory,
    }


def resident_kb() -> float:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024


def makes_groups(me: Member, directory: str) -> float:
    """A gloo `new_group`, warm, in milliseconds."""
    size = len(me.hear())
    store = dist.FileStore(os.path.join(directory, "store"), size)
    dist.init_process_group("gloo", store=store, rank=me.rank, world_size=size)
    times = []
    for _ in range(4):
        dist.barrier()
        start = time.perf_counter()
        dist.new_group()
        dist.barrier()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]) * 1e3


def replacement() -> dict[str, Any]:
    rows = []
    for size in (4, 8, 16, 32, 64):
        for groups in (1, 4, 16):
            row = replacement_times(size, groups)
            rows.append(row)
            print(
                f"replace: {size:2} ranks {groups:2} groups  median {row['ms']:.3f} ms"
                f"  max {row['ms_max']:.3f} ms"
                f"  links a rank ≤ {row['links']}  memory a rank {row['memory_kb']:.0f} kB",
                flush=True,
            )
    with gang() as members, tempfile.TemporaryDirectory() as directory:
        ranks = members.world(makes_groups, 32, directory)
        new_group_ms = max(member.result(120) for member in ranks)
    print(f"new_group (gloo) at 32 ranks: {new_group_ms:.1f} ms", flush=True)
    return {"rows": rows, "new_group_32_ms": new_group_ms}


def is_interrupted(me: Member) -> float:
    size = me.join_world(timeout_s=120)
    tensor = torch.ones(16 << 20)
    dist.barrier()
    if me.rank == size - 1:
        me.tell("freeze me")
        threading.Event().wait(60)
    work = dist.all_reduce(tensor, async_op=True)
    me.tell("in flight")
    me.hear()
    start = time.perf_counter()
    me.endpoint.interrupt(epoch=0)
    try:
        work.wait()
    except comm.GroupInterrupted:
        return (time.perf_counter() - start) * 1e3
    raise AssertionError("not interrupted")


def interrupt(size: int = 32) -> dict[str, Any]:
    with gang() as members:
        world = members.world(is_interrupted, size, keepalive_s=0.0)
        assert world[-1].hear(60) == "freeze me"
        world[-1].freeze()
        for member in world[:-1]:
            member.hear(60)
        time.sleep(2)
        for member in world[:-1]:
            member.tell("interrupt")
        times = [member.result(60) for member in world[:-1]]
        world[-1].kill()
    print(
        f"interrupt: {size} ranks, 64 MB in flight, one frozen: median {statistics.median(times):.3f} ms"
        f"  max {max(times):.3f} ms",
        flush=True,
    )
    return {"ranks": size, "ms_median": statistics.median(times), "ms_max": max(times)}


def figures(parts: dict[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    rows = parts.get("collectives", [])
    judged = [row for row in rows if row["ranks"] <= 4]
    if judged:
        found["allreduce_ratio_gloo_median"] = statistics.median(
            row["ratio"] for row in judged if row["collective"] == "all_reduce"
        )
        found["others_ratio_gloo_median_max"] = max(
            statistics.median(row["ratio"] for row in judged if row["collective"] == collective)
            for collective in OTHERS
        )
        found["any_ratio_gloo_max"] = max(row["ratio"] for row in rows)
    if "replacement" in parts:
        medians = [row["ms"] for row in parts["replacement"]["rows"]]
        found["replace_ms_median_max"] = max(medians)
        found["replace_spread"] = max(medians) / min(medians)
        at_32 = max(row["ms"] for row in parts["replacement"]["rows"] if row["ranks"] == 32)
        found["links_a_rank_max"] = max(row["links"] for row in parts["replacement"]["rows"])
        found["memory_a_rank_kb_max"] = max(row["memory_kb"] for row in parts["replacement"]["rows"])
        found["new_group_over_replace_32"] = parts["replacement"]["new_group_32_ms"] / at_32
    if "interrupt" in parts:
        found["interrupt_ms_max"] = parts["interrupt"]["ms_max"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=["collectives", "replacement", "interrupt"])
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--largest", type=int, default=256 << 20)
    arguments = parser.parse_args()
    parts = json.loads(RESULT.read_text())["parts"] if RESULT.exists() else {}
    if arguments.part in (None, "collectives"):
        ranks = [int(size) for size in arguments.ranks.split(",")]
        kept = [row for row in parts.get("collectives", []) if row["ranks"] not in ranks]
        parts["collectives"] = kept + collectives(ranks, arguments.largest)
    if arguments.part in (None, "replacement"):
        parts["replacement"] = replacement()
    if arguments.part in (None, "interrupt"):
        parts["interrupt"] = interrupt()
    result = {
        "name": "comm",
        "machine": {"cpus": os.cpu_count(), "kernel": platform.release(), "processor": platform.machine()},
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "figures": figures(parts),
        "parts": parts,
    }
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    for name, value in result["figures"].items():
        print(f"{name:>32} {value:.3f}")


if __name__ == "__main__":
    main()
