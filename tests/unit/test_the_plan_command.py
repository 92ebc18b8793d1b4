"""`tm-slurm plan`: where its figures are from, what it prints, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tm_slurm.cli.app import main
from tm_slurm.planning.costs import paper_planned, paper_restart, paper_unplanned
from tm_slurm.planning.failures import published_mttf_h

SACCT = """\
101|COMPLETED|16|36000
102|NODE_FAIL|64|7200
102|REQUEUED|64|60
103|CANCELLED by 0|8|1800
104|NODE_FAIL|32|3600
"""
SACCT_NODE_HOURS = 16 * 10 + 64 * 2 + 64 / 60 + 8 * 0.5 + 32


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["plan", *words])


def answer(*words: str) -> dict[str, Any]:
    done = run(*words, "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.output)
    return found


def test_without_anything_known_the_published_figures_are_assumed_and_said() -> None:
    found = answer("--gpus", "16384")
    assert found["inputs"]["mttf_h"] == pytest.approx(1.8) and "published" in found["sources"]["mttf_h"]
    assert found["sources"]["repair_h"] == "assumed" and "paper" in found["sources"]["restart_s"]
    assert set(found["sources"]) == set(found["inputs"]) - {"gpus", "gpus_per_node"}
    assert [one["standbys"] for one in found["standbys"]] == list(range(found["best"]["standbys"] + 4))
    assert found["best"] == min(found["standbys"], key=lambda one: one["wasted_gpu_h"])
    assert found["restart"]["ettr"] < found["standbys"][0]["ettr"] < found["best"]["ettr"]
    assert found["best"]["cost_week"] == pytest.approx(2.0 * found["best"]["wasted_gpu_h"])


def test_what_is_given_holds_over_everything() -> None:
    words = [
        "--mttf=3",
        "--downtime=5",
        "--no-standby=99",
        "--planned-downtime=1",
        "--restart=77",
        "--repair=9",
    ]
    words += ["--planned=0", "--price=3", "--checkpoint-interval=100", "--checkpoint-cost=2", "--most=1"]
    found = answer("--gpus=64", "--gpus-per-node=4", *words)
    assert set(found["sources"].values()) == {"given"}
    assert found["inputs"] == {
        "gpus": 64,
        "gpus_per_node": 4,
        "mttf_h": 3,
        "planned_per_day": 0,
        "downtime_s": 5,
        "no_standby_s": 99,
        "planned_s": 1,
        "restart_s": 77,
        "checkpoint_interval_s": 100,
        "checkpoint_cost_s": 2,
        "repair_h": 9,
        "price": 3,
    }
    assert len(found["standbys"]) == 2


def test_one_standby_pays_from_the_break_even_size_on() -> None:
    costs = ["--downtime=23", "--no-standby=300", "--restart=300", "--planned-downtime=16"]
    size = answer("--gpus=1024", *costs)["break_even_gpus"]
    for gpus, pays in ((size, True), (size - 8, False)):
        none, one = answer(f"--gpus={gpus}", "--most=1", *costs)["standbys"]
        assert (one["wasted_gpu_h"] < none["wasted_gpu_h"]) == pays
    assert answer("--gpus=8", "--downtime=9", "--no-standby=9")["break_even_gpus"] is None


def test_the_mttf_is_measured_by_sacct(tmp_path: Path) -> None:
    (tmp_path / "sacct.txt").write_text(SACCT)
    found = answer("--gpus=128", "--sacct-file=sacct.txt")
    assert found["inputs"]["mttf_h"] == pytest.approx(SACCT_NODE_HOURS / 2 / 16)
    assert "2 NODE_FAIL" in found["sources"]["mttf_h"] and "± 71%" in found["sources"]["mttf_h"]


def test_sacct_itself_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "sacct"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\ncat <<END\n{SACCT}END\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert answer("--gpus=128", "--sacct-days=30")["inputs"]["mttf_h"] == pytest.approx(
        SACCT_NODE_HOURS / 2 / 16
    )
    assert "--starttime=now-30days" in (tmp_path / "asked").read_text()
    program.write_text("#!/bin/sh\necho 'Slurm accounting storage is disabled' >&2\nexit 1\n")
    done = run("--gpus=128", "--sacct-days=30")
    assert done.exit_code == 1 and "accounting storage is disabled: give --mttf" in done.output


def test_a_job_tells_its_own_failures_and_downtimes(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("job: {nodes: 4}\ntrain: {module: this}\n")
    entries: list[dict[str, Any]] = [{"at": 0.0, "what": "started"}]
    for at, seconds in ((3600.0, 2.0), (7200.0, 4.0)):
        entries.append({"at": at, "what": "recovered"})
        entries.append({"at": at + 1, "what": "downtime", "downtime_s": seconds, "agreed_at": at})
    entries.append({"at": 36000.0, "what": "downtime", "downtime_s": 0.5})
    (tmp_path / "timeline.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    found = answer("--gpus=64", f"--job={tmp_path}")
    assert found["inputs"]["mttf_h"] == pytest.approx(5.0 * 4 / 8)
    assert found["inputs"]["downtime_s"] == 3.0 and found["inputs"]["planned_s"] == 0.5
    assert "mean of 2" in found["sources"]["downtime_s"]


def test_a_benchmark_that_is_there_is_used(tmp_path: Path) -> None:
    result = tmp_path / "build" / "bench" / "downtime.json"
    result.parent.mkdir(parents=True)
    result.write_text(json.dumps({"figures": {"process_death_s": 0.2, "frozen_s": 2.0, "other": 9}}))
    found = answer("--gpus=64")
    assert (
        found["inputs"]["downtime_s"] == pytest.approx(1.1) and "measured" in found["sources"]["downtime_s"]
    )
    assert answer("--gpus=64", "--bench=/dev/null")["inputs"]["downtime_s"] > 20.0
    result.write_text("{}")
    assert run("--gpus=64").exit_code == 2


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "Missing option '--gpus'"),
        (["--gpus=0"], "0 is not in the range"),
        (["--gpus=many"], "'many' is not a valid integer"),
        (["--gpus=12"], "--gpus 12: expected a multiple of --gpus-per-node 8"),
        (["--gpus=64", "--mttf=0"], "0.0 is not in the range x>0"),
        (["--gpus=64", "--mttf=nan"], "nan is no number of anything"),
        (["--gpus=64", "--repair=inf"], "inf is no number of anything"),
        (["--gpus=64", "--price=-1"], "is not in the range"),
        (
            ["--gpus=64", "--downtime=100", "--no-standby=50"],
            "--no-standby 50: expected at least --downtime, 100",
        ),
        (["--gpus=64", "--checkpoint-cost=0"], "expected --checkpoint-interval as well"),
        (["--gpus=64", "--mttf=2", "--sacct-days=3"], "--mttf and --sacct-days: expected one way"),
        (["--gpus=64", "--sacct-file=nowhere"], "--sacct-file nowhere: No such file"),
        (["--gpus=64", "--sacct-file=/dev/null"], "expected lines of JobIDRaw"),
        (["--gpus=64", "--bench=nowhere"], "--bench nowhere: there is no such file"),
        (["--gpus=64", "--png=no/where.png"], "--png"),
        (["--gpus=1048576", "--repair=1000"], "--repair 1000: expected less, found"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(words: list[str], expected: str) -> None:
    done = run(*words)
    assert done.exit_code == 2 and expected in done.output
    (line,) = [line for line in done.output.splitlines() if line.startswith("Error: ")]
    assert expected in line and "Traceback" not in done.output


def test_no_failure_in_the_record_is_no_mttf(tmp_path: Path) -> None:
    (tmp_path / "sacct.txt").write_text("101|COMPLETED|16|36000\n")
    done = run("--gpus=64", "--sacct-file=sacct.txt")
    assert done.exit_code == 2 and "no job ended NODE_FAIL in 160 node hours" in done.output


def test_people_see_a_table_and_bars_in_80_columns() -> None:
    done = run("--gpus=131072")
    assert done.exit_code == 0, done.output
    assert max(map(len, done.output.splitlines())) <= 80 and "\x1b" not in done.output
    best = answer("--gpus=131072")["best"]["standbys"]
    assert f"{best} standbys  ←" in done.output and "restart " in done.output
    assert len([line for line in done.output.splitlines() if "█" in line]) <= 18
    assert f"Least is wasted with {best} standbys" in done.output


def test_of_very_many_standbys_some_are_shown() -> None:
    found = answer("--gpus=1048576", "--repair=5")
    numbers = [one["standbys"] for one in found["standbys"]]
    assert found["best"]["standbys"] in numbers and numbers[0] == 0 and len(numbers) <= 130
    assert numbers[-1] == found["best"]["standbys"] + 3


def test_the_published_figures_are_met_at_their_sizes() -> None:
    assert (published_mttf_h(1024), published_mttf_h(16384)) == pytest.approx((7.9, 1.8))
    assert published_mttf_h(131072) == pytest.approx(0.225) and 1.8 < published_mttf_h(4096) < 7.9
    assert paper_restart(1024).seconds == pytest.approx(300.0) and paper_restart(8192).seconds == 388.0
    assert paper_planned(512).seconds == pytest.approx(14.2) and paper_planned(8).seconds == 11.5
    assert paper_unplanned(1024, 2.0).seconds == pytest.approx(23.1)


def test_it_starts_without_numpy_and_torch() -> None:
    code = (
        "import sys; from tm_slurm.cli.app import main; main(['plan', '--gpus=64', '--json'], "
        "standalone_mode=False); print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(done.stdout) and not {"torch", "numpy", "matplotlib"} & set(done.stderr.split())
