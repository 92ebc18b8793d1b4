"""The figure that everything here is judged by comes from commit times, as the design defines it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tm_slurm.observe.follow import JobFiles, JsonLines
from tm_slurm.observe.record import Record


def beat(record: Record, rank: int, steps: dict[int, float]) -> None:
    listed = [[step, at, 0.1, 1.0] for step, at in steps.items()]
    record.beat(f"n{rank}", {"rank": rank, "epoch": 0, "step": max(steps), "steps": listed})


def moved(**fields: Any) -> dict[str, Any]:
    return {"epoch": 1, "step": 10, "pairs": [], **fields}


def test_downtime_is_the_longest_gap_less_a_steady_step(tmp_path: Path) -> None:
    record = Record(tmp_path, world_size=2)
    for rank in (0, 1):
        beat(record, rank, {step: step * 0.1 for step in range(10)})
    record.moved(moved())
    beat(record, 0, {10: 0.9 + 0.3})
    assert not JobFiles(tmp_path).notes("downtime")  # rank 1 has not been heard: nothing is claimed yet
    beat(record, 1, {10: 0.9 + 0.25})
    (cost,) = JobFiles(tmp_path).notes("downtime")
    assert cost["downtime_s"] == pytest.approx(0.2) and cost["steady_step_s"] == pytest.approx(0.1)


def test_the_steps_during_a_preparation_do_not_make_the_steady_step_longer(tmp_path: Path) -> None:
    record = Record(tmp_path, world_size=1)
    record.beat("n1", {"rank": 0, "epoch": 0, "step": 5, "steps": [[s, s * 0.1, 0.1, 1.0] for s in range(6)]})
    record.note("prepare", 0.6)
    record.beat(
        "n1", {"rank": 0, "epoch": 0, "step": 9, "steps": [[s, s * 1.0, 9.0, 1.0] for s in range(6, 10)]}
    )
    assert record.steady_step_s() == pytest.approx(0.1)


def test_steps_and_losses_are_those_of_rank_0(tmp_path: Path) -> None:
    record = Record(tmp_path, world_size=2)
    beat(record, 1, {0: 0.0})
    beat(record, 0, {0: 0.0, 1: 0.1})
    assert [step["step"] for step in JobFiles(tmp_path).steps()] == [0, 1]
    assert record.last_loss == 1.0


def test_a_line_that_is_still_being_written_is_read_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    lines = JsonLines(path)
    assert list(lines.new()) == []
    path.write_text('{"a":1}\n{"b"')
    assert list(lines.new()) == [{"a": 1}]
    with path.open("a") as file:
        file.write(":2}\nnonsense\n" + json.dumps({"c": 3}) + "\n")
    assert list(lines.new()) == [{"b": 2}, {"c": 3}]


def test_steps_that_rank_0_took_with_it_are_told_by_another(tmp_path: Path) -> None:
    record = Record(tmp_path, world_size=2)
    beat(record, 0, {0: 0.0})
    beat(record, 1, {0: 0.0, 1: 0.1, 2: 0.2, 3: 0.3})
    beat(record, 0, {3: 0.4})  # its successor
    steps = JobFiles(tmp_path).steps()
    assert [(step["step"], step["rank"]) for step in steps] == [(0, 0), (1, 1), (2, 1), (3, 0)]
