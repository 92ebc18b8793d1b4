"""The report, the exported timeline and their figures, from a recorded job."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from recorded import DEATH, FIRST, NODES, RECORDED, TIMELINE, parties

from tm_slurm.cli.app import main
from tm_slurm.observe.costs import costs_of, restart_of
from tm_slurm.observe.follow import JobFiles
from tm_slurm.observe.roles import stretches
from tm_slurm.observe.trace import chrome, interruptions

HOSTILE = "<script>alert('x')</script> & \"quoted\""


def run(*words: str) -> Result:
    return CliRunner().invoke(main, list(words))


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return Path(shutil.copytree(RECORDED, tmp_path / "job"))


class Page(HTMLParser):
    """What a page would fetch, and the text that it shows."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "data") and not str(value).startswith("#"):
                self.fetched.append(str(value))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_needs_nothing_else(job: Path, tmp_path: Path) -> None:
    done = run("report", str(job), "-o", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    text = (tmp_path / "out" / "report.html").read_text()
    page = Page(text)
    assert page.fetched == [] and "script" not in page.tags and "@import" not in text
    assert re.findall(r"url\((?!#)", text) == []
    assert page.tags.count("svg") == 6  # three pictures, wide and narrow
    for said in (
        "disk is to be replaced",
        "fan is loud",
        "signal SIGKILL",
        f"{parties(FIRST)} (1)",
        "completed",
    ):
        assert said in page.text
    for name in ("timeline", "downtime", "loss"):
        assert (tmp_path / "out" / f"{name}.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_what_others_have_written_is_shown_and_not_obeyed(job: Path, tmp_path: Path) -> None:
    timeline = job / "timeline.jsonl"
    timeline.write_text(timeline.read_text().replace("disk is to be replaced", json.dumps(HOSTILE)[1:-1]))
    assert run("report", str(job), "-o", str(tmp_path)).exit_code == 0
    page = Page((tmp_path / "report.html").read_text())
    assert HOSTILE in page.text and "script" not in page.tags


def test_the_parts_add_up_to_the_downtime() -> None:
    costs = costs_of(JobFiles(RECORDED))
    assert len(costs.interruptions) == 3
    for one in costs.interruptions:
        assert sum(one.parts.values()) == pytest.approx(one.downtime_s)
    lost = sum(max(0.0, one.downtime_s or 0.0) for one in costs.interruptions)
    assert costs.ettr == pytest.approx(1.0 - lost / costs.total_s)
    assert costs.processors == 4 and costs.standby_processors == 3


def test_saved_is_what_restarts_would_have_lost_more() -> None:
    told = json.loads(run("report", str(RECORDED), "--restart-s", "36", "--json").stdout)
    assert told["restarts_s"] == 3 * 36
    assert told["saved_hours"] == pytest.approx((3 * 36 - told["lost_s"]) * 4 / 3600)


@pytest.mark.parametrize(("ranks", "seconds"), [(4, 80), (32, 80), (64, 135), (1024, 300), (100_000, 388)])
def test_an_assumed_restart_follows_the_published_curve(ranks: int, seconds: float, tmp_path: Path) -> None:
    restart = restart_of(ranks, asked_s=None, baselines=tmp_path / "none.json")
    assert restart.planned_s == pytest.approx(seconds) and restart.source.startswith("assumption")


def test_a_measured_restart_counts_more_than_an_assumed_one(tmp_path: Path) -> None:
    figures = {"figures": {"restart_planned_s": 11.8, "restart_unplanned_s": 8.0}}
    (tmp_path / "baselines.json").write_text(json.dumps(figures))
    restart = restart_of(4, asked_s=None, baselines=tmp_path / "baselines.json")
    assert restart.measured and (restart.of("drain"), restart.of("process_death")) == (11.8, 8.0)


def test_a_wait_in_the_queue_counts_as_lost(job: Path) -> None:
    steps = JobFiles(job).steps()
    with (job / "timeline.jsonl").open("a") as file:
        at = steps[-1]["at"] + 99.0
        file.write(json.dumps({"at": at, "what": "started", "world_size": 4, "nodes": ["n2"]}) + "\n")
    with (job / "steps.jsonl").open("a") as file:
        file.write(json.dumps({**steps[-1], "step": 110, "at": at + 1.0}) + "\n")
    before, costs = costs_of(JobFiles(RECORDED)), costs_of(JobFiles(job))
    assert costs.queued_s == pytest.approx(100.0)
    assert costs.ettr == pytest.approx(1.0 - (before.lost_s + 100.0) / (before.total_s + 100.0))


def test_a_job_cut_short_has_a_report_too(job: Path, tmp_path: Path) -> None:
    for name in ("verdict.json", "status.json", "config.yaml"):
        (job / name).write_text("{")
    text = (job / "timeline.jsonl").read_text()
    (job / "timeline.jsonl").write_text(text[: text.index('"what": "recovered"') + 50])
    done = run("report", str(job), "-o", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert "not finished" in Page((tmp_path / "report.html").read_text()).text


def test_a_run_without_interruptions_says_so(job: Path, tmp_path: Path) -> None:
    calm = itertools.takewhile(lambda entry: entry["what"] != "event_drain", TIMELINE)
    (job / "timeline.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in calm))
    done = run("report", str(job), "-o", str(tmp_path))
    assert done.exit_code == 0 and "downtime.png" not in done.stdout and done.stderr == ""
    page = Page((tmp_path / "report.html").read_text())
    assert "None." in page.text and "100.00 %" in page.text


def test_many_interruptions_are_drawn_too(job: Path, tmp_path: Path) -> None:
    (job / "timeline.jsonl").write_text("")
    with (job / "timeline.jsonl").open("a") as file:
        for again in range(100):
            for entry in TIMELINE:
                moved = {**entry, "at": entry["at"] + again / 10}
                moved |= (
                    {"interruption": entry["interruption"] + 3 * again} if "interruption" in entry else {}
                )
                file.write(json.dumps(moved) + "\n")
    done = run("report", str(job), "-o", str(tmp_path))
    assert done.exit_code == 0 and "to 300 interruptions" in done.stdout


def test_a_job_without_a_step_has_none(job: Path) -> None:
    (job / "steps.jsonl").unlink()
    done = run("report", str(job))
    assert done.exit_code == 3 and "has done no step yet" in done.stderr
    (job / "timeline.jsonl").unlink()
    assert run("timeline", str(job)).exit_code == 3


def test_nodes_have_one_role_at_a_time() -> None:
    found = stretches(TIMELINE, NODES, TIMELINE[-1]["at"])
    roles = {node: [s.role for s in found if s.node == node] for node in NODES}
    pairs = [pair for entry in TIMELINE if entry["what"] in ("moved", "recovered") for pair in entry["pairs"]]
    moved = {pair[side] for pair in pairs for side in ("leaver", "joiner")}
    assert set(NODES) - moved == {node for node, seen in roles.items() if seen == ["active"]}
    for node in NODES:
        mine = [s for s in found if s.node == node]
        assert all(a.end == b.begin for a, b in itertools.pairwise(mine))


def test_a_chrome_trace_has_a_row_for_each_node_and_rank(tmp_path: Path) -> None:
    assert run("timeline", str(RECORDED), "--format", "chrome", "-o", str(tmp_path / "t.json")).exit_code == 0
    events: list[dict[str, Any]] = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    nodes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    found = {(nodes[e["pid"]], named[e["pid"], e["tid"]], e["name"]) for e in events if e["ph"] == "X"}
    assert (FIRST["pairs"][0]["joiner"], "rank 1", "transfer") in found
    assert (DEATH["pairs"][0]["joiner"], "rank 3", "prepare") in found
    assert all(e["ts"] >= 0 and e.get("dur", 0) >= 0 for e in events if "ts" in e)
    assert sum(e["name"] == "loss" for e in events) == len(JobFiles(RECORDED).steps())
    assert chrome([], []) == {"traceEvents": [events[0], events[len(nodes)]], "displayTimeUnit": "ms"}


def test_a_trace_is_json_whatever_the_loss(job: Path) -> None:
    with (job / "steps.jsonl").open("a") as file:
        file.write(json.dumps({"step": 110, "at": 2e9, "seconds": 0.1, "loss": math.nan, "rank": 0}) + "\n")
    text = run("timeline", str(job), "--format", "chrome").stdout
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_open_telemetry_spans_are_one_trace_an_interruption() -> None:
    spans = [
        json.loads(line) for line in run("timeline", str(RECORDED), "--format", "otel").stdout.splitlines()
    ]
    roots = [span for span in spans if span["parent_id"] is None]
    assert [span["attributes"]["kind"] for span in roots] == ["drain", "process_death", "drain"]
    told = sum(len(one["spans"]) for one in interruptions(JobFiles(RECORDED).timeline()))
    assert len(spans) - len(roots) == told
    by_trace = {span["context"]["trace_id"]: span["context"]["span_id"] for span in roots}
    assert len(by_trace) == 3
    assert all(s["parent_id"] == by_trace[s["context"]["trace_id"]] for s in spans if s not in roots)


@pytest.mark.parametrize(
    ("missing", "words", "code", "said"),
    [
        ("opentelemetry", ["timeline", str(RECORDED), "--format", "otel"], 2, "pip install 'tm_slurm[otel]'"),
        ("matplotlib", ["report", str(RECORDED)], 1, "pip install 'tm_slurm[report]'"),
    ],
)
def test_what_an_extra_is_needed_for_says_so(
    monkeypatch: pytest.MonkeyPatch, missing: str, words: list[str], code: int, said: str
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    done = run(*words)
    assert done.exit_code == code and said in done.stderr and "Traceback" not in done.stderr
