"""The timeline of a job for other programs: Chrome's trace format (Perfetto, chrome://tracing), OpenTelemetry
spans, or plain JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from typing import Any

Entry = dict[str, Any]

MOMENTS_LEFT_OUT = frozenset({"span", "downtime"})
JOB = "job"


class NoOpenTelemetry(RuntimeError):
    """The extra is not installed."""


def interruptions(timeline: Iterable[Entry]) -> list[Entry]:
    """Each interruption with its spans: {number, kind, epoch, begin, at, outcome, downtime_s, pairs, spans}.

    One whose end was never written (its writer was killed, or it is still going on) has outcome None, and
    ends with its last span."""
    found: dict[int, Entry] = {}
    for entry in timeline:
        if entry["what"] != "span":
            continue
        number = int(entry["interruption"])
        blank: Entry = {"number": number, "outcome": None, "downtime_s": None, "pairs": [], "spans": []}
        mine = found.setdefault(number, blank | {"begin": entry["begin"], "at": entry["at"]})
        mine |= {key: entry[key] for key in ("kind", "epoch")}
        if entry["name"] == "interruption":
            mine |= {key: entry[key] for key in ("outcome", "downtime_s", "pairs", "reason") if key in entry}
        else:
            about = ("name", "node", "rank", "begin", "at", "bytes", "at_most")
            mine["spans"].append({key: entry[key] for key in about if key in entry})
        mine |= {"begin": min(mine["begin"], entry["begin"]), "at": max(mine["at"], entry["at"])}
    return list(found.values())


def chrome(timeline: list[Entry], steps: list[Entry]) -> Entry:
    """A trace with a process for each node and a thread for each rank; the job's notes are instants, loss and
    step time counters. Times in microseconds since the first entry."""
    first = min((float(e.get("begin", e["at"])) for e in (*timeline, *steps)), default=0.0)
    rows = _Rows()
    events: list[Entry] = []

    def event(kind: str, name: str, at: float, node: str | None, rank: int | None, **more: Any) -> None:
        process, thread = rows.of(node, rank)
        where = {"pid": process, "tid": thread, "ts": round((at - first) * 1e6, 3)}
        events.append({"ph": kind, "name": name, **where, **more})

    for entry in timeline:
        if entry["what"] == "span":
            name = entry["kind"] if entry["name"] == "interruption" else entry["name"]
            args = {k: v for k, v in entry.items() if k not in ("what", "at", "name", "begin")}
            begin, length = entry["begin"], round((entry["at"] - entry["begin"]) * 1e6, 3)
            more = {"dur": length, "cat": "interruption", "args": args}
            event("X", name, begin, entry["node"], entry["rank"], **more)
        elif entry["what"] not in MOMENTS_LEFT_OUT:
            args = {key: value for key, value in entry.items() if key not in ("what", "at")}
            event("i", entry["what"], entry["at"], entry.get("node"), None, s="p", cat="note", args=args)
    for step in steps:
        if step.get("loss") is not None and math.isfinite(step["loss"]):  # JSON has no NaN
            event("C", "loss", step["at"], None, None, args={"loss": step["loss"]})
        event("C", "step time", step["at"], None, None, args={"seconds": step["seconds"]})
    return {"traceEvents": [*rows.names(), *events], "displayTimeUnit": "ms"}


class _Rows:
    """Numbers for nodes and ranks, as the format asks for."""

    def __init__(self) -> None:
        self._processes: dict[str, int] = {JOB: 0}
        self._threads: dict[tuple[int, int], str] = {(0, 0): JOB}

    def of(self, node: str | None, rank: int | None) -> tuple[int, int]:
        process = self._processes.setdefault(node or JOB, len(self._processes))
        thread = 0 if rank is None else rank + 1
        self._threads.setdefault((process, thread), "node" if rank is None else f"rank {rank}")
        return process, thread

    def names(self) -> Iterator[Entry]:
        for node, process in self._processes.items():
            yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": node}}
        for (process, thread), name in self._threads.items():
            yield {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": name}}


def open_telemetry(timeline: Iterable[Entry], job: str) -> list[Entry]:
    """OpenTelemetry spans as its SDK writes them, one trace an interruption. Where the environment names a
    collector (OTEL_EXPORTER_OTLP_ENDPOINT) and the OTLP exporter is installed, they are sent there, too.

    NoOpenTelemetry without the extra."""
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    except ImportError:
        raise NoOpenTelemetry(
            "OpenTelemetry is not installed here: pip install 'tm_slurm[otel]', or take --format chrome"
        ) from None
    provider = TracerProvider(resource=Resource.create({"service.name": "tm_slurm", "tm_slurm.job": job}))
    kept = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    for exporter in _collectors():
        provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("tm_slurm")
    for one in interruptions(timeline):
        about = {k: one[k] for k in ("kind", "epoch", "outcome", "downtime_s") if one[k] is not None}
        root = tracer.start_span("interruption", attributes=about, start_time=_ns(one["begin"]))
        inside = trace.set_span_in_context(root)
        for span in one["spans"]:
            about = {k: v for k, v in span.items() if k not in ("name", "begin", "at") and v is not None}
            child = tracer.start_span(span["name"], inside, attributes=about, start_time=_ns(span["begin"]))
            child.end(end_time=_ns(span["at"]))
        root.end(end_time=_ns(one["at"]))
    provider.shutdown()
    return [json.loads(span.to_json(indent=None)) for span in kept.get_finished_spans()]


def _collectors() -> list[Any]:
    """What sends spans to the collector that the environment names, if there is one."""
    import os

    if not os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
        return []
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise NoOpenTelemetry(
            "OTEL_EXPORTER_OTLP_ENDPOINT is set, but the exporter is not installed: "
            "pip install 'tm_slurm[otel]', or unset it"
        ) from None
    return [OTLPSpanExporter()]


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
