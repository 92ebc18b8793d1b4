"""The coordinator's metrics: over HTTP from a real leader, and every name that the dashboard and the alerts
use."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from recorded import RECORDED, TIMELINE, noted
from test_the_leader_over_loopback import claimed

from tm_slurm.coordinator.leader import Leader, Limits
from tm_slurm.coordinator.metrics_door import CONNECTIONS, MetricsDoor
from tm_slurm.coordinator.model import Plan
from tm_slurm.observe.follow import JobFiles
from tm_slurm.observe.metrics import JobCollector
from tm_slurm.observe.tally import BUCKETS_S, Downtimes, Tally

CONFIGS = Path(__file__).parents[2] / "configs"
NAME = re.compile(r"\btm_slurm_\w+")
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def recorded_status(**changes: Any) -> dict[str, Any]:
    status = JobFiles(RECORDED).status()
    assert status is not None
    return {**status, "refused_connections": 3, **changes}


def tally() -> Tally:
    found = Tally()
    for entry in TIMELINE:
        found.take(entry)
    return found


def samples(text: str) -> Samples:
    families = text_string_to_metric_families(text)
    found = {}
    for sample in (sample for family in families for sample in family.samples):
        job_id = sample.labels.pop("job_id")
        assert job_id in ("1", "7")  # the recorded job, or the leader's below
        found[sample.name, frozenset(sample.labels.items())] = sample.value
    return found


def value(found: Samples, name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


def page(**changes: Any) -> Samples:
    return samples(JobCollector(lambda: recorded_status(**changes), tally()).page().decode())


def test_they_say_what_has_happened() -> None:
    found = page()
    status = recorded_status()
    assert value(found, "tm_slurm_steps_total") == status["step"] + 1
    assert value(found, "tm_slurm_epoch") == 3
    assert value(found, "tm_slurm_standbys", warmth="warm") == 1
    (death,) = [cost["downtime_s"] for cost in noted("downtime") if "agreed_at" in cost]
    assert value(found, "tm_slurm_interruptions_total", kind="drain", outcome="moved") == 2
    assert value(found, "tm_slurm_interruptions_total", kind="process_death", outcome="recovered") == 1
    assert value(found, "tm_slurm_downtime_seconds_count", kind="drain") == 2
    assert value(found, "tm_slurm_downtime_seconds_sum", kind="process_death") == pytest.approx(death)
    assert value(found, "tm_slurm_downtime_seconds_bucket", kind="process_death", le="0.01") == 0
    assert value(found, "tm_slurm_downtime_seconds_bucket", kind="process_death", le="+Inf") == 1
    assert value(found, "tm_slurm_events_total", kind="drain", source="poll") == 2
    assert value(found, "tm_slurm_refused_connections_total", reason="handshake") == 3
    assert value(found, "tm_slurm_refused_connections_total", reason="forged") == 0


def test_a_step_that_is_not_known_is_not_a_step_back() -> None:
    assert not [
        name for name, _ in page(step=None, step_at=None, loss=None) if name == "tm_slurm_steps_total"
    ]


@pytest.mark.parametrize(("seconds", "bucket"), [(-0.2, 0), (0.01, 0), (0.011, 1), (1e9, len(BUCKETS_S))])
def test_a_downtime_is_in_its_bucket(seconds: float, bucket: int) -> None:
    told = Downtimes()
    told.add(seconds)
    assert told.counts.index(1) == bucket and told.sum_s == max(0.0, seconds)


def expressions() -> list[str]:
    dashboard = json.loads((CONFIGS / "grafana_dashboard.json").read_text())
    found = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    found += [variable["query"]["query"] for variable in dashboard["templating"]["list"][1:]]
    alerts = yaml.safe_load((CONFIGS / "prometheus_alerts.yaml").read_text())
    return found + [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("expression", expressions())
def test_every_metric_and_label_that_is_asked_for_exists(expression: str) -> None:
    known = page(move={"phase": "armed"})
    names = {name for name, _ in known}
    asked = set(NAME.findall(expression))
    assert asked and asked <= names, asked - names
    for name, matchers in re.findall(r"(tm_slurm_\w+)\{([^}]*)\}", expression):
        labels = {key for sample, pairs in known if sample == name for key, _ in pairs} | {"job_id"}
        assert set(re.findall(r"(\w+)\s*[=!]", matchers)) <= labels
    for name, key, wanted in re.findall(r'(tm_slurm_\w+)\{[^}]*?(\w+)="(\w+)"', expression):
        values = {v for sample, pairs in known if sample == name for k, v in pairs if k == key}
        assert wanted in values or (key, wanted) == ("phase", "training")


def test_every_metric_is_on_the_dashboard_or_in_an_alert() -> None:
    asked = set(NAME.findall(" ".join(expressions())))
    stems = {re.sub(r"_(bucket|sum|count|created)$", "", name) for name, _ in page()}
    left = {stem for stem in stems if not any(name.startswith(stem) for name in asked)}
    assert left <= {"tm_slurm_term", "tm_slurm_ranks"}


# ---- over the network ----


async def ask(address: str, request: bytes) -> bytes:
    """The whole answer; nothing when the connection was cut."""
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    try:
        return await asyncio.wait_for(reader.read(), 10.0)
    except ConnectionError:
        return b""
    finally:
        writer.close()


def get(path: str = "/metrics", method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


def leader_with_metrics(job_dir: Path, node: str = "n1") -> Leader:
    limits = Limits(
        poll_interval_s=1.0, heartbeat_s=0.1, start_timeout_s=60.0, reconnect_s=5.0, metrics_port=0
    )
    plan = Plan(["n1", "n2"], None, 1, 1)
    return Leader(
        job_id=7,
        node=node,
        host="127.0.0.1",
        plan=plan,
        leadership=claimed(job_dir, node),
        secret=b"s" * 32,
        slurm=None,
        limits=limits,
    )


async def address_of(job_dir: Path) -> str:
    for _ in range(1000):
        if (job_dir / "metrics_targets.json").exists():
            (target,) = json.loads((job_dir / "metrics_targets.json").read_text())
            return str(target["targets"][0])
        await asyncio.sleep(0.01)
    raise AssertionError("no metrics_targets.json within 10 s")


def test_a_leader_tells_them_and_counts_whom_it_refuses(tmp_path: Path) -> None:
    shutil.copyfile(RECORDED / "timeline.jsonl", tmp_path / "timeline.jsonl")  # of the leader before

    async def main() -> tuple[Samples, Samples]:
        leader = leader_with_metrics(tmp_path)
        leading = asyncio.create_task(leader.lead())
        address = await address_of(tmp_path)
        before = await ask(address, get())
        assert before.startswith(b"HTTP/1.1 200 OK\r\n")
        known = json.loads((tmp_path / "leader.json").read_text())
        await ask(f"{known['host']}:{known['port']}", b"\0\0\0\2{}GET / HTTP/1.1\r\n\r\n")
        after = await ask(address, get())
        leading.cancel()
        await asyncio.wait({leading})
        bodies = [answer.partition(b"\r\n\r\n")[2].decode() for answer in (before, after)]
        return samples(bodies[0]), samples(bodies[1])

    before, after = asyncio.run(main())
    assert value(before, "tm_slurm_refused_connections_total", reason="handshake") == 0
    assert value(after, "tm_slurm_refused_connections_total", reason="handshake") == 1
    assert value(before, "tm_slurm_interruptions_total", kind="drain", outcome="moved") == 2
    assert value(before, "tm_slurm_info", leader="n1", phase="starting") == 1


def door(job_dir: Path, port: int = 0) -> MetricsDoor:
    return MetricsDoor(job_dir, "127.0.0.1", port, status=recorded_status, tally=Tally())


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (get(), b"200"),
        (get("/metrics?x=1"), b"200"),
        (get(method="HEAD"), b"200"),
        (get("/"), b"404"),
        (get("/../secret"), b"404"),
        (get(method="POST"), b"405"),
        (b"\r\n\r\n", b"405"),
        (b"x" * 100_000, b""),
    ],
)
def test_nothing_else_is_answered(tmp_path: Path, request_line: bytes, status: bytes) -> None:
    async def main() -> bytes:
        metrics = door(tmp_path)
        await metrics.open()
        assert metrics.address is not None
        answer = await ask(metrics.address, request_line)
        metrics.close()
        return answer

    answer = asyncio.run(main())
    assert answer.split(b" ")[1:2] == ([status] if status else [])
    if request_line.startswith(b"HEAD"):
        assert answer.endswith(b"\r\n\r\n")


def test_those_who_only_hold_the_line_do_not_keep_others_out_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tm_slurm.coordinator.metrics_door.REQUEST_LIMIT_S", 0.2)

    async def main() -> tuple[bytes, bytes]:
        metrics = door(tmp_path)
        await metrics.open()
        assert metrics.address is not None
        host, port = metrics.address.split(":")
        held = [await asyncio.open_connection(host, int(port)) for _ in range(CONNECTIONS)]
        full = await ask(metrics.address, get())
        for reader, _ in held:
            assert await asyncio.wait_for(reader.read(), 10.0) == b""  # they are sent away
        free = await ask(metrics.address, get())
        metrics.close()
        return full, free

    full, free = asyncio.run(main())
    assert full == b"" and free.startswith(b"HTTP/1.1 200")


def test_a_port_that_is_taken_is_no_reason_not_to_lead(tmp_path: Path) -> None:
    async def main() -> tuple[str | None, str | None]:
        first = door(tmp_path)
        await first.open()
        assert first.address is not None
        second = door(tmp_path, int(first.address.split(":")[1]))
        await second.open()
        first.close()
        second.close()
        return first.address, second.address

    one, other = asyncio.run(main())
    assert one is not None and other is not None and one != other


def test_without_a_port_there_are_none(tmp_path: Path) -> None:
    async def main() -> str | None:
        metrics = MetricsDoor(tmp_path, "127.0.0.1", None, status=recorded_status, tally=Tally())
        await metrics.open()
        return metrics.address

    assert asyncio.run(main()) is None and not list(tmp_path.iterdir())
