"""What py-spy writes is read as it means it: the functions that cost the most, and what the sides of a switch
do."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import bench_profile
from profiles import Frame, largest, main_thread, raw_stacks, spans

ROOT = Path("/checkout")
RAW = """\
_run_module_as_main (<frozen runpy>:173);train_step (/checkout/tm_slurm/examples/char_gpt.py:84);\
_engine_run_backward (/venv/lib/python3.11/site-packages/torch/autograd/graph.py:966) 6
_run_module_as_main (<frozen runpy>:173);train_step (/checkout/tm_slurm/examples/char_gpt.py:84);\
Adam.step (/venv/lib/python3.11/site-packages/torch/optim/adam.py:214) 3
_run_module_as_main (<frozen runpy>:173);Vote.hold (/checkout/tm_slurm/runtime/vote.py:90) 1
Thread._bootstrap (/usr/lib/python3.11/threading.py:988);AgentLink._listen (/checkout/tm_slurm/x.py:77) 90
Module.named_modules (/venv/lib/python3.11/site-packages/torch/nn/modules/module.py:2836) 5
"""


def test_the_largest_costs_of_the_training_thread_are_named() -> None:
    stacks = main_thread(raw_stacks(RAW, ROOT))
    assert sum(stacks.values()) == 10, "neither another thread's nor a torn one"
    caller = "tm_slurm/examples/char_gpt.py:train_step"
    assert largest(stacks) == [
        {
            "share": 0.6,
            "file": "torch/autograd/graph.py",
            "function": "_engine_run_backward",
            "called_by": caller,
        },
        {"share": 0.3, "file": "torch/optim/adam.py", "function": "Adam.step", "called_by": caller},
        {"share": 0.1, "file": "tm_slurm/runtime/vote.py", "function": "Vote.hold", "called_by": None},
    ]


def test_native_functions_are_named_by_their_library_and_a_wait_by_who_waits() -> None:
    line = "_run_module_as_main (<frozen runpy>:173);f(int (&)(), x) (/site-packages/torch/lib/libtorch.so);"
    libc = "(/usr/lib/x86_64-linux-gnu/libc.so.6)"
    stacks = raw_stacks(f"{line}pthread_cond_wait {libc};0x7fb5fb4a3f16 {libc} 2\n", ROOT)
    assert next(iter(stacks))[1:] == (
        Frame("f(int (&)(), x)", "torch/lib/libtorch.so"),
        Frame("pthread_cond_wait", "libc.so.6"),
        Frame("?", "libc.so.6"),
    )
    cost = largest(stacks)[0]
    assert (cost["function"], cost["file"]) == ("f(int (&)(), x)", "torch/lib/libtorch.so"), (
        "whose cost it is"
    )
    assert largest(Counter()) == []


class Trace:
    """A recording in the form `chrometrace`."""

    def __init__(self, tid: int = 1) -> None:
        self.tid = tid
        self.events: list[dict[str, Any]] = []
        self.stack: list[str] = []

    def at(self, ms: float, *names: str) -> Trace:
        """From then on the stack is this."""
        stack = ["_run_module_as_main", *names]
        common = 0
        while common < min(len(stack), len(self.stack)) and stack[common] == self.stack[common]:
            common += 1
        for phase, changed in (("E", reversed(self.stack[common:])), ("B", stack[common:])):
            for name in changed:
                about = {"filename": f"/checkout/tm_slurm/{name.lower()}.py", "line": 1}
                self.events.append(
                    {"ph": phase, "name": name, "tid": self.tid, "ts": ms * 1000, "args": about}
                )
        self.stack = stack
        return self


def seconds(costs: dict[Any, float]) -> dict[str, float]:
    """By the innermost function."""
    return {stack[-1].function: pytest.approx(value) for stack, value in costs.items()}


def test_a_leaver_is_looked_at_from_the_switch_until_all_is_sent() -> None:
    trace = Trace().at(0, "train_step").at(50, "_leave", "capture").at(52, "_leave", "in_parallel", "send")
    trace.at(60, "_leave", "receive_message").at(70, "_leave", "await_resolution").at(99)
    found = bench_profile.leaver_s(spans(trace.events, ROOT))
    assert seconds(found) == {"capture": 0.002, "send": 0.008}


def test_a_joiner_is_looked_at_from_the_first_byte_until_its_first_step() -> None:
    trace = Trace().at(0, "train_step").at(5, "receive", "receive_message").at(50, "receive", "_take")
    trace.at(60, "_resume").at(61, "_begin_step").at(64, "train_step").at(90, "_begin_step").at(95)
    found = bench_profile.joiner_s(spans(trace.events, ROOT))
    assert seconds(found) == {"_take": 0.010, "_resume": 0.001, "_begin_step": 0.003}
    assert bench_profile.joiner_s(spans(Trace().at(0, "train_step").at(9).events, ROOT)) == {}


def test_a_stayer_is_looked_at_while_it_changes_its_links() -> None:
    trace = Trace().at(0, "train_step").at(50, "_at_boundary", "switch").at(51, "_at_boundary", "at_epoch")
    trace.at(52, "_at_boundary", "at_boundary").at(54, "train_step").at(90)
    other = Trace(tid=2)
    other.at(50, "_at_boundary", "switch").at(90)
    events = [
        {**event, "name": event["name"].replace("_run_module_as_main", "Thread._bootstrap")}
        for event in other.events
    ]
    found = bench_profile.stayer_s(spans([*trace.events, *events], ROOT))
    assert seconds(found) == {"switch": 0.001, "at_epoch": 0.001}
