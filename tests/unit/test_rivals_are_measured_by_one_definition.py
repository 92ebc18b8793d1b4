"""What an interruption costs a rival follows from its step log, by the definition that holds for ours."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

from baselines import downtime, summary
from baselines.run_files import RunFiles
from baselines.steps import Step, StepReader, StepWriter

PACE = 0.25
FAULT = 10.05


def trained(rank: int, first: int, last: int, begin: float, process: str = "") -> list[Step]:
    """Steps `first` to `last`, the first of them done at `begin`."""
    name = process or f"n{rank + 1}:1"
    return [Step(begin + n * PACE, rank, step, name) for n, step in enumerate(range(first, last + 1))]


def before_the_fault(ranks: int = 4) -> list[Step]:
    """All ranks have done step 40 at 10.0."""
    return [each for rank in range(ranks) for each in trained(rank, 0, 40, 0.0)]


def test_a_failure_is_counted_from_the_fault_to_the_first_new_step_of_the_slowest_rank() -> None:
    after = [each for rank in range(3) for each in trained(rank, 41, 45, 12.0 + 0.1 * rank)]
    steps = before_the_fault() + after
    assert downtime.unplanned(steps, at=FAULT, victim="n4:1", ranks=4) is None, "rank 3 is not there yet"
    steps += trained(3, 41, 45, 12.5, "n5:1")
    cost = downtime.unplanned(steps, at=FAULT, victim="n4:1", ranks=4)
    assert cost is not None and cost.downtime_s == pytest.approx(12.5 - FAULT - PACE)
    assert (cost.first_new_step, cost.redone_steps) == (41, 0)


def test_steps_that_are_done_again_are_part_of_the_downtime() -> None:
    after = [each for rank in range(4) for each in trained(rank, 31, 42, 15.0, f"n{rank + 2}:7")]
    cost = downtime.unplanned(before_the_fault() + after, at=FAULT, victim="n4:1", ranks=4)
    assert cost is not None and cost.redone_steps == 10
    assert cost.downtime_s == pytest.approx(15.0 + 10 * PACE - FAULT - PACE)


def test_what_a_lost_process_still_does_is_not_a_new_step() -> None:
    steps = before_the_fault() + trained(3, 41, 41, 10.1)
    steps += [each for rank in range(3) for each in trained(rank, 41, 45, 12.0)]
    assert downtime.unplanned(steps, at=FAULT, victim="n4:1", ranks=4) is None


def test_who_goes_on_with_fewer_is_not_waited_for() -> None:
    steps = before_the_fault() + [each for rank in range(3) for each in trained(rank, 41, 45, 11.0)]
    cost = downtime.unplanned(steps, at=FAULT, victim="n4:1", ranks=3)
    assert cost is not None and cost.downtime_s == pytest.approx(11.0 - FAULT - PACE)


def test_a_planned_move_is_counted_from_the_leavers_last_step() -> None:
    steps = before_the_fault(3) + trained(3, 0, 44, 0.0)
    steps += [each for rank in range(3) for each in trained(rank, 41, 44, 10.25)]
    steps += [each for rank in range(3) for each in trained(rank, 45, 48, 11.6)]
    steps += trained(3, 45, 48, 11.65, "n5:1")
    cost = downtime.planned(steps, leaver="n4:1", noticed_at=FAULT, ranks=4)
    assert cost is not None and cost.downtime_s == pytest.approx(11.65 - 11.0 - PACE)


def test_a_planned_restart_does_its_last_step_again() -> None:
    steps = before_the_fault()
    steps += [each for rank in range(4) for each in trained(rank, 40, 43, 20.0, f"n{rank + 2}:9")]
    cost = downtime.planned(steps, leaver="n4:1", noticed_at=FAULT, ranks=4)
    assert cost is not None and cost.downtime_s == pytest.approx(20.0 + PACE - 10.0 - PACE)
    assert cost.redone_steps == 1


def test_a_stayer_that_is_a_moment_late_is_counted_from_its_own_last_step() -> None:
    steps = [each for rank in range(3) for each in trained(rank, 0, 40, 0.1)]
    steps += trained(3, 0, 40, 0.0)
    steps += [each for rank in range(3) for each in trained(rank, 41, 42, 11.0)]
    steps += trained(3, 41, 42, 10.9, "n5:1")
    cost = downtime.planned(steps, leaver="n4:1", noticed_at=9.0, ranks=4)
    assert cost is not None and cost.downtime_s == pytest.approx(11.0 - 10.1 - PACE)


def test_the_log_of_all_processes_is_read_while_it_is_written(tmp_path: Path) -> None:
    reader, writer = StepReader(tmp_path / "steps"), StepWriter(tmp_path / "steps")
    assert reader.all() == []
    writer.done(2, 7)
    (tmp_path / "steps" / "n9:1.jsonl").write_text(
        '{"at": 1.0, "rank": 0, "step": 0, "process": "n9:1"}\n{"at"'
    )
    assert [(each.rank, each.step) for each in reader.all()] == [(0, 0), (2, 7)]
    writer.done(2, 8)
    found = reader.all()
    assert [each.step for each in found] == [0, 7, 8]
    assert downtime.process_of(found, 2) == f"{os.uname().nodename}:{os.getpid()}"


def test_a_standby_waits_until_it_is_told_whose_place_is_free(tmp_path: Path) -> None:
    files, node = RunFiles(tmp_path), os.uname().nodename
    files.make_standby(node)
    with pytest.raises(OSError, match="No such device"):
        files.give_turn(node, 2)  # nobody is there
    waiting = os.open(tmp_path / f"turn-{node}", os.O_RDONLY | os.O_NONBLOCK)
    files.give_turn(node, 2)
    assert files.await_turn() == 2 and files.is_ready(node)
    os.close(waiting)


def rows(*seconds: float, **more: Any) -> dict[str, Any]:
    return {"rows": [{"downtime_s": each} for each in seconds] + ([more] if more else [])}


PARTS: dict[str, Any] = {
    "tm_slurm": {"faults": {"planned": rows(0.1, 0.2, 0.3), "process_death": rows(0.5)}},
    "torchrun": {"faults": {"planned": rows(8.0), "process_death": rows(6.0, 9.0, 7.0)}},
    "requeue": {
        "faults": {"planned": rows(6.0), "process_death": rows(30.0, failed="not within 9 s: 4\nlog")}
    },
    "torchft_less": {"faults": {"process_death": rows(0.6)}},
    "migration_naive": {"faults": {"planned": rows(0.9), "process_death": {"cannot": "planned moves only"}}},
}


def test_figures_are_ratios_of_medians_over_ours() -> None:
    figures = summary.figures(PARTS)
    assert figures["planned_over_ours_best_restart"] == pytest.approx(6.0 / 0.2), "requeue is the best at it"
    assert figures["planned_over_ours_naive"] == pytest.approx(0.9 / 0.2)
    assert figures["unplanned_over_ours_best_restart"] == pytest.approx(7.0 / 0.5), "here torchrun is"
    assert figures["unplanned_over_ours_torchft_less"] == pytest.approx(0.6 / 0.5)
    assert figures["unplanned_over_ours_torchft_all"] is None, "it was not measured"
    assert (figures["restart_planned_s"], figures["restart_unplanned_s"]) == (6.0, 7.0)
    assert figures["by_fault"]["planned"]["best_restart"] == figures["planned_over_ours_best_restart"]


def test_the_table_hides_nothing() -> None:
    table = summary.table(PARTS)
    lines = {line.split()[0]: line for line in table.splitlines()}
    assert "7.00 n=3 6.00-9.00" in lines["torchrun"] and "not measured" in lines["torchrun"]
    assert "30.00 n=1 30.00-30.00 1 failed" in lines["requeue"]
    assert "migration_naive, process_death: cannot: planned moves only" in table
    assert "requeue, process_death: not within 9 s: 4" in table


def test_the_report_reads_what_restarts_cost(tmp_path: Path) -> None:
    from tm_slurm.observe.costs import restart_of

    path = tmp_path / "baselines.json"
    path.write_text(json.dumps({"figures": summary.figures(PARTS)}))
    restart = restart_of(4, asked_s=None, baselines=path)
    assert (restart.planned_s, restart.unplanned_s, restart.measured) == (6.0, 7.0, True)
