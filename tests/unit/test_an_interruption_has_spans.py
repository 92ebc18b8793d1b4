"""Each interruption is told as spans by node and rank, whenever a writer is killed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from recorded import RECORDED, TIMELINE

from tm_slurm.observe.follow import JobFiles
from tm_slurm.observe.record import Record
from tm_slurm.observe.spans import UNPLANNED, SpanBook, began_at

DERIVED = "span"


def notes() -> list[dict[str, Any]]:
    return [dict(entry) for entry in TIMELINE if entry["what"] != DERIVED]


def spans_of(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    book = SpanBook()
    return [span for entry in entries for span in book.take(entry)]


def test_a_drain_and_a_death_are_told_by_node_and_rank() -> None:
    spans = spans_of(notes())
    roots = [span for span in spans if span["name"] == "interruption"]
    assert [(r["kind"], r["outcome"]) for r in roots] == [
        ("drain", "moved"),
        ("process_death", "recovered"),
        ("drain", "moved"),
    ]
    for root in roots:
        mine = [s for s in spans if s["interruption"] == root["interruption"] and s is not root]
        assert {"detect", "decide", "prepare", "switch", "transfer", "resume"} <= {s["name"] for s in mine}
        for pair in root["pairs"]:
            joiner = {(s["name"], s["rank"]) for s in mine if s["node"] == pair["joiner"]}
            assert {("prepare", r) for r in pair["ranks"]} <= joiner
            assert {("transfer", r) for r in pair["ranks"]} <= joiner
        assert all(root["begin"] <= s["begin"] <= s["at"] <= root["at"] for s in mine)


def test_the_coordinator_writes_what_the_notes_tell() -> None:
    written = [entry for entry in JobFiles(RECORDED).timeline() if entry["what"] == DERIVED]
    assert [{"what": DERIVED, **span} for span in spans_of(notes())] == written


@pytest.mark.parametrize("cut", range(4, len(notes())))
def test_a_new_leader_goes_on_wherever_the_one_before_was_killed(tmp_path: Path, cut: int) -> None:
    record = Record(tmp_path, world_size=4)
    for note in notes()[:cut]:
        record.note(**note)
    record.close(job_ended=False)
    with (tmp_path / "timeline.jsonl").open("a") as file:
        file.write('{"at": 17, "what": "sp')  # torn
    record = Record(tmp_path, world_size=4)
    for note in notes()[cut:]:
        record.note(**note)
    record.close()
    told = [entry for entry in JobFiles(tmp_path).timeline() if entry["what"] == DERIVED]
    assert told == [{"what": DERIVED, **span} for span in spans_of(notes())]


def test_steps_done_again_are_a_span_of_each_moved_rank() -> None:
    entries = notes()
    cost = next(e for e in entries if e["what"] == "downtime" and "agreed_at" in e)
    moved = cost["went_on"][-1]
    moved["redone_at"] = (moved["from"] + moved["at"]) / 2
    (redo,) = [span for span in spans_of(entries) if span["name"] == "redo"]
    assert (redo["rank"], redo["begin"], redo["at"]) == (moved["rank"], moved["from"], moved["redone_at"])


def test_a_cancelled_move_has_an_outcome() -> None:
    entries = notes()
    at = next(n for n, e in enumerate(entries) if e["what"] == "switching")
    entries[at:] = [{"at": entries[at]["at"], "what": "cancelled", "epoch": 1, "reason": "resumed"}]
    root = spans_of(entries)[-1]
    assert (root["name"], root["outcome"], root["reason"]) == ("interruption", "cancelled", "resumed")


@pytest.mark.parametrize(
    ("identity", "began"),
    [
        ("drain/n3/990", 990.0),
        ("drain/n3/990#2", 990.0),
        ("drain/n3/1010", 1000.0),
        ("res/fans", 1000.0),
    ],
)
def test_a_fact_begins_when_slurm_says_so_if_that_can_be(identity: str, began: float) -> None:
    assert began_at({"at": 1000.0, "id": identity}) == began


def test_a_fact_of_long_ago_counts_from_when_it_was_seen() -> None:
    assert began_at({"at": 5000.0, "id": "drain/n3/1"}) == 5000.0


@pytest.mark.parametrize(
    ("before", "failed", "kind"),
    [
        ([], {"how": "rank 3 on n5 ended with signal SIGKILL", "log": "x"}, "process_death"),
        ([{"what": "node_lost", "node": "n5"}], {"how": "node n5 was lost: silent"}, "node_lost"),
        ([{"what": "node_lost", "node": "n9"}], {"how": "links to n5 are broken"}, "broken_links"),
        ([{"what": "stuck", "ranks": [3]}], {"how": "rank 3 on n5: in a collective"}, "hang"),
        ([], {"how": "slot 0 on n5 is stopped"}, "unresponsive"),
        ([], None, "collective_failed"),
    ],
)
def test_a_failure_is_called_by_its_cause(
    before: list[dict[str, Any]], failed: dict[str, Any] | None, kind: str
) -> None:
    entries = [{"at": 1.0, **entry} for entry in before]
    if failed is not None:
        entries.append({"at": 1.0, "what": "failed", "node": "n5", "ranks": [3], **failed})
    lost = [3] if failed is not None else []
    entries.append({"at": 2.0, "what": "recover", "epoch": 1, "lost": lost, "how": "x", "restarts": 0})
    entries.append({"at": 3.0, "what": "resolve", "epoch": 1, "step": 5, "source": "replicas"})
    (decide,) = spans_of(entries)
    assert (decide["name"], decide["kind"], decide["begin"], decide["at"]) == ("decide", kind, 2.0, 3.0)
    assert kind in UNPLANNED


def test_a_recovery_that_begins_again_is_one_interruption() -> None:
    entries = notes()
    at = next(n for n, e in enumerate(entries) if e["what"] == "recover")
    again = {**entries[at], "epoch": 77, "restarts": 1, "at": entries[at]["at"] + 0.001}
    late = [{**e, "epoch": 77} if e.get("epoch") == 2 else e for e in entries[at + 1 :]]
    roots = [s for s in spans_of([*entries[: at + 1], again, *late]) if s["name"] == "interruption"]
    assert [root["interruption"] for root in roots] == [1, 2, 3]
    assert roots[1]["epoch"] == 77 and roots[1]["outcome"] == "recovered"


def test_a_move_that_a_failure_ends_is_told_apart_from_the_recovery() -> None:
    entries = notes()
    at = next(n for n, e in enumerate(entries) if e["what"] == "switching")
    when = entries[at]["at"]
    rest = [e for e in entries[at + 1 :] if e.get("epoch") != 1]
    broken = [{"at": when + 0.01, "what": "interrupted", "epoch": 1, "reason": "n6 failed"}]
    roots = [s for s in spans_of([*entries[: at + 1], *broken, *rest]) if s["name"] == "interruption"]
    assert [(r["interruption"], r["outcome"]) for r in roots[:2]] == [(1, "failed"), (2, "recovered")]


def test_a_leader_that_is_lost_takes_only_the_cost_with_it() -> None:
    entries = notes()
    at = next(n for n, e in enumerate(entries) if e["what"] == "downtime")
    entries[at] = {"at": entries[at]["at"], "what": "leads", "node": "n6", "term": 2}
    root = next(span for span in spans_of(entries) if span["name"] == "interruption")
    moved = next(e for e in entries if e["what"] == "moved")
    assert (root["outcome"], root["at"], root["pairs"]) == ("moved", moved["at"], moved["pairs"])
    assert "downtime_s" not in root


def test_notes_of_another_version_end_nothing() -> None:
    assert (
        spans_of([{"at": 1.0, "what": w} for w in ("prepare", "moved", "recover", "downtime", "warm")]) == []
    )


def test_a_timeline_that_is_cut_anywhere_can_be_read(tmp_path: Path) -> None:
    text = (RECORDED / "timeline.jsonl").read_bytes()
    shutil.copytree(RECORDED, tmp_path / "job")
    whole = text.decode().splitlines()
    for cut in range(0, len(text), 997):
        (tmp_path / "job" / "timeline.jsonl").write_bytes(text[:cut])
        found = JobFiles(tmp_path / "job").timeline()
        assert found == [json.loads(line) for line in whole[: len(found)]]
