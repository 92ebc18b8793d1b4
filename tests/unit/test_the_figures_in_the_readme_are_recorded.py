"""The README's tables are what the recorded runs of the benchmarks say, byte by byte, a missed bar included;
and no figure of a benchmark stands elsewhere in it."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import figures_record
import readme_tables
from figures_record import NAMES, RECORDS, kept_records, record_of, stamp, take
from readme_tables import BEGIN, END, README, TIMES, section, with_section

QUANTITY = re.compile(
    r"(?<![\w.])\d[\d.,]* ?(?:s|ms|min|seconds?|minutes?|hours?|times|\u00d7|%|MB|GB|kB)(?!\w)"
)
OF_NO_BENCH = {
    "1 %": "what snapshots may cost: a setting",
    "10 minutes": "policy.window_lead_s: a setting",
    "2 %": "how near the simulation must come: the bound of a test",
    "1.5 GB": "the folder of the next release of Slurm",
}
"""Quantities in the README's prose that no benchmark measures, and what they are instead."""

MACHINE = {"cpus": 2, "kernel": "6.1.0-44-amd64", "processor": "x86_64", "load": 0.3}


def prose() -> str:
    """The README without what is generated and without code."""
    text = README.read_text()
    text = text.partition(BEGIN)[0] + text.partition(END)[2]
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return " ".join(re.sub(r"^    .*$", "", text, flags=re.MULTILINE).split())


def a_result(name: str = "cli", **figures: Any) -> dict[str, Any]:
    return {
        "name": name,
        "machine": MACHINE,
        "versions": {"python": "3.11.7"},
        "bars": {"status_cpu_s": 0.3},
        "figures": figures,
        "parts": {"status": [[0.5, 0.0611111], [0.5, 0.0622222], [0.5, 0.0633333]]},
    }


def a_record(name: str = "cli", **figures: Any) -> dict[str, Any]:
    return record_of(a_result(name, **figures), at="2026-11-30T09:11:00Z", commit="abc1234")


def test_the_tables_are_what_is_recorded() -> None:
    text = README.read_text()
    assert with_section(text, section(kept_records())) == text, "`make tables` makes them anew"


def test_all_that_is_recorded_is_of_a_known_benchmark() -> None:
    assert {path.stem for path in RECORDS.glob("*.json")} <= set(NAMES)
    benches = {path.stem.removeprefix("bench_") for path in RECORDS.parent.glob("bench_*.py")}
    assert tuple(importlib.import_module("bench_downtime").FAULTS) == figures_record.FAULTS
    assert set(NAMES) <= benches and set(readme_tables.TITLES) == set(NAMES)


def test_no_figure_of_a_benchmark_stands_elsewhere() -> None:
    found = {match.group() for match in QUANTITY.finditer(prose())}
    shown = {match.group() for match in QUANTITY.finditer(section(kept_records()))}
    assert found - OF_NO_BENCH.keys() <= shown, "say what it is in OF_NO_BENCH, or leave it to the tables"
    assert found >= OF_NO_BENCH.keys()


def test_a_benchmark_without_a_run_has_no_table() -> None:
    made = section([a_record(status_cpu_s=0.0622)])
    assert "| `tm-slurm status`, processor time | 0.0622 s (0.0611 to 0.0633 s, n = 3) | ≤ 0.3 s |" in made
    assert made.count("|---|---|---|") == 1 and "Linux 6.1.0" in made and "(2026-11-30, abc1234)" in made
    assert "|" not in section([])


def test_a_missed_bar_is_shown_as_missed() -> None:
    made = section([a_record(status_cpu_s=0.31)])
    assert "| **missed**: ≤ 0.3 s |" in made


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"baselines", "profile"}))
def test_all_that_has_a_bar_has_a_row(name: str) -> None:
    bench = importlib.import_module(f"bench_{name}")
    bars = list(bench.all_bars() if name == "downtime" else bench.BARS)
    assert bars and set(bars) <= {row.figure for row in readme_tables.ROWS[name]}


def test_a_figure_with_a_bar_is_never_left_out() -> None:
    record = a_record(help_cpu_s=0.1)
    assert "| `tm-slurm status`, processor time | **not measured** | ≤ 0.3 s |" in section([record])
    record["bars"]["other_s"] = 2.0
    with pytest.raises(ValueError, match="other_s"):
        section([record])


def test_a_figure_for_each_size_is_judged_by_its_worst() -> None:
    by_ranks, by_bytes = {"2": 0.03123, "16": 0.0512}, {"1.04858e+06": 0.03, "1.07374e+09": 0.5}
    result = a_result("downtime", planned_s_by_ranks=by_ranks, planned_s_by_bytes=by_bytes)
    result |= {"bars": {"planned_s_by_ranks": 0.05}, "parts": {}}
    made = section([record_of(result, at="2026-11-30T09:11:00Z", commit=None)])
    assert "| 2: 0.0312 s, 16: 0.0512 s | **missed**: ≤ 0.05 s |" in made
    assert "| 1 MB: 0.03 s, 1,024 MB: 0.5 s |" in made


def test_a_growth_of_what_cannot_be_told_apart_is_said_to_be() -> None:
    figures = {
        "planned_s_by_ranks": {"2": -0.001, "16": 0.004},
        "planned_growth_with_ranks": 1.0,
        "planned_growth_with_ranks_told_apart_s": 0.005,
    }
    result = a_result("downtime", **figures) | {"bars": {"planned_growth_with_ranks": 1.5}, "parts": {}}

    def made() -> str:
        return section([record_of(result, at=AT, commit=None)]).replace(TIMES, "x")

    words = "| a planned move, by ranks: the worst ÷ the first |"
    assert f"{words} not told apart: none over 0.005 s | ≤ 1.5x |" in made()
    result["figures"] |= {"planned_growth_with_ranks_told_apart_s": 0.003}
    assert f"{words} 1x | ≤ 1.5x |" in made()


def test_a_part_that_was_kept_is_published_as_it_was_made() -> None:
    old = {"at": "2026-10-01T08:00:00Z", "commit": "old1234"}
    new = {"at": "2026-11-30T09:00:00Z", "commit": "new1234-dirty"}
    result = a_result(status_cpu_s=0.1) | {"made": {"status": old, "help": new}}
    assert "(2026-10-01, new1234-dirty, old1234)" in section([record_of(result, at=AT, commit="abc1234")])
    result["parts"]["plan"] = []
    assert "parts of unknown commits)" in section([record_of(result, at=AT, commit="abc1234")])


def test_a_stamp_tells_sources_that_are_in_no_commit(tmp_path: Path) -> None:
    assert stamp(tmp_path)["commit"] is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    (tmp_path / "a.py").write_text("1\n")
    for words in (["init", "-q"], ["add", "a.py"], ["commit", "-q", "-m", "a"]):
        subprocess.run([*git, *words], check=True)
    clean = stamp(tmp_path)
    assert re.fullmatch(r"[0-9a-f]{7,}", clean["commit"] or "") and (clean["at"] or "").endswith("Z")
    (tmp_path / "a.py").write_text("2\n")
    assert stamp(tmp_path)["commit"] == f"{clean['commit']}-dirty"


AT = "2026-11-30T09:11:00Z"


def a_comparison() -> dict[str, Any]:
    """Ours 0.1 s and 0.2 s; two rivals that restart, one that cannot, one that has failed once."""

    def rows(*seconds: float | None, commit: str = "abc1234") -> dict[str, Any]:
        about = {"at": AT, "commit": commit}
        told = [{"failed": "it hung"} if each is None else {"downtime_s": each} for each in seconds]
        return {"rows": [{**about, **each} for each in told]}

    rivals = {
        "tm_slurm": {"planned": rows(0.1), "process_death": rows(0.3, 0.1), "unplugged": rows(2.0)},
        "migration_naive": {"planned": rows(0.25), "process_death": {"cannot": "no"}},
        "torchrun": {
            "planned": rows(4.0),
            "process_death": rows(*[1.9] * 4, 1.5),
            "unplugged": rows(18.0, commit="def5678"),
        },
        "requeue": {"planned": rows(3.5), "process_death": rows(9.0, None)},
    }
    parts = {name: {"what": name, "faults": faults} for name, faults in rivals.items()}
    return {"name": "baselines", "machine": MACHINE, "versions": {}, "figures": {}, "rivals": parts}


def test_each_rival_is_shown_with_its_ratio_and_what_was_asked() -> None:
    made = section([record_of(a_comparison(), at="2026-11-30T09:11:00Z", commit="abc1234")])
    made = made.replace(TIMES, "x")
    lines = {line.split("|")[1].strip(): line for line in made.splitlines() if line.startswith("| ")}
    one = "(**n = 1**)"
    ours = f"| 0.1 s {one} | 0.2 s (0.1 to 0.3 s, **n = 2**) | not measured | 2 s {one} |"
    assert ours in lines["**tm_slurm**, one standby"]
    naive = lines["moves with neither (Migration Naive)"]
    assert f"| 0.25 s {one}, 2.5x (**missed**: ≥ 3x) | cannot |" in naive
    torchrun = lines["torchrun, a checkpoint each step"]
    killed = "| 1.9 s (1.5 to 1.9 s), 9.5x (6.33 to 19x, **missed**: ≥ 10x) |"
    assert f"| 4 s {one}, 40x {killed}" in torchrun
    unplugged = f"| 18 s {one}, 9x (**missed**: ≥ 10x, of several commits) |"
    assert unplugged in torchrun, "the same is asked of all unplanned faults"
    requeue = lines["Slurm requeue, each step"]
    assert f"| 3.5 s {one}, 35x (≥ 30x) | 9 s (**n = 1**, 1 of 2 failed), 45x |" in requeue
    assert "1 to 5 trials of each" in made and "(2026-11-30, abc1234, def5678, " in made
    assert "Here 2 processors are shared by 4 ranks" in " ".join(made.split())


def test_a_rival_that_was_not_measured_is_not_left_out() -> None:
    comparison = a_comparison()
    del comparison["rivals"]["torchrun"], comparison["rivals"]["requeue"]
    hung = {"failed": "it hung", "at": AT, "commit": "abc1234"}
    comparison["rivals"]["tm_slurm"]["faults"]["planned"] = {"rows": [hung]}
    made = section([record_of(comparison, at=AT, commit="abc1234")]).replace(TIMES, "x")
    lines = {line.split("|")[1].strip(): line for line in made.splitlines() if line.startswith("| ")}
    asked = "| **not measured**: ≥ 4x " * 3
    assert lines["NVRx in-process, a warm reserve"].endswith(f"| not measured {asked}|")
    assert "| **not measured**: ≥ 30x | **not measured**: ≥ 10x |" in lines["torchrun, each 10 steps"]
    assert "| **1 of 1 failed** | 0.2 s" in lines["**tm_slurm**, one standby"]
    assert "0x (**missed**: ≥ 3x)" in lines["moves with neither (Migration Naive)"]


def test_a_newer_run_is_taken_and_an_older_one_is_not(tmp_path: Path) -> None:
    results, records = tmp_path / "bench", tmp_path / "records"
    results.mkdir()
    records.mkdir()
    run = results / "cli.json"

    def ran(status_cpu_s: float, at: int) -> list[str]:
        run.write_text(json.dumps(a_result(status_cpu_s=status_cpu_s)))
        os.utime(run, (at, at))
        return take(results, records)

    assert ran(0.0623456, 1_796_000_000) == ["cli"]
    assert [record["figures"] for record in kept_records(records)] == [{"status_cpu_s": 0.06235}]
    assert ran(0.5, 1_795_000_000) == [] and ran(0.05, 1_797_000_000) == ["cli"]
    kept = kept_records(records)[0]
    assert (kept["figures"], kept["at"], kept["commit"]) == (
        {"status_cpu_s": 0.05},
        "2026-12-11T14:40:00Z",
        None,
    )


def test_a_readme_without_the_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="figures:begin"):
        with_section("no marks\n", "tables\n")
    with pytest.raises(ValueError, match="once each"):
        with_section(f"{END}{BEGIN}", "tables\n")
