"""A job's metrics for Prometheus, made from its status and its tally each time that they are asked for. All
have the label job_id."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tm_slurm.observe.tally import BUCKETS_S, Tally

STANDINGS = ("expected", "active", "standby", "leaving", "kept", "released", "lost")
MOVE_PHASES = ("preparing", "armed", "switching", "recovering")
ACCEPTED = frozenset({"accepted", "duplicate"})
"""Counts of signed events that were no refusals."""

Status = dict[str, Any]


class JobCollector(Collector):
    """`status`: the coordinator's, as in status.json."""

    def __init__(self, status: Callable[[], Status], tally: Tally) -> None:
        self._status = status
        self._tally = tally

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        label = {"job_id": str(status["job_id"])}
        for metric in (
            *_of_training(status),
            *_of_nodes(status),
            *_of_interruptions(status, self._tally),
        ):
            metric.samples = [s._replace(labels={**label, **s.labels}) for s in metric.samples]
            yield metric

    def page(self) -> bytes:
        """All of it, in Prometheus's text format."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)


def _of_training(status: Status) -> Iterator[Metric]:
    about = {"leader": status["leader"], "phase": status["phase"]}
    yield _gauge("info", "The job; always 1.", [(about, 1.0)])
    step = status["step"]
    if step is not None:  # a new coordinator has not heard of it yet: that is no step back
        steps = CounterMetricFamily("tm_slurm_steps", "Training steps committed.")
        steps.add_metric([], float(step + 1))
        yield steps
    for name, about_it, value in (
        ("step_seconds", "Median seconds of the last undisturbed steps.", status["steady_step_s"]),
        ("loss", "Loss of rank 0 at its last step.", status["loss"]),
        ("last_step_timestamp_seconds", "When rank 0 has committed its last step.", status.get("step_at")),
        ("epoch", "Epoch: how often ranks have moved, planned or not.", status["epoch"]),
        ("term", "Term of the coordinator: one more with each new one.", status["term"]),
    ):
        if value is not None:
            yield _gauge(name, about_it, [({}, float(value))])


def _of_nodes(status: Status) -> Iterator[Metric]:
    nodes = status["nodes"]
    standings = Counter(node["standing"] for node in nodes)
    yield _gauge("nodes", "Nodes by standing.", [({"standing": s}, float(standings[s])) for s in STANDINGS])
    warm = sum(node["standing"] == "standby" and node["warm"] for node in nodes)
    warmth = [({"warmth": "warm"}, float(warm)), ({"warmth": "warming"}, float(standings["standby"] - warm))]
    yield _gauge("standbys", "Standbys by warmth.", warmth)
    waiting = float(sum(bool(node["waiting"]) for node in nodes))
    yield _gauge("waiting_nodes", "Nodes that should be left while no standby is free.", [({}, waiting)])
    kept = float(standings["kept"])
    yield _gauge("kept_nodes", "Nodes without ranks that Slurm cannot take out of the job.", [({}, kept)])
    seats = [({"state": "seated"}, float(len(status["ranks"])))]
    seats.append(({"state": "absent"}, float(len(status["absent"]))))
    yield _gauge("ranks", "Ranks with a place, and those whose share others do.", seats)
    phase = status["move"]["phase"] if status["move"] is not None else None
    if status["recovery"] is not None:
        phase = "recovering"
    moves = [({"phase": name}, float(name == phase)) for name in MOVE_PHASES]
    yield _gauge("move", "1 for the phase of the move or recovery in work.", moves)


def _of_interruptions(status: Status, tally: Tally) -> Iterator[Metric]:
    interruptions = CounterMetricFamily(
        "tm_slurm_interruptions", "Interruptions by kind and outcome.", labels=["kind", "outcome"]
    )
    for (kind, outcome), count in sorted(tally.interruptions.items()):
        interruptions.add_metric([kind, outcome], count)
    yield interruptions
    downtimes = HistogramMetricFamily(
        "tm_slurm_downtime_seconds", "Downtime of interruptions.", labels=["kind"]
    )
    for kind, told in sorted(tally.downtimes.items()):
        ends = [*map(str, BUCKETS_S), "+Inf"]
        buckets = list(zip(ends, map(float, itertools.accumulate(told.counts)), strict=True))
        downtimes.add_metric([kind], buckets, told.sum_s)
    yield downtimes
    events = CounterMetricFamily("tm_slurm_events", "Events by kind and source.", labels=["kind", "source"])
    for (kind, source), count in sorted(tally.events.items()):
        events.add_metric([kind, source], count)
    yield events
    refused = CounterMetricFamily(
        "tm_slurm_refused_connections",
        "Connections and signed events that this coordinator has refused.",
        labels=["reason"],
    )
    counts = {why: n for why, n in status.get("signed_events", {}).items() if why not in ACCEPTED}
    for reason, count in sorted({**counts, "handshake": status.get("refused_connections", 0)}.items()):
        refused.add_metric([reason], count)
    yield refused


def _gauge(name: str, about: str, values: list[tuple[dict[str, str], float]]) -> Metric:
    family = GaugeMetricFamily(f"tm_slurm_{name}", about, labels=list(values[0][0]))
    for labels, value in values:
        family.add_metric(list(labels.values()), value if math.isfinite(value) else math.nan)
    return family
