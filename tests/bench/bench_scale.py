"""The coordinator of a large job: 64 to 16,384 nodes, simulated, over real sockets.

    python tests/bench/bench_scale.py [--sizes 64,1024,4096,16384] [--part nodes|decisions|journal|month]

The leader is the real one (decisions, journal, leadership, connections) in a process of its own; the nodes
are agents of one light process that speak the real protocol, each over a socket of its own
(light_agents.py). A node has one rank; the ranks are replicas of each other, and have links to the
neighbours of a ring and at distances of powers of two. No Slurm: nodes are not polled.

move_ms       from sending the event until the leader has written that the move is over; the ranks answer at
              once
affected_ms   the same until the last affected rank has been told
messages      what went over the wire for one leaver, heartbeats and signs of life not counted; these carry
              the news of it to all others (their bytes are under `alive`)
cores         processor seconds of the leader a second, with heartbeats as often as in a job of the default
              config (where it does not keep up with these, so many times more), and with reading
              what Slurm tells of all nodes as often as a leader asks for that
longest_silence_s  of the leader towards any agent while a rack leaves: more than keepalive_s, and the agent
              would have left it
takeover_s    from killing the leader until the next one, which stands back as a standby's agent does, has
              replayed the journal and leads; `all_back_s`: until all agents have come to it.
              `takeover_after_a_day_s`: with the journal of a day instead, in which nodes fail as often as is
              published

Beside that a month's journal, replayed; and a simulated month of 64K GPUs (scale_month.py). Writes
build/bench/scale.json; a part that is not run keeps its figures from the run before.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import scale_journal
import scale_month
from figures_record import stamp
from results import Result
from scale_job import POLICY, STEP_S, ScaleJob

from tm_slurm.coordinator.slurm_side import pause_s
from tm_slurm.slurm.scontrol_text import parse_nodes

SIZES = (64, 1024, 4096, 16384)
RACK = 64
MOVES = 9
DUPLICATES = 1000
STEADY_S = 20.0
POLL_INTERVAL_S = 1.0
SCONTROL_SAID = Path(__file__).parents[1] / "unit" / "golden" / "scontrol_nodes_resumed.txt"
SPARE_DESCRIPTORS = 64
JOURNALS = ((1024, 30.0), (16384, 1.0))
"""Nodes, and days of their journal."""

UNCOUNTED = frozenset({"beat", "alive", "led", "news"})
BARS = {
    "move_ms_16384": 250.0,
    "messages_16384_over_64": 2.0,
    "coordinator_rss_mb": 1024.0,
    "coordinator_cores": 1.0,
    "takeover_s": POLICY.lease_s + 1.0,
    "takeover_after_a_day_s": POLICY.lease_s + 1.0,
    "longest_silence_s": POLICY.keepalive_s,
}


@contextmanager
def a_job(active: int, standbys: int) -> Iterator[ScaleJob]:
    """A job that has started, in a directory of its own."""
    with tempfile.TemporaryDirectory(prefix="tm-slurm-scale-") as directory:
        job = ScaleJob(Path(directory) / "job", active, standbys)
        try:
            yield job
        finally:
            job.end()


def one_move(job: ScaleJob, node: str) -> dict[str, Any]:
    """A node is drained: how long it took, and what was said."""
    job.until_calm()
    job.agents.ask(do="forget")
    before = len(job.notes("moved"))
    at = job.event("drain", node)
    moved = job.until(f"the move off {node}", lambda: job.notes("moved")[before:])[0]
    job.until(f"the end of {node}", lambda: any(e["node"] == node for e in job.notes("release_refused")))
    said = job.agents.ask(do="report")
    kinds = {
        kind: {"messages": said[way][kind], "bytes": said[f"{way}_bytes"][kind], "way": way}
        for way in ("heard", "said")
        for kind in said[way]
        if kind not in UNCOUNTED
    }
    return {
        "node": node,
        "move_ms": (max(moved["at"], said["affected_at"]) - at) * 1e3,
        "affected_ms": (said["affected_at"] - at) * 1e3,
        "messages": sum(kind["messages"] for kind in kinds.values()),
        "bytes": sum(kind["bytes"] for kind in kinds.values()),
        "kinds": kinds,
    }


def steady(job: ScaleJob, seconds: float) -> dict[str, Any]:
    """Heartbeats and nothing else."""
    job.until_calm()
    before, cpu_before, at = job.agents.ask(do="report"), job.leader.cpu_s(), time.monotonic()
    time.sleep(seconds)
    after, cpu_s, took_s = job.agents.ask(do="report"), job.leader.cpu_s(), time.monotonic() - at
    said = after["said"]["beat"] - before["said"].get("beat", 0)
    heard = after["heard"]["alive"] - before["heard"].get("alive", 0)
    wanted = (job.active + job.standbys) * took_s / job.heartbeat_s
    return {
        "cores": (cpu_s - cpu_before) / took_s,
        "beats_per_s": said / took_s,
        "alive_per_s": heard / took_s,
        "beats_over_wanted": said / wanted,
        "alive_over_wanted": heard / wanted,
        "beat_bytes_per_s": (after["said_bytes"]["beat"] - before["said_bytes"].get("beat", 0)) / took_s,
        "agents_cores": (after["cpu_s"] - before["cpu_s"]) / took_s,
        "load": os.getloadavg()[0],
    }


def polling(nodes: int) -> dict[str, Any]:
    """What it costs to read what scontrol says of all nodes, as often as a leader asks for it."""
    record = SCONTROL_SAID.read_text().splitlines()[0]
    name = record.split()[0].removeprefix("NodeName=")
    text = "\n".join(record.replace(name, f"n{number:05d}") for number in range(nodes))
    before = time.process_time()
    assert len(parse_nodes(text)) == nodes
    cpu_s = time.process_time() - before
    every_s = pause_s(POLL_INTERVAL_S, nodes)
    return {"read_cpu_s": cpu_s, "every_s": every_s, "cores": cpu_s / every_s}


def duplicates(job: ScaleJob, node: str) -> dict[str, Any]:
    """One fact, told by 1,000 signed events."""
    job.until_calm()
    before = len(job.notes("moved"))
    at, answered_at = job.signed(DUPLICATES, lambda number: node)
    moved = job.until("the one move", lambda: job.notes("moved")[before:])[0]
    job.until_calm()
    events = [entry for entry in job.notes("event_drain") if entry["node"] == node]
    if len(events) != 1 or len(job.notes("moved")) != before + 1:
        raise AssertionError(f"1,000 events of one fact were taken as {len(events)}")
    return {"answered_s": answered_at - at, "moved_s": moved["at"] - at}


def rack(job: ScaleJob, nodes: list[str]) -> dict[str, Any]:
    """Many nodes drained in one moment: as the plugin has it, each is told of on a connection of its own."""
    job.until_calm()
    job.agents.ask(do="forget")
    before = {what: len(job.notes(what)) for what in ("moved", "release_refused")}
    at, answered_at = job.signed(len(nodes), lambda number: nodes[number], connections=len(nodes))
    job.until(
        "all nodes left", lambda: len(job.notes("release_refused")) >= before["release_refused"] + len(nodes)
    )
    moves = job.notes("moved")[before["moved"] :]
    time.sleep(2 * job.heartbeat_s)  # in which every other agent should be heard from, too
    return {
        "longest_silence_s": job.agents.ask(do="report")["longest_silence_s"],
        "nodes": len(nodes),
        "epochs": len(moves),
        "answered_s": answered_at - at,
        "moved_s": max(entry["at"] for entry in moves) - at,
        "left_s": max(entry["at"] for entry in job.notes("release_refused")) - at,
    }


def loss(job: ScaleJob, node: str) -> dict[str, Any]:
    """A node ends without a word: its connection is closed and nothing listens there."""
    job.until_calm()
    before, at = len(job.notes("recovered")), time.time()
    job.agents.ask(do="lose", node=node)
    recovered = job.until("the recovery", lambda: job.notes("recovered")[before:])[0]
    heard = recovered["started_at"] - at
    return {"recovered_s": recovered["at"] - at, "noticed_s": heard, "agreed_s": recovered["agreed_at"] - at}


def takeover(job: ScaleJob, node: str) -> dict[str, Any]:
    """The leader is killed; the next drain is done by another."""
    job.successor()
    time.sleep(POLICY.lease_s)
    job.until_calm()
    lost_before, known = len(job.notes("node_lost")), len(job.notes("leads"))
    at = time.time()
    job.leaders[-2].end()
    leads = job.until("the next leader", lambda: job.notes("leads")[known:])[0]
    everybody = job.active + job.standbys

    def back() -> float:
        said = job.agents.ask(do="report")
        gone = len({entry["node"] for entry in job.notes("release_refused") + job.notes("node_lost")})
        return time.time() if said["connected"] >= everybody - gone else 0.0

    back_at = job.until("all agents are back", back, look_s=0.05)
    job.until_calm()
    moved = one_move(job, node)
    lost = len(job.notes("node_lost")) - lost_before
    return {
        "takeover_s": leads["at"] - at,
        "all_back_s": back_at - at,
        "nodes_lost": lost,
        "move_after_ms": moved["move_ms"],
    }


def measure(active: int) -> dict[str, Any]:
    """Everything at one size."""
    racked = min(RACK, active // 4)
    standbys = MOVES + 3 + racked + 4
    with a_job(active, standbys) as job:
        names = iter(f"n{number:05d}" for number in range(1, active, max(1, active // (2 * standbys))))
        row: dict[str, Any] = {"nodes": active, "standbys": standbys, "made": stamp()}
        row["start_s"] = job.start()
        row["start_rss_mb"] = job.leader.memory_mb("VmRSS")
        moves = [one_move(job, next(names)) for _ in range(MOVES)]
        row["move_ms"] = [move["move_ms"] for move in moves]
        row["affected_ms"] = [move["affected_ms"] for move in moves]
        row["messages"] = [move["messages"] for move in moves]
        row["bytes"] = [move["bytes"] for move in moves]
        row["kinds"] = moves[-1]["kinds"]
        row["steady"], row["polling"] = steady(job, STEADY_S), polling(active + standbys)
        row["duplicates"] = duplicates(job, next(names))
        row["rack"] = rack(job, [next(names) for _ in range(racked)])
        row["loss"] = loss(job, next(names))
        row["rss_mb"] = job.leader.memory_mb()
        row["takeover"] = takeover(job, next(names))
        row["successor_rss_mb"] = job.leader.memory_mb()
        row["journal_bytes"] = sum(path.stat().st_size for path in job.job_dir.glob("journal.*"))
        shown(row)
        return row


def shown(row: dict[str, Any]) -> None:
    move, load, over = row["move_ms"], row["steady"], row["takeover"]
    print(
        f"{row['nodes']:6} nodes  start {row['start_s']:6.1f} s  move {statistics.median(move):6.1f} ms"
        f" ({min(move):.1f} to {max(move):.1f})  {statistics.median(row['messages']):.0f} messages"
        f"  {load['cores']:.2f} cores at {load['beats_per_s']:.0f} beats/s"
        f" ({load['beats_over_wanted']:.2f} of those wanted)  {row['rss_mb']:.0f} MB"
        f"  take-over {over['takeover_s']:.2f} s, all back {over['all_back_s']:.1f} s"
        f"  rack {row['rack']['moved_s']:.2f} s  loss {row['loss']['recovered_s']:.2f} s",
        flush=True,
    )


def journals() -> list[dict[str, Any]]:
    """How long the journals of some time take to be replayed."""
    rows = []
    for nodes, days in JOURNALS:
        with tempfile.TemporaryDirectory(prefix="tm-slurm-journal-") as directory:
            about = scale_journal.write(Path(directory), nodes, days)
            took_s = scale_journal.replay_s(Path(directory), nodes)
        rows.append({**about, "replay_s": took_s, "us_a_line": took_s / about["lines"] * 1e6})
        print(
            f"journal: {nodes} nodes, {days:g} days: {about['lines']} lines, {about['bytes'] / 1e6:.0f} MB,"
            f" replayed in {took_s:.1f} s",
            flush=True,
        )
    return rows


def decisions() -> list[dict[str, Any]]:
    """What moves cost the leader's processor: decisions, journal and encoding, in one process without
    sockets. Processor time does not depend on what else the machine does."""
    rows = []
    for nodes in SIZES:
        with tempfile.TemporaryDirectory(prefix="tm-slurm-decisions-") as directory:
            found = scale_journal.cost_of_moves(Path(directory), nodes, MOVES)
        rows.append({"nodes": nodes, **found})
        print(
            f"decisions: {nodes} nodes, a move {statistics.median(found['move_cpu_ms']):.2f} ms,"
            f" {found['messages'][-1]} messages, {found['bytes'][-1]} bytes;"
            f" the start {found['start_cpu_s']:.2f} s",
            flush=True,
        )
    return rows


def figures(parts: dict[str, Any]) -> dict[str, float]:
    """What is asked for, of the sizes that were measured."""
    rows = {int(row["nodes"]): row for row in parts.get("nodes", [])}
    found: dict[str, float] = {}
    for nodes, row in rows.items():
        found[f"move_ms_{nodes}"] = statistics.median(row["move_ms"])
    if SIZES[-1] in rows:
        largest = rows[SIZES[-1]]
        found["coordinator_rss_mb"] = max(largest["rss_mb"], largest["successor_rss_mb"])
        load = largest["steady"]
        kept_up = min(1.0, load["beats_over_wanted"], load["alive_over_wanted"])
        found["heartbeats_kept_up"] = kept_up
        found["coordinator_cores"] = load["cores"] / kept_up + largest["polling"]["cores"]
        found["takeover_s"] = largest["takeover"]["takeover_s"]
        found["all_back_s"] = largest["takeover"]["all_back_s"]
        found["rack_of_64_s"] = largest["rack"]["moved_s"]
        if "longest_silence_s" in largest["rack"]:  # else of a run before that was told
            found["longest_silence_s"] = largest["rack"]["longest_silence_s"]
    if 64 in rows and 16384 in rows and rows[64]["made"]["commit"] == rows[16384]["made"]["commit"]:
        many, few = (statistics.median(rows[nodes]["messages"]) for nodes in (16384, 64))
        found["messages_16384_over_64"] = many / few
    by_size = {row["nodes"]: row for row in parts.get("decisions", [])}
    for nodes, row in by_size.items():
        found[f"decisions_move_cpu_ms_{nodes}"] = statistics.median(row["move_cpu_ms"])
    if 64 in by_size and 16384 in by_size:
        many, few = (statistics.median(by_size[nodes]["messages"]) for nodes in (16384, 64))
        found["decisions_messages_16384_over_64"] = many / few
    day = [row for row in parts.get("journal", []) if row["nodes"] == SIZES[-1]]
    if SIZES[-1] in rows and day:
        found["takeover_after_a_day_s"] = found["takeover_s"] + max(row["replay_s"] for row in day)
    for row in parts.get("journal", []):
        found[f"replay_s_{row['nodes']}_nodes_{row['days']:g}_days"] = row["replay_s"]
    for row in parts.get("month", {}).get("rows", []):
        strategy = row["strategy"].replace(" ", "_")
        found[f"ettr_64k_{strategy}"] = row["ettr"]
        found[f"wasted_gpu_h_64k_{strategy}"] = row["wasted_gpu_h"]
    return found


def with_size(rows: list[dict[str, Any]], row: dict[str, Any]) -> list[dict[str, Any]]:
    """A size that was measured anew takes the place of what was known of it."""
    others = [other for other in rows if other["nodes"] != row["nodes"]]
    return sorted([*others, row], key=lambda row: int(row["nodes"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", action="append", choices=["nodes", "decisions", "journal", "month"])
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    arguments = parser.parse_args()
    chosen = arguments.part or ["nodes", "decisions", "journal", "month"]
    sizes = [int(size) for size in arguments.sizes.split(",")]
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    if max(sizes) + 2 * RACK + SPARE_DESCRIPTORS > descriptors:
        parser.error(f"{max(sizes)} nodes need as many sockets, ulimit -Hn is {descriptors}: raise it")
    result = Result(
        "scale",
        lambda parts: (figures(parts), {}),
        how={
            "nodes": "simulated: one light process, a TCP socket a node over loopback, the real protocol",
            "ranks_per_node": 1,
            "policy": {
                "heartbeat_s": {nodes: POLICY.heartbeat_of(nodes) for nodes in sizes},
                "keepalive_s": POLICY.keepalive_s,
                "lease_s": POLICY.lease_s,
            },
            "step_s": STEP_S,
            "slurm": "what scontrol would say is read; it is not run",
            "not_simulated": "16,384 agents' reads of the leader file; joiners' reads of the table of peers",
        },
        bars=BARS,
    )
    for size in sizes if "nodes" in chosen else ():
        result.measure("nodes", lambda size=size: with_size(result.parts.get("nodes", []), measure(size)))
    runs = {"decisions": decisions, "journal": journals, "month": scale_month.measure}
    for part in chosen:
        if part in runs:
            result.measure(part, runs[part])
    for name, value in result.figures.items():
        bar = BARS.get(name)
        judged = "" if bar is None else f"  bar {bar:g}{'  OVER' if value > bar else ''}"
        print(f"{name:>32} {value:10.3f}{judged}")


if __name__ == "__main__":
    main()
