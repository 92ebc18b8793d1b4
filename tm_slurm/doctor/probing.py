"""Asks tasks on several nodes, one question after the other, through the srun that has started them."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tm_slurm.slurm import environment

ANSWER_S = 20.0
END_S = 10.0

_BUSY = ("Unable to allocate resources", "Requested nodes are busy", "step creation temporarily disabled")

Answer = dict[str, Any]


class NoNodes(RuntimeError):
    """No task came to run on the nodes, or one fell silent; one line, with Slurm's words. `busy`: Slurm had
    no nodes to give, which says nothing of them."""

    def __init__(self, why: str, *, busy: bool = False) -> None:
        super().__init__(why)
        self.busy = busy


class Probing:
    """Tasks of `tm_slurm.doctor.probe` on `count` nodes: those of the job that this runs in, or of one that
    is asked for and must start within `wait_s` seconds. Ends with the `with`."""

    def __init__(
        self,
        directory: Path,
        count: int,
        *,
        wait_s: int,
        options: Sequence[str] = (),
        python: str = sys.executable,
    ) -> None:
        self._words = self._command(directory, count, wait_s, options, python)
        self._count = count
        self._wait_s = wait_s
        self._answers: queue.Queue[Answer | None] = queue.Queue()
        self._number = 0
        self._stderr: list[str] = []
        self.clocks: dict[str, tuple[float, float]] = {}
        """node to how far its clock is ahead of ours, seconds, and how uncertain that is"""

    @staticmethod
    def _command(directory: Path, count: int, wait_s: int, options: Sequence[str], python: str) -> list[str]:
        # Without --unbuffered, with which srun tears the lines of several tasks apart.
        words = ["srun", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", "--mpi=none"]
        words += ["--kill-on-bad-exit=0", "--wait=0", "--job-name=tm-slurm-doctor"]
        if environment.read(environment.JOB_ID):
            words.append("--overlap")
        else:
            words += [f"--immediate={wait_s}", "--time=2"]
        return [*words, *options, python, "-m", "tm_slurm.doctor.probe", str(directory)]

    def __enter__(self) -> Probing:
        inside = environment.read(environment.JOB_ID) is not None
        try:
            self._srun = subprocess.Popen(
                self._words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env=dict(os.environ) if inside else environment.for_client(),
                start_new_session=True,
            )
        except OSError as error:
            raise NoNodes(f"srun: {error.strerror}") from None
        self._readers = [
            threading.Thread(target=self._read_answers, daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        try:
            self.nodes = sorted(self._collect(self._count, self._wait_s + ANSWER_S, "hello"))
        except BaseException:  # an interrupt from the keyboard, too, must not leave srun waiting for nodes
            self._srun.terminate()
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def ask(self, ask: str, **fields: Any) -> dict[str, Answer]:
        """Each node's answer to one question, by node."""
        self._number += 1
        assert self._srun.stdin is not None
        try:
            self._srun.stdin.write(json.dumps({"ask": ask, "number": self._number, **fields}) + "\n")
            self._srun.stdin.flush()
        except OSError:
            raise self._no_nodes("srun has ended") from None
        return self._collect(len(self.nodes), ANSWER_S, ask)

    def ask_clocks(self) -> None:
        """Compare the clocks: a node's answer was given between our question and its arrival."""
        before = time.time()
        for node, answer in self.ask("clock").items():
            middle = (before + answer["arrived"]) / 2
            self.clocks[node] = (answer["clock"] - middle, (answer["arrived"] - before) / 2)

    def _collect(self, count: int, limit_s: float, what: str) -> dict[str, Answer]:
        found: dict[str, Answer] = {}
        until = time.monotonic() + limit_s
        while len(found) < count:
            try:
                answer = self._answers.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                said = f"{len(found)} of {count} nodes answered `{what}` within {limit_s:g} s"
                raise self._no_nodes(said) from None
            if answer is None:
                raise self._no_nodes("the tasks ended at once")
            if answer["to"] == what and answer.get("number", 0) == self._number:
                found[answer["node"]] = answer
        return dict(sorted(found.items()))

    def _read_answers(self) -> None:
        assert self._srun.stdout is not None
        for line in self._srun.stdout:
            try:
                answer = json.loads(line)
            except ValueError:  # a login script that talks
                continue
            if isinstance(answer, dict) and "to" in answer:
                self._answers.put({**answer, "arrived": time.time()})
        self._answers.put(None)

    def _read_errors(self) -> None:
        assert self._srun.stderr is not None
        for line in self._srun.stderr:
            self._stderr.append(" ".join(line.split()))

    def _no_nodes(self, otherwise: str) -> NoNodes:
        """With the last line that srun, or Python on a node, has said."""
        self._readers[1].join(1.0)
        said = [line for line in self._stderr if line and "queued and waiting" not in line]
        busy = any(phrase in line for line in said for phrase in _BUSY)
        telling = [line for line in said if "rror" in line and "task" not in line] or said
        return NoNodes(telling[-1] if telling else otherwise, busy=busy)

    def _end(self) -> None:
        assert self._srun.stdin is not None and self._srun.stdout is not None
        assert self._srun.stderr is not None
        with contextlib.suppress(OSError):
            self._srun.stdin.close()
        for insist in (self._srun.terminate, self._srun.kill):
            try:
                self._srun.wait(END_S)
                break
            except subprocess.TimeoutExpired:
                insist()
        self._srun.wait(END_S)
        for reader in self._readers:
            reader.join(END_S)
        self._srun.stdout.close()
        self._srun.stderr.close()
