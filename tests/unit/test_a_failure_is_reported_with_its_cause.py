"""Who looks for the cause of a failure finds the traceback, the step and the data position."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from decisions_world import World

from tm_slurm.agent.ranks import TRACEBACK_CHARS, _end_of, last_traceback
from tm_slurm.coordinator.resolving import where_it_crashed
from tm_slurm.submit.verdict import end_by_verdict

ONE = """Traceback (most recent call last):
  File "train.py", line 3, in step
    raise KeyError(1)
KeyError: 1"""

CHAIN = f"""{ONE}

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "train.py", line 5, in step
    raise ValueError("this batch is broken")
ValueError: this batch is broken"""

CRASH = """Fatal Python error: Segmentation fault

Thread 0x00007f657a9c2b81 (most recent call first):
  File "threading.py", line 324 in wait
  File "threading.py", line 607 in run

Current thread 0x00007f657a9c2b80 (most recent call first):
  File "model.py", line 13 in kernel
  File "train.py", line 5 in <module>"""


def test_the_last_traceback_is_found_with_what_led_to_it() -> None:
    assert last_traceback(f"loss 1.0\n{ONE}\nnever mind\n{CHAIN}\n") == CHAIN
    assert last_traceback(f"loss 1.0\n{CHAIN}\nnever mind\n{ONE}\n") == ONE
    assert last_traceback("Killed") == ""


def test_a_crash_in_native_code_says_where_it_was(tmp_path: Path) -> None:
    assert last_traceback(f"{ONE}\n{CRASH}\n") == CRASH and last_traceback(f"{CRASH}\n{ONE}\n") == ONE
    world = World(ranks_per_node=2)
    world.start()
    failing = {"rank": 3, "step": 7, "position": {}}
    for node, slot in (("n3", 1), ("n6", 0)):
        world.dies(
            node, slot, how="signal SIGSEGV", code=-11, tail=CRASH[-60:], traceback=CRASH, failing=failing
        )
    (end,) = world.ends()
    assert end.reason.endswith('its log: x.log): File "model.py", line 13 in kernel')
    assert where_it_crashed(CRASH.replace("Current t", "T")) == "Fatal Python error: Segmentation fault"
    assert where_it_crashed(ONE) == ""


def test_a_rank_process_writes_where_it_crashed(tmp_path: Path) -> None:
    log_path = tmp_path / "rank.log"
    with log_path.open("wb") as output:
        code = "import ctypes; ctypes.string_at(0)"
        subprocess.run([sys.executable, "-X", "faulthandler", "-c", code], stderr=output, check=False)
    written = _end_of(log_path)
    assert last_traceback(written).startswith("Fatal Python error: ") and "Extension modules" not in written


def test_of_a_very_long_traceback_both_ends_are_kept() -> None:
    found = last_traceback(f"{ONE[:60]}{'x' * 2 * TRACEBACK_CHARS}\nKeyError: 1")
    assert len(found) < TRACEBACK_CHARS + 10
    assert found.startswith("Traceback") and found.endswith("KeyError: 1")


def test_a_step_that_kills_twice_is_reported_with_the_first_ones_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World(ranks_per_node=2)
    world.start()
    for node, slot, rank in (("n3", 1, 3), ("n6", 0, 2)):
        failing = {"rank": rank, "step": 7, "position": {"data": "{'at': 224}"}}
        world.dies(node, slot, code=1, tail=CHAIN, traceback=f"{CHAIN} of {rank}", failing=failing)
    (end,) = world.ends()
    assert "first rank 3 on n3 in step 7, data at {'at': 224}" in end.reason
    assert end.reason.endswith("ValueError: this batch is broken")
    assert end.failure is not None and end.failure["traceback"] == f"{CHAIN} of 3"
    assert (end.failure["rank"], end.failure["node"], end.failure["step"]) == (3, "n3", 7)
    assert world.notes("ended")[0]["failure"] == end.failure
    assert world.notes("failed")[0]["traceback"] == f"{CHAIN} of 3"
    (tmp_path / "verdict.json").write_text(json.dumps(world.state.verdict))
    assert end_by_verdict(tmp_path) == 1
    assert f"{CHAIN} of 3" in capsys.readouterr().out
