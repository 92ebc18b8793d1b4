"""What an interruption costs a rival follows from its step log, by the definition that holds for ours."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import tm_slurm

sys.path.insert(0, str(Path(__file__).parents[1] / "slurm"))
sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import bench_baselines
from baselines import downtime, summary, trial
from baselines.rival_nvrx_inprocess import NvrxInprocess
from baselines.rival_torchft import TorchftAll, TorchftLess
from baselines.run_files import RunFiles
from baselines.steps import Step, StepReader, StepWriter
from baselines.tm_slurm_rank import is_real

from tm_slurm.comm import Endpoint, Peer, register
from tm_slurm.sandbox import Sandbox

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
    assert cost.steady_step_s == pytest.approx(PACE) and cost.step_spread_s == pytest.approx(0.0)


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


def test_figures_say_of_what_they_are() -> None:
    figures = summary.figures(PARTS)
    assert figures["unplanned"] == "a rank is killed; see by_fault"
    assert figures["by_fault"]["planned"]["restarts_measured"] == ["torchrun", "requeue"]
    killed = figures["by_fault"]["process_death"]
    assert killed["spreads"]["best_restart"] == {"median": 14.0, "n": 1, "min": 12.0, "max": 12.0}
    assert "torchft_all" not in killed["spreads"]
    assert figures["by_fault"]["unplugged"]["restarts_measured"] == []


def test_the_pairs_of_a_ratio_are_those_that_took_turns() -> None:
    parts = {
        "tm_slurm": {"faults": {"planned": rows(0.1, 0.2, 0.4)}},
        "torchrun": {
            "faults": {"planned": {"rows": [{"downtime_s": 8.0}, {"failed": "no"}, {"downtime_s": 6.0}]}}
        },
    }
    found = summary.over_ours(parts, "torchrun", "planned")
    assert found == pytest.approx({"median": 7.0 / 0.2, "n": 2, "min": 15.0, "max": 80.0})


def test_a_trial_of_ours_that_failed_counts_as_endless_and_one_of_a_rival_not_at_all() -> None:
    def figures(ours: dict[str, Any]) -> dict[str, Any]:
        return summary.figures({**PARTS, "tm_slurm": {"faults": {"process_death": ours}}})

    assert figures(rows(0.5, 0.7, failed="hung"))["unplanned_over_ours_best_restart"] == pytest.approx(10.0)
    found = figures(rows(0.5, failed="hung"))
    assert found["unplanned_over_ours_best_restart"] == 0.0 and math.inf not in found.values()
    json.dumps(found, allow_nan=False)
    assert figures(rows(failed="hung"))["unplanned_over_ours_best_restart"] == 0.0


def test_ours_counts_as_no_less_than_undisturbed_steps_differ() -> None:
    moved = {"rows": [{"downtime_s": each, "step_spread_s": 0.02} for each in (-0.01, 0.0, 0.01)]}
    figures = summary.figures({**PARTS, "tm_slurm": {"faults": {"planned": moved}}})
    assert figures["planned_over_ours_naive"] == pytest.approx(0.9 / 0.02)
    assert summary.ratio(0.9, 0.0) is None


def test_trials_of_several_commits_are_said_to_be() -> None:
    def at(commit: str) -> dict[str, Any]:
        return {"faults": {"planned": {"rows": [{"downtime_s": 1.0, "commit": commit}]}}}

    mixed = {"tm_slurm": at("a1"), "torchrun": at("b2")}
    assert summary.figures(mixed)["by_fault"]["planned"]["mixed_commits"]
    assert "planned: trials of several commits: a1, b2" in summary.table(mixed)
    same = {"tm_slurm": at("a1"), "torchrun": at("a1")}
    assert not summary.figures(same)["by_fault"]["planned"]["mixed_commits"]


def test_trials_of_another_tuning_are_not_kept() -> None:
    before = json.loads(json.dumps({**bench_baselines.about(SmallRival), "faults": {"planned": rows(1.0)}}))
    assert bench_baselines.begun(SmallRival, before)["faults"] == {"planned": rows(1.0)}
    for key in ("tuning", "versions"):
        assert bench_baselines.begun(SmallRival, {**before, key: {"timeout_s": 9}})["faults"] == {}
    assert bench_baselines.begun(SmallRival, {})["faults"] == {}


class SmallRival(trial.Rival):
    name, what = "small", "a rival whose site is not there"
    tuning: ClassVar = {"timeouts": (1, 2)}

    def start(self) -> None:
        raise ValueError("no JSON")

    def leave(self, node: str, rank: int) -> None: ...

    def lost(self, fault: str, node: str, rank: int) -> None: ...


def test_no_trial_ends_the_run() -> None:
    def end() -> None:
        raise OSError("a process is left")

    files = SimpleNamespace(steps=Path("/nowhere"))
    site: Any = SimpleNamespace(files=files, last_words=lambda: "log", end=end)
    row = trial.Trial(SmallRival, "planned", 0, site).run()
    assert row["failed"] == "ValueError: no JSON" and "a process is left" in row["left_behind"]
    assert row["at"].endswith("Z") and "commit" in row


def test_a_standby_has_its_turn_while_the_fault_still_happens() -> None:
    told = threading.Event()
    seen = []
    trial.at_once(lambda: seen.append(told.wait(20.0)), told.set)
    assert seen == [True]
    with pytest.raises(OSError, match="no such node"):
        trial.at_once(lambda: (_ for _ in ()).throw(OSError("no such node")), lambda: None)


class WarmingUp(tm_slurm.Runtime):
    """In a sandbox, with nothing built but the group that votes."""

    def _enter(self, worker: Any, *, rank: int, world_size: int, **_: Any) -> None:
        register(worker.endpoint)
        worker.endpoint.configure(rank=rank, epoch=0, term=0, peers={rank: Peer("127.0.0.1", 1, 0)})
        dist.init_process_group("tm", store=HashStore(), rank=rank, world_size=world_size)


def test_a_shadow_step_is_no_step_of_the_training() -> None:
    endpoint = Endpoint(secret=b"s" * 32, job="1", host="127.0.0.1", incarnation=1)
    asked = {"standby": {"cpu_share": 1.0, "warm_up": True}, "policy": {"shadow_steps": 3}}
    config = SimpleNamespace(**{name: SimpleNamespace(**keys) for name, keys in asked.items()})
    worker: Any = SimpleNamespace(config=config, endpoint=endpoint, sandbox=Sandbox(endpoint))
    runtime = WarmingUp(lambda role: {}, steps=3)
    shadow = runtime._warm_up(worker, {"rank": 1, "world_size": 4}, None)
    assert [is_real(runtime, step) for _, step in shadow] == [False, False, False]
    dist.destroy_process_group()
    endpoint.close()
    assert [is_real(runtime, step) for _, step in runtime] == [False, True, True]
    dist.destroy_process_group()


def test_rivals_that_wait_for_gloo_wait_equally_long() -> None:
    waits = [kind.tuning["manager"]["timeout_s"] for kind in (TorchftAll, TorchftLess)]
    assert [*waits, NvrxInprocess.tuning["gloo_timeout_s"]] == [0.5, 0.5, 0.5]
