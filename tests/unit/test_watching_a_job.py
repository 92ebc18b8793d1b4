"""`tm-slurm watch`: from a recorded job, cut wherever it may be looked at."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from recorded import DEATH, FIRST, LAST, RECORDED, SEATS, TIMELINE, parties
from rich.console import Console

from tm_slurm.cli.app import main
from tm_slurm.observe.live import LiveJob
from tm_slurm.observe.screen import screen, sparkline
from tm_slurm.observe.spoken import plain, spoken

TM_SLURM = str(Path(sys.executable).with_name("tm-slurm"))
LIMIT_S = 30.0


def index_of(what: str) -> int:
    """The last entry of a kind."""
    return max(n for n, entry in enumerate(TIMELINE) if entry["what"] == what)


def cut(directory: Path, entries: int, **changes: Any) -> LiveJob:
    """The recorded job when its timeline had so many entries; `changes` to its status."""
    job = Path(shutil.copytree(RECORDED, directory / "job", dirs_exist_ok=True))
    (job / "verdict.json").unlink()
    at = TIMELINE[entries - 1]["at"]
    (job / "timeline.jsonl").write_text("".join(f"{json.dumps(entry)}\n" for entry in TIMELINE[:entries]))
    steps = (RECORDED / "steps.jsonl").read_text().splitlines()
    told = [line for line in steps if json.loads(line)["at"] <= at]
    (job / "steps.jsonl").write_text("".join(f"{line}\n" for line in told))
    status = json.loads((RECORDED / "status.json").read_text())
    (job / "status.json").write_text(json.dumps({**status, "phase": "training", "at": at, **changes}))
    live = LiveJob(job)
    live.refresh()
    return live


def shown(live: LiveJob, width: int = 80, height: int = 24) -> str:
    now = live.events[-1]["at"] + 0.2 if live.events else 0.0
    console = Console(width=width, height=height, file=io.StringIO(), color_system=None)
    with console.capture() as taken:
        console.print(screen(live, "1", width=width, height=height, now=now))
    return taken.get()


@pytest.mark.parametrize("size", [(80, 24), (132, 50)])
def test_whenever_it_is_looked_at_it_fits(tmp_path: Path, size: tuple[int, int]) -> None:
    for entries in range(1, len(TIMELINE) + 1):
        lines = shown(cut(tmp_path, entries), *size).splitlines()
        assert len(lines) <= size[1] and max(map(len, lines)) <= size[0], entries


@pytest.mark.parametrize(
    ("what", "said", "bar"),
    [
        ("prepare", f"{parties(LAST)}: 0.", "[>] prepare  [ ] freeze  [ ] state  [ ] switch  [ ] resume"),
        ("prepared", f"{parties(LAST)}: 0.", "[x] prepare  [>] freeze  [ ] state  [ ] switch  [ ] resume"),
        ("recover", "ranks 3 lost: 0.", "[x] prepare  [>] freeze  [ ] state  [ ] switch  [ ] resume"),
        ("switching", f"{parties(LAST)}: 0.", "[x] prepare  [x] freeze  [>] state  [>] switch  [ ] resume"),
        ("recovered", f"{parties(DEATH)}: 0.", "[x] prepare  [x] freeze  [x] state  [x] switch  [>] resume"),
        (
            "downtime",
            f"{parties(LAST)}: downtime ",
            "[x] prepare  [x] freeze  [x] state  [x] switch  [x] resume",
        ),
    ],
)
def test_a_move_has_a_phase_bar(tmp_path: Path, what: str, said: str, bar: str) -> None:
    lines = [line.rstrip() for line in shown(cut(tmp_path, index_of(what) + 1)).splitlines()]
    assert bar in lines and any(line.startswith(said) for line in lines), lines


def test_a_job_at_work_is_seen_at_a_glance(tmp_path: Path) -> None:
    text = shown(cut(tmp_path, index_of("drained") + 1))
    for said in (
        "job 1  training  epoch 3  coordinator on n1 (term 1)  standbys: 1 of 1 warm",
        "/110  loss ",
        " tokens/s  ETTR 9",
        f"{SEATS[0]} rank 0 at 109",
        f"{DEATH['pairs'][0]['leaver']} standby, warm",
        f"{LAST['pairs'][0]['leaver']}: drain: fan is loud (from poll)",
    ):
        assert said in text, text


def test_tokens_are_those_of_the_config(tmp_path: Path) -> None:
    live = cut(tmp_path, len(TIMELINE))
    assert live.tokens_per_step == 8 * 64 * 4 and live.steps_per_s is not None
    assert live.tokens_per_s == pytest.approx(live.steps_per_s * 2048)
    config = live.files.job_dir / "config.yaml"
    config.write_text(config.read_text().replace("    seed: 1234", "    tokens_per_step: 7"))
    assert LiveJob(live.files.job_dir).tokens_per_step == 7
    config.write_text("job: 1")
    assert LiveJob(live.files.job_dir).tokens_per_step is None


def test_of_a_thousand_nodes_those_with_something_are_shown(tmp_path: Path) -> None:
    status = json.loads((RECORDED / "status.json").read_text())
    plenty = [{**status["nodes"][3], "node": f"g{n:04}", "notice": None} for n in range(1000)]
    noticed = {**plenty[0], "node": "odd", "notice": {"kind": "drain", "reason": "x"}}
    text = shown(cut(tmp_path, len(TIMELINE), nodes=[*plenty, *status["nodes"], noticed]))
    assert "odd rank " in text and "standby, warm" in text and " more" in text


def test_a_silent_coordinator_is_told(tmp_path: Path) -> None:
    assert "no word for 1" in shown(cut(tmp_path, 10, at=TIMELINE[9]["at"] - 10))


@pytest.mark.parametrize("values", [[1.0], [3.0, 2.0, 1.0], [1.0, float("nan"), float("inf"), 0.5] * 50])
def test_a_sparkline_is_as_wide_as_there_is_room(values: list[float]) -> None:
    assert len(sparkline(values, 40)) == min(40, len(values))


def test_it_goes_down_as_the_loss_does() -> None:
    assert sparkline([8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0], 8) == "█▇▆▅▄▃▂▁"


def test_what_an_administrator_wrote_steers_no_terminal(tmp_path: Path) -> None:
    hostile = "\x1b[2J\x07[red]x[/red]\x9b"
    entry = {"at": 1.0, "what": "event_drain", "node": "n1", "source": "poll", "reason": hostile}
    assert spoken(entry) == "n1: drain: ?[2J?[red]x[/red]? (from poll)"
    live = cut(tmp_path, 10)
    live.events.append(entry)
    assert "\x1b" not in shown(live) and "[red]x[/red]" in shown(live)
    assert plain("a\nb") == "a b"


def test_a_step_that_came_sooner_is_no_negative_downtime() -> None:
    entry = {"at": 1.0, "what": "downtime", "downtime_s": -0.07, "steady_step_s": 0.2}
    assert spoken(entry) == "downtime none (a step takes 0.200 s)"
    assert "0.070 s" in str(spoken({**entry, "downtime_s": 0.07}))


def test_entries_of_another_version_end_nothing(tmp_path: Path) -> None:
    assert spoken({"at": 1.0, "what": "moved"}) == "moved" and spoken({"at": 1.0, "what": "new"}) == "new"


# ---- the command ----


def test_without_a_terminal_it_prints_lines() -> None:
    done = CliRunner().invoke(main, ["watch", str(RECORDED)])
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[-1] == "job 1 completed: all ranks have finished"
    for said in (
        "drain: disk is to be replaced",
        f"moved {parties(FIRST)}",
        f"recovered at step {DEATH['step']}: {parties(DEATH)}",
    ):
        assert any(said in line for line in lines), said
    assert any(re.fullmatch(r"\d\d:\d\d:\d\d  step \d+  loss [\d.]+", line) for line in lines)
    assert "\x1b" not in done.stdout


def test_as_json_it_prints_every_entry() -> None:
    done = CliRunner().invoke(main, ["watch", str(RECORDED), "--json"])
    entries = [json.loads(line) for line in done.stdout.splitlines()]
    assert [e["at"] for e in entries] == sorted(e["at"] for e in entries)
    assert sum(e["what"] != "step" for e in entries) == len(TIMELINE)


def test_a_job_that_failed_ends_it_with_1(tmp_path: Path) -> None:
    job = cut(tmp_path, 20).files.job_dir
    (job / "verdict.json").write_text(json.dumps({"state": "failed", "exit_code": 1, "reason": "bad luck"}))
    done = CliRunner().invoke(main, ["watch", str(job)])
    assert done.exit_code == 1 and done.stdout.endswith("job 1 failed: bad luck\n")


def in_a_terminal(words: list[str], environment: dict[str, str], until: str) -> tuple[int, str]:
    """Run in a terminal of 80 columns; Ctrl-C when it has shown `until`. Its exit code and all that it
    wrote."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    env = {**os.environ, "TERM": "xterm-256color", **environment}
    # What a shell starts with & ignores it.
    heeding = ["env", "--default-signal=INT", *words]
    process = subprocess.Popen(
        heeding, stdin=follower, stdout=follower, stderr=follower, env=env, close_fds=True
    )
    os.close(follower)
    text, deadline, sent = "", time.monotonic() + LIMIT_S, False
    try:
        while time.monotonic() < deadline:
            if not select.select([leader], [], [], 0.5)[0]:
                continue
            with contextlib.suppress(UnicodeDecodeError):
                data = os.read(leader, 65536)
                text += data.decode(errors="replace")
            if until in text and not sent:
                sent = True
                process.send_signal(signal.SIGINT)
    except OSError:  # it has closed its end
        pass
    finally:
        os.close(leader)
        process.kill() if process.poll() is None and time.monotonic() >= deadline else None
    return process.wait(LIMIT_S), text


@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1"}])
def test_ctrl_c_leaves_quietly(tmp_path: Path, environment: dict[str, str]) -> None:
    job = cut(tmp_path, index_of("switching") + 1, at=time.time() + 60).files.job_dir
    code, text = in_a_terminal([TM_SLURM, "watch", str(job)], environment, "switching at step")
    assert code == 0 and "Traceback" not in text and "Aborted" not in text
    assert text.count("\x1b[?1049h") == text.count("\x1b[?1049l") == 1  # the screen is as it was
    assert text.count("\x1b[?25l") <= text.count("\x1b[?25h")  # and so is the cursor
    coloured = re.search(r"\x1b\[(\d+;)*3\d", text) is not None
    assert coloured != bool(environment)


@pytest.mark.parametrize("words", [["watch"], ["report", "--json"], ["timeline"]])
def test_torch_is_not_imported(words: list[str]) -> None:
    program = "import sys; from tm_slurm.cli.app import main\n"
    program += "try: main()\nfinally: assert 'torch' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", program, *words, str(RECORDED)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
