"""What a joiner's first real step costs: cold, after identity answers, after record and replay.

    python tests/bench/bench_warmup.py [--mode NAME]

In each mode one world trains; the same rank is replaced three times, each time by a new process that comes in
another way. The first step after a switch, at the joiner and at the slowest stayer, is set against the median
of the steps before; the joiner's processor time in it against that in its later ones tells what is left to
pay however busy the machine is (`processor_ratio`), and `pause_ratio` what a pause alone costs. `null`: a
joiner cannot come in this way (DDP's buckets, pickled shapes of pipelines).

Beside them: how long a standby takes to be ready for another rank (same class, another class), bytes
recorded, and the throughput of a world that has recorded against before it did.

Writes build/bench/warmup.json after each mode; one that is not run keeps its figures from the run before.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "comm"))

import torch
import torch.distributed as dist
from gang import Gang, Member, Process, gang
from results import Parts, Result
from warmup_modes import MODES, Mode

from tm_slurm import comm
from tm_slurm.sandbox import (
    Recorder,
    Sandbox,
    find,
    forget_role,
    import_what_comes_late,
    role_class_of,
    roles_of,
    shadow_steps_of_another_role,
)

RECORDED, SHADOW, STEADY, AFTER, PAIRS, TURN = 2, 3, 12, 8, 10, 100
PATIENCE_S = 400.0
HEARD_S = 0.05
"""All processes have heard of an order by then."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, HEAP_BLOCK_BYTES = -1, -3, 1 << 25
"""mallopt(3); the largest threshold that glibc takes."""
BARS = {"first_step_ratio_max": 1.3, "promote_same_class_ms": 100.0, "promote_other_class_ms": 500.0}
"""At most."""

WAYS = ("cold", "identity", "replay")
THROUGHPUT = "throughput"
"""The part that is of no mode."""

REPEATS = {"cold": 1, "identity": 1, "replay": 3}
"""Of several replacements in one way, the one with the median ratio counts."""


def named(training: Mode) -> dict[str, Any]:
    """The training as `build` would return it."""
    return {
        "model": training.modules[0],
        "run": getattr(training, "run", None),
        "stage": getattr(training, "stage", None),
    }


Times = list[tuple[float, float]]


def timed(training: Mode, first: int, count: int) -> Times:
    """Of each step: seconds, and seconds of a processor."""
    times = []
    for step in range(first, first + count):
        began = time.perf_counter(), time.process_time()
        training.step(step)
        times.append((time.perf_counter() - began[0], time.process_time() - began[1]))
    return times


def median(times: Iterable[Times], skipped: int = 0, which: int = 0) -> float:
    """Of the steps of all ranks, without their first ones: seconds, or (1) seconds of a processor."""
    return statistics.median(step[which] for one in times for step in one[skipped:])


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def begin(cache: Path) -> None:
    """As a rank process begins."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    import_what_comes_late()


def member(me: Member, name: str, directory: Path) -> None:
    """A rank of the job from its first step on."""
    begin(directory / "compiled")
    told: list[Any] = []
    recorder = new_recorder(me, directory / "recordings", told)
    size = me.join_world(timeout_s=PATIENCE_S)
    training = MODES[name](me.rank, size, False)
    record(recorder, training, 0)
    steady = timed(training, RECORDED, STEADY)
    me.tell({"steady_s": median([steady], 2), "told": told, "peak_mb": peak_mb()})
    obey(me, training, RECORDED + STEADY)


def new_recorder(me: Member, directory: Path, told: list[Any]) -> Recorder:
    return Recorder(me.endpoint, steps=RECORDED, limit_bytes=1 << 30, directory=directory, tell=told.append)


def record(recorder: Recorder, training: Mode, first: int) -> None:
    """The next steps, recorded by the lowest rank of each role class."""
    if not recorder.is_designated(role_class_of(named(training)), dist.get_rank(), dist.get_world_size()):
        timed(training, first, RECORDED)
        return
    for step in range(first, first + RECORDED):
        recorder.begin_step()
        training.step(step)
        recorder.step_ended()
    recorder.finish().join(60)


def member_that_records_late(me: Member, directory: Path) -> tuple[Times, Times]:
    """Steps before there is a recorder, and when it is gone.

    glibc maps smaller blocks only until the first big one is freed, and steps take a few percent less time
    then: what a recording frees must not count in its favour."""
    for parameter in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
        assert ctypes.CDLL(None).mallopt(parameter, HEAP_BLOCK_BYTES) == 1
    begin(directory)
    size = me.join_world(timeout_s=PATIENCE_S)
    training = MODES["eager"](me.rank, size, False)
    timed(training, 0, STEADY)
    before = timed(training, STEADY, TURN)
    told: list[Any] = []
    record(new_recorder(me, directory, told), training, STEADY + TURN)
    assert me.rank != 0 or told[0]["kind"] == "recorded", told
    return before, timed(training, STEADY + TURN + RECORDED, TURN)


def joiner(me: Member, name: str, directory: Path, way: str, place: tuple[int, list[int]]) -> None:
    """A process that takes a rank over, having come in one of the ways. A cold one has its own cache."""
    epoch, linked = place
    begin(directory / ("compiled" if way == "replay" else f"compiled-{way}"))
    sandbox = Sandbox(me.endpoint)
    began = time.perf_counter()
    recording = find(directory / "recordings", me.rank) if way == "replay" else None
    sandbox.enter(recording)
    size = me.join_world(epoch=epoch, timeout_s=PATIENCE_S)
    training = MODES[name](me.rank, size, True)
    if way != "cold":
        for step in sandbox.shadow_steps(SHADOW):
            training.step(step)
    answers = sandbox.answers()
    warm_s = time.perf_counter() - began
    sandbox.leave()
    me.endpoint.dial(epoch=epoch, ranks=linked, timeout_s=60)
    me.tell({"warm_s": warm_s, "answered": answers.answered, "missed": answers.missed, "peak_mb": peak_mb()})
    state, step = me.hear(PATIENCE_S)
    mine = dict(training.tensors())
    with torch.no_grad():
        for key, tensor in state.items():
            if key in mine:  # a cold one has no optimizer state yet
                mine[key].copy_(tensor)
    me.tell("loaded")
    obey(me, training, step)


def obey(me: Member, training: Mode, step: int) -> None:
    while True:
        order, *rest = me.hear(PATIENCE_S)
        if order == "state":
            me.tell((training.state(), step))
        elif order == "exit":
            os._exit(0)
        elif order == "prepare":
            me.endpoint.prepare(epoch=rest[0], changes=rest[1])
            me.tell("prepared")
        elif order == "switch":
            assert me.endpoint.wait_staged(epoch=rest[0], ranks=rest[1], timeout_s=60)
            me.endpoint.switch(epoch=rest[0])
            me.tell("switched")
        elif order == "run":
            count, at = rest
            time.sleep(max(0.0, at - time.perf_counter()))
            me.tell(timed(training, step, count))
            step += count
        else:
            return


def ask(everyone: list[Process], *order: Any) -> list[Any]:
    for one in everyone:
        one.tell(order)
    return [one.hear(PATIENCE_S) for one in everyone]


def run(world: list[Process], count: int) -> list[Times]:
    """So many steps at each rank. All begin at once, as after a switch: none waits for another one
    to have heard of it."""
    return ask(world, "run", count, time.perf_counter() + HEARD_S)


def replace(members: Gang, world: list[Process], name: str, way: str, directory: Path, *, epoch: int) -> Any:
    """One replacement; the joiner is in `world` afterwards."""
    rank = MODES[name].joins
    leaver, stayers = world[rank], [one for one in world if one.rank != rank]
    linked = [one.rank for one in stayers]
    came = members.start(joiner, rank, name, directory, way, (epoch, linked), incarnation=epoch)
    table = members.table([*stayers, came])
    times = run(world, AFTER)
    before = median(times, 1)
    pause_ratio = max(one[0][0] for one in times) / before
    ask(stayers, "prepare", epoch, {rank: came.peer})
    came.tell(table)
    about = came.hear(PATIENCE_S)
    state, step = ask([leaver], "state")[0]
    ask(stayers, "switch", epoch, [rank])
    came.tell((state, step))
    assert came.hear(PATIENCE_S) == "loaded"
    leaver.tell(("exit",))
    world[rank] = came
    times = run(world, AFTER)
    steady = max(before, median(times, 2))
    first, slowest = times[rank][0][0], max(times[r][0][0] for r in linked)
    processor_ratio = times[rank][0][1] / median([times[rank]], 2, 1)
    return {
        **about,
        "steady_s": steady,
        "pause_ratio": pause_ratio,
        "first_step_s": first,
        "slowest_stayer_s": slowest,
        "first_step_ratio": max(first, slowest) / steady,
        "processor_ratio": processor_ratio,
    }


def ways_of(name: str) -> dict[str, Any]:
    kind = MODES[name]
    found: dict[str, Any] = dict.fromkeys(WAYS)
    with tempfile.TemporaryDirectory() as folder, gang() as members:
        directory = Path(folder)
        world = members.world(member, kind.ranks, name, directory)
        begun = [one.hear(PATIENCE_S) for one in world]
        told = [entry for one in begun for entry in one["told"]]
        assert told and all(entry["kind"] == "recorded" for entry in told), told
        epoch = 0
        for way in WAYS:
            if not getattr(kind, way, True):
                continue
            tries = []
            for _ in range(REPEATS[way]):
                epoch += 1
                tries.append(replace(members, world, name, way, directory, epoch=epoch))
            tries.sort(key=lambda one: one["first_step_ratio"])
            ratios = [one["first_step_ratio"] for one in tries]
            found[way] = {**tries[len(tries) // 2], "ratios": ratios}
        for one in world:
            one.tell(("end",))
        promoted = promotion(members, name, directory)
    return {
        "ranks": kind.ranks,
        "steady_s": statistics.median(one["steady_s"] for one in begun),
        "active_peak_mb": max(one["peak_mb"] for one in begun),
        "recorded_bytes": sum(entry["bytes"] for entry in told),
        "classes": len(told),
        **found,
        "promotion": promoted,
    }


# ---- being ready for another rank, without state ----


def standby(me: Member, name: str, directory: Path, turns: list[int]) -> Times:
    """Warm up for the first of `turns`, then be ready for each of the others; what each took."""
    me.hear()
    begin(directory / "compiled")
    size = MODES[name].ranks
    sandbox = Sandbox(me.endpoint)
    comm.register(me.endpoint)
    seconds: Times = []
    training: Any = None
    role: dict[str, Any] = {}
    for number, rank in enumerate(turns):
        recording = find(directory / "recordings", rank)
        began = time.perf_counter(), time.process_time()
        training = None
        if dist.is_initialized():
            forget_role(role)
        sandbox.enter(recording)
        me.endpoint.configure(rank=rank, epoch=0, term=0, peers={rank: comm.Peer("127.0.0.1", 1, 0)})
        dist.init_process_group("tm", store=dist.HashStore(), rank=rank, world_size=size)
        training = MODES[name](rank, size, True)
        role = named(training)
        steps = SHADOW if number == 0 else shadow_steps_of_another_role(role, SHADOW)
        for step in sandbox.shadow_steps(steps):
            training.step(step)
        if steps == 1:
            sandbox.rebuild_buckets(role)
        seconds.append((time.perf_counter() - began[0], time.process_time() - began[1]))
    return seconds


def promotion(members: Gang, name: str, directory: Path) -> dict[str, float | None]:
    """Milliseconds until a standby is ready for a rank of the class it is built for, and of another class it
    has been warm for."""
    classes = list(roles_of(directory / "recordings").values())
    kept = max(classes, key=len)
    others = [ranks[0] for ranks in classes if ranks is not kept]
    turns = [*others, kept[0], *(kept[i % len(kept)] for i in range(1, 6)), *others]
    one = members.start(standby, 0, name, directory, turns)
    members.table([one])
    one.tell("begin")
    seconds = one.result(PATIENCE_S)
    same = seconds[len(others) + 1 : len(others) + 6]
    other = seconds[len(others) + 6 :]
    return {
        "first_ms": seconds[0][0] * 1e3,
        "same_class_ms": median([same]) * 1e3,
        "same_class_processor_ms": median([same], which=1) * 1e3,
        "other_class_ms": max(wall for wall, _ in other) * 1e3 if other else None,
        "other_class_processor_ms": max(processor for _, processor in other) * 1e3 if other else None,
    }


# ---- what is left of recording ----


def throughput_ratio() -> dict[str, Any]:
    """Steps a second of a world that has recorded, over those of the same world before it did, in PAIRS
    worlds: no two processes are equally fast."""
    ratios, processor_ratios = [], []
    for _ in range(PAIRS):
        with tempfile.TemporaryDirectory() as folder, gang() as members:
            world = members.world(member_that_records_late, 2, Path(folder))
            before, after = zip(*(one.result(PATIENCE_S) for one in world), strict=True)
        ratios.append(median(before) / median(after))
        processor_ratios.append(median(before, which=1) / median(after, which=1))
    processor_ratio = statistics.median(processor_ratios)
    found = {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios), "pairs": PAIRS}
    return {**found, "processor_ratio": processor_ratio}


def figures(parts: Parts) -> dict[str, Any]:
    modes, throughput = modes_of(parts), parts.get(THROUGHPUT)
    ratios = {
        name: {way: mode[way] and mode[way]["first_step_ratio"] for way in WAYS}
        for name, mode in modes.items()
    }
    same = [mode["promotion"]["same_class_ms"] for mode in modes.values()]
    other = [mode["promotion"]["other_class_ms"] for mode in modes.values()]
    return {
        "first_step_ratio_max": max((one["replay"] for one in ratios.values()), default=None),
        "first_step_ratio": ratios,
        "promote_same_class_ms": max(same, default=None),
        "promote_other_class_ms": max((ms for ms in other if ms is not None), default=None),
        "recording_off_throughput_ratio": throughput and throughput["median"],
        "recorded_bytes": {name: mode["recorded_bytes"] for name, mode in modes.items()},
    }


def modes_of(parts: Parts) -> Parts:
    """Those that are measured today; what else is in the file is of none."""
    return {name: parts[name] for name in MODES if name in parts}


def show(modes: dict[str, Any]) -> None:
    heads = ("steady ms", "cold", "identity", "replay", "warm s", "recorded kB")
    print(f"{'mode':>16}", *(f"{head:>11}" for head in heads))
    for name, mode in modes.items():
        ratios = [f"{mode[way]['first_step_ratio']:.2f}" if mode[way] else "-" for way in WAYS]
        cells = [f"{mode['steady_s'] * 1e3:.1f}", *ratios, f"{mode['replay']['warm_s']:.2f}"]
        print(f"{name:>16}", *(f"{cell:>11}" for cell in [*cells, f"{mode['recorded_bytes'] / 1e3:.1f}"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=[*MODES, THROUGHPUT])
    only = parser.parse_args().mode
    # processes are forked from one that is started later; it finds the modes by this
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    result = Result("warmup", lambda parts: (figures(parts), {}), bars=BARS)
    for stray in result.parts.keys() - {*MODES, THROUGHPUT}:
        del result.parts[stray]
    runs = {**{name: partial(ways_of, name) for name in MODES}, THROUGHPUT: throughput_ratio}
    for name in runs if only is None else [only]:
        result.measure(name, runs[name])
        print(f"{name}: done", flush=True)
    show(modes_of(result.parts))
    print(json.dumps(result.figures, indent=1))
    for name, bar in BARS.items():
        value = result.figures[name]
        if value is not None:
            print(f"{name:>32} {value:8.2f}  bar {bar:g}{'  OVER' if value > bar else ''}")


if __name__ == "__main__":
    main()
