"""py-spy at a running process: its samples as stacks of functions, and what of them costs the most."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PY_SPY = str(Path(sys.executable).with_name("py-spy"))
READY = "Sampling process"
NAMELESS = "?"
TELL_NOTHING = frozenset({NAMELESS, "pthread_cond_wait", "std::condition_variable::wait"})
MAIN = "_run_module_as_main"
"""Below it is what `python -m` runs."""

ATTACH_S, END_S = 30.0, 60.0
_RAW_FRAME = re.compile(r"(?P<function>.*) \((?P<file>[^()]*)\)")
_PACKAGES = re.compile(r".*/(?:site|dist)-packages/|.*/lib/python3\.\d+/")
_LINE = re.compile(r":\d+$")
_ADDRESS = re.compile(r"0x[0-9a-f]+")


@dataclass(frozen=True)
class Frame:
    """A function that is on the stack. `file`: below the folder of packages, or below the checkout; of a
    native one its library."""

    function: str
    file: str

    @classmethod
    def of(cls, function: str, file: str, root: Path) -> Frame:
        short = _PACKAGES.sub("", _LINE.sub("", file)).removeprefix(f"{root}/")
        if short.startswith("/"):
            short = Path(short).name
        return cls(NAMELESS if _ADDRESS.fullmatch(function) else function, short)

    @property
    def name(self) -> str:
        """Without the class that it belongs to."""
        return self.function.rpartition(".")[2]


Stack = tuple[Frame, ...]
"""From the outermost to the innermost."""


@dataclass(frozen=True)
class Span:
    """A stack of the main thread, and from when to when it was seen, in seconds of this recording."""

    begin_s: float
    end_s: float
    stack: Stack

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s

    def has(self, name: str) -> bool:
        return any(frame.name == name for frame in self.stack)


class Recording:
    """py-spy at one process, from `begin` (it samples then) to `end`; the process is not stopped for it
    unless it is asked for native frames, which cannot be had otherwise."""

    def __init__(self, pid: int, output: Path, *, form: str, rate: int, native: bool = False) -> None:
        self.pid, self.output = pid, output
        words = [PY_SPY, "record", "--pid", str(pid), "--format", form, "--rate", str(rate)]
        words += ["--idle", "--function", "--full-filenames", "--output", str(output)]
        words += ["--native"] if native else ["--nonblocking"]
        self._errors = output.with_suffix(".said")
        with self._errors.open("wb") as said:
            self._process = subprocess.Popen(words, stdout=said, stderr=said)

    def await_begin(self) -> None:
        """Until it samples; RuntimeError when it does not within ATTACH_S."""
        deadline = time.monotonic() + ATTACH_S
        while READY not in self._errors.read_text(errors="replace"):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.abandon()
                raise RuntimeError(f"py-spy does not sample process {self.pid}: {self._said()}")
            time.sleep(0.01)

    def end(self) -> Path:
        """The file that it has written. It ends by itself when the process does. RuntimeError when there is
        none within END_S."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.abandon()
        if not self.output.exists() or not self.output.stat().st_size:
            raise RuntimeError(f"py-spy has written nothing of process {self.pid}: {self._said()}")
        return self.output

    def abandon(self) -> None:
        """End it, whatever it has."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def _said(self) -> str:
        return " ".join(self._errors.read_text(errors="replace").split())[-300:]


def raw_stacks(text: str, root: Path) -> Counter[Stack]:
    """Of a recording in the form `raw`: how often each stack was seen. ValueError for a line of another
    form."""
    found: Counter[Stack] = Counter()
    for line in text.splitlines():
        stack, _, count = line.rpartition(" ")
        frames = []
        for part in stack.split(";"):
            match = _RAW_FRAME.fullmatch(part)
            frames.append(
                Frame.of(match["function"], match["file"], root) if match else Frame(part, "native")
            )
        found[tuple(frames)] += int(count)
    return found


def is_training(stack: Stack) -> bool:
    """Whether it is one of the main thread, and whole: what is read of a process that goes on may be torn."""
    return any(frame.function == MAIN for frame in stack)


def main_thread(stacks: Counter[Stack]) -> Counter[Stack]:
    """Those of the thread that trains."""
    return Counter({stack: count for stack, count in stacks.items() if is_training(stack)})


def spans(events: Iterable[dict[str, Any]], root: Path) -> list[Span]:
    """Of a recording in the form `chrometrace`: what the main thread did when, in order."""
    threads: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        threads.setdefault(int(event["tid"]), []).append(event)
    every = [span for thread in threads.values() for span in _spans_of(thread, root)]
    return sorted((span for span in every if is_training(span.stack)), key=lambda span: span.begin_s)


def _spans_of(events: list[dict[str, Any]], root: Path) -> list[Span]:
    stack: list[Frame] = []
    found: list[Span] = []
    before = 0.0
    for event in events:
        now = float(event["ts"]) / 1e6
        if stack and now > before:
            found.append(Span(before, now, tuple(stack)))
        before = now
        if event["ph"] == "B":
            stack.append(Frame.of(event["name"], str(event["args"]["filename"]), root))
        elif stack:
            stack.pop()
    return found


def read_spans(path: Path, root: Path) -> list[Span]:
    return spans(json.loads(path.read_text()), root)


def named(stack: Stack) -> Frame:
    """What a stack is counted as: its innermost function; or what has called that, if it has no name (of a
    library without symbols only the exported functions have one) or says only that it waits."""
    return next((frame for frame in reversed(stack) if frame.function not in TELL_NOTHING), stack[-1])


def ours(stack: Stack) -> str | None:
    """The innermost function of this project that has called it, if it is not one itself."""
    frames = [frame for frame in stack if frame.file.startswith("tm_slurm/")]
    return f"{frames[-1].file}:{frames[-1].function}" if frames and frames[-1] != named(stack) else None


def largest(costs: Counter[Stack] | dict[Stack, float], count: int = 3) -> list[dict[str, Any]]:
    """The `count` functions with the most of it: share, file, function, and what of ours has called most of
    it."""
    total = sum(costs.values())
    by_frame: dict[Frame, float] = {}
    callers: dict[Frame, Counter[str | None]] = {}
    for stack, cost in costs.items():
        frame = named(stack)
        by_frame[frame] = by_frame.get(frame, 0.0) + cost
        callers.setdefault(frame, Counter())[ours(stack)] += cost  # type: ignore[assignment]
    rows = sorted(by_frame.items(), key=lambda item: -item[1])[:count]
    return [
        {
            "share": cost / total,
            "file": frame.file,
            "function": frame.function,
            "called_by": callers[frame].most_common(1)[0][0],
        }
        for frame, cost in rows
    ]
