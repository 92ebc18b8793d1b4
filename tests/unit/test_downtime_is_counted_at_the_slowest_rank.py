"""The figure that everything here is judged by comes from commit times, as README.md has it."""

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


def recovered(**fields: Any) -> dict[str, Any]:
    told = {"2": {"bytes": 8, "state_s": 0.05, "told_after_s": 0.3}}
    return {"epoch": 1, "step": 10, "started_at": 1.0, "agreed_at": 1.1, "resumed": told, **fields}


def test_the_downtime_of_a_failure_has_parts_that_add_up(tmp_path: Path) -> None:
    record = Record(tmp_path, world_size=3)
    for rank in range(3):
        beat(record, rank, {step: step * 0.1 for step in range(10)})
    record.moved(recovered())
    for rank, end in enumerate((1.55, 1.6, 1.52)):
        beat(record, rank, {10: end})
    (cost,) = JobFiles(tmp_path).notes("downtime")
    assert cost["at"] == 1.6 and cost["downtime_s"] == pytest.approx(1.6 - 0.9 - 0.1)
    assert cost["parts"] == pytest.approx(
        {"decide_s": 0.1, "switch_s": 0.25, "state_s": 0.05, "redo_s": 0.0, "other_s": 0.1}
    )
    assert 1.0 + sum(cost["parts"].values()) == pytest.approx(1.6 - 0.1)  # from `started_at` on


def test_what_a_dead_rank_had_not_told_is_not_waited_for(tmp_path: Path) -> None:
    record = Record(tmp_path, world_size=2)
    beat(record, 0, {step: step * 0.1 for step in range(10)})
    beat(record, 1, {step: step * 0.1 for step in range(7)})
    record.moved(recovered())
    beat(record, 0, {10: 1.5})
    beat(record, 1, {11: 1.7})  # it has died again, after the tenth and before it could tell so
    (cost,) = JobFiles(tmp_path).notes("downtime")
    assert cost["downtime_s"] == pytest.approx(1.5 - 0.9 - 0.1)


def test_steps_that_are_done_again_are_a_part_of_the_downtime(tmp_path: Path) -> None:
    record = Record(tmp_path, world_size=2)
    for rank in (0, 1):
        beat(record, rank, {step: step * 0.1 for step in range(10)})
    record.moved(recovered(step=7, source="snapshot"))
    for rank in (0, 1):
        beat(record, rank, {7: 1.5, 8: 1.6, 9: 1.7})
    assert not JobFiles(tmp_path).notes("downtime")
    for rank in (0, 1):
        beat(record, rank, {10: 1.8})
    (cost,) = JobFiles(tmp_path).notes("downtime")
    assert cost["first_new_step"] == 10 and cost["downtime_s"] == pytest.approx(1.8 - 0.9 - 0.1)
    assert cost["parts"]["redo_s"] == pytest.approx(1.7 - 1.4) and cost["parts"]["other_s"] == pytest.approx(
        0.0
    )


def test_a_step_is_told_once_however_often_it_was_done(tmp_path: Path) -> None:
    record = Record(tmp_path, world_size=2)
    for at in (0.0, 5.0):
        for rank in (0, 1):
            beat(record, rank, {step: at + step * 0.1 for step in range(10)})
    assert [(s["step"], s["at"]) for s in JobFiles(tmp_path).steps()] == [(n, n * 0.1) for n in range(10)]


def test_a_new_leader_goes_on_where_the_log_ends(tmp_path: Path) -> None:
    record = Record(tmp_path, world_size=2)
    beat(record, 0, {0: 0.0, 1: 0.1, 2: 0.2})
    with (tmp_path / "steps.jsonl").open("a") as file:
        file.write('{"step": 3, "at"')  # it was killed while it wrote
    after = Record(tmp_path, world_size=2)
    assert after.steady_step_s() == pytest.approx(0.1) and after.last_loss == 1.0
    beat(after, 0, {2: 0.2, 5: 0.5})  # the successor of a rank 0 that died with the old leader
    assert [step["step"] for step in JobFiles(tmp_path).steps()] == [0, 1, 2]  # another may tell 3 and 4
    beat(after, 1, {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4})
    assert [step["step"] for step in JobFiles(tmp_path).steps()] == [0, 1, 2, 3, 4, 5]


def test_a_leader_that_leads_no_more_leaves_the_log_to_the_next(tmp_path: Path) -> None:
    frozen = Record(tmp_path, world_size=2)
    beat(frozen, 0, {0: 0.0})
    beat(frozen, 1, {0: 0.0, 1: 0.1, 2: 0.2})  # held back: rank 0 may still tell 1 and 2
    after = Record(tmp_path, world_size=2)
    beat(after, 0, {step: step * 0.1 for step in range(5)})
    frozen.close(job_ended=False)
    assert [step["step"] for step in JobFiles(tmp_path).steps()] == [0, 1, 2, 3, 4]


def test_two_leaders_that_write_at_a_time_write_every_step_once_and_in_order(tmp_path: Path) -> None:
    frozen = Record(tmp_path, world_size=1)
    beat(frozen, 0, {0: 0.0})
    after = Record(tmp_path, world_size=1)
    beat(after, 0, {1: 0.1, 2: 0.2})
    beat(frozen, 0, {1: 0.1, 2: 0.2, 3: 0.3})  # it has not found out yet that it leads no more
    beat(after, 0, {3: 0.3, 4: 0.4})
    frozen.close()
    after.close()
    assert [step["step"] for step in JobFiles(tmp_path).steps()] == [0, 1, 2, 3, 4]


def test_what_nobody_can_tell_any_more_does_not_hold_up_the_log(tmp_path: Path) -> None:
    record = Record(tmp_path, world_size=2)
    beat(record, 0, {0: 0.0, 3: 0.3})
    assert [step["step"] for step in JobFiles(tmp_path).steps()] == [0]
    beat(record, 1, {2: 0.2, 3: 0.3})
    assert [step["step"] for step in JobFiles(tmp_path).steps()] == [0, 2, 3]


def test_a_late_word_of_a_process_that_was_replaced_does_not_move_its_rank_back(tmp_path: Path) -> None:
    record = Record(tmp_path, world_size=1)
    record.beat("n2", {"rank": 0, "epoch": 1, "step": 5, "steps": [[5, 0.5, 0.1, 1.0]]})
    record.beat("n1", {"rank": 0, "epoch": 0, "step": 4, "steps": [[4, 0.4, 0.1, 1.0]]})
    assert record.latest[0] == {"node": "n2", "epoch": 1, "step": 5}


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
