"""Slurm by pyslurm: about 1 ms a question instead of a process each.

pyslurm calls libslurm, whose structures change from release to release: a wrong match crashes, and libslurm
ends its process when it finds no configuration. So it runs in a process of its own; when that ends, or does
not answer in time, the command line is asked, and the next question starts another.

Only the frequent questions go there. What changes something, and reservations (pyslurm has no word for the
flag TIME_FLOAT), stay with the command line.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import selectors
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import IO, Any

from tm_slurm.slurm import environment
from tm_slurm.slurm.command_line import CommandLine, is_no_answer
from tm_slurm.slurm.hostlist import HostlistError, expand
from tm_slurm.slurm.interface import JobInfo, NodeInfo, PartitionInfo, SlurmRefused, SlurmUnavailable
from tm_slurm.slurm.node_state import NodeState

log = logging.getLogger("tm_slurm.slurm")

WORKER = "tm_slurm.slurm.pyslurm_worker"
FAILURES = 3
"""So often in a row it may give no answer before it is left alone."""

LEFT_ALONE_S = 300.0

SAID_BYTES = 2000


def is_installed() -> bool:
    """Whether there is a pyslurm to import."""
    return importlib.util.find_spec("pyslurm") is not None


class PySlurm(CommandLine):
    """The Slurm interface by pyslurm, beside the command line. Safe to use from several threads."""

    def __init__(self, *, timeout_s: float = 10.0, strict: bool = False) -> None:
        """`timeout_s`: how long one question may take before it counts as not answered. `strict`:
        SlurmUnavailable where else the command line would be asked."""
        super().__init__(timeout_s=timeout_s)
        self._lock = threading.Lock()
        self._strict = strict
        self._worker: _Worker | None = None
        self._failures = 0
        self._not_before = 0.0

    def nodes(self, names: Sequence[str]) -> dict[str, NodeInfo]:
        """Return what Slurm says of each of `names`; a name that Slurm does not know is left out."""
        if not names:
            return {}
        fields = self._ask("nodes", list(names))
        if fields is None:
            return super().nodes(names)
        try:
            found = [
                NodeInfo(**{**f, "state": NodeState.parse(f["state"]), "partitions": tuple(f["partitions"])})
                for f in fields
            ]
        except ValueError as error:
            raise SlurmUnavailable(f"pyslurm: nodes: {error}") from error
        if not found:
            raise SlurmRefused(f"Node {names[0]} not found")
        return {info.name: info for info in found}

    def job(self, job_id: int) -> JobInfo:
        """Return what Slurm says of a job, also for some minutes after its end (MinJobAge)."""
        fields = self._ask("job", job_id)
        if fields is None:
            return super().job(job_id)
        if fields["job_id"] != job_id:
            raise SlurmUnavailable(f"pyslurm: job {job_id}: the answer is about job {fields['job_id']}")
        names = [name for name in fields.pop("reservations").split(",") if name]
        try:
            return JobInfo(
                **{**fields, "nodes": tuple(expand(fields["nodes"])), "reservations": tuple(names)}
            )
        except HostlistError as error:
            raise SlurmUnavailable(f"pyslurm: job {job_id}: {error}") from error

    def partitions(self) -> dict[str, PartitionInfo]:
        """Return the partitions that this user can see."""
        answer = self._ask("partitions", None)
        if answer is None:
            return super().partitions()
        try:
            found = [PartitionInfo(**{**f, "nodes": tuple(expand(f["nodes"]))}) for f in answer]
        except HostlistError as error:
            raise SlurmUnavailable(f"pyslurm: partitions: {error}") from error
        return {info.name: info for info in found}

    def close(self) -> None:
        """End the process that asks; another question starts another."""
        with self._lock:
            self._end()

    def _ask(self, question: str, of: Any) -> Any:
        """The answer; None where the command line is to be asked instead."""
        with self._lock:
            if time.monotonic() < self._not_before:
                return None
            try:
                if self._worker is None:
                    self._worker = self._start()
                said = self._worker.ask({"ask": question, "of": of}, self.timeout_s)
                if "unavailable" in said:
                    raise SlurmUnavailable(f"pyslurm: {question}: {said['unavailable']}")
            except SlurmUnavailable as error:
                self._end()
                if self._strict:
                    raise
                self._failures += 1
                if self._failures >= FAILURES:
                    self._failures, self._not_before = 0, time.monotonic() + LEFT_ALONE_S
                log.warning("the command line is asked instead: %s", error)
                return None
            self._failures = 0
        refused = str(said.get("refused", ""))
        if is_no_answer(refused):
            raise SlurmUnavailable(f"pyslurm: {question}: {refused}")
        if refused:
            raise SlurmRefused(refused)
        return said["answer"]

    def _start(self) -> _Worker:
        """A process that asks a controller of its own release."""
        worker = _Worker()
        try:
            said = worker.ask({"ask": "releases", "of": None}, self.timeout_s)
            library, controller = said["answer"]["library"], said["answer"]["controller"]
        except (SlurmUnavailable, KeyError) as error:
            worker.end()
            if isinstance(error, SlurmUnavailable):
                raise
            raise SlurmUnavailable(f"pyslurm: {said}") from None
        if library != controller:
            worker.end()
            self._failures = FAILURES  # it will not be another before somebody installs another
            raise SlurmUnavailable(f"pyslurm has libslurm {library}, slurmctld is {controller}")
        return worker

    def _end(self) -> None:
        if self._worker is not None:
            self._worker.end()
            self._worker = None


class _Worker:
    """The process, and the lines that go to and fro."""

    def __init__(self) -> None:
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (as long as the process)
        self._rest = b""
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", WORKER],
                env=environment.for_client(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                bufsize=0,
            )
        except OSError as error:
            self._said.close()
            raise SlurmUnavailable(f"pyslurm: cannot be run: {error.strerror}") from error

    def ask(self, question: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """The answer. Raises SlurmUnavailable; then this process is of no more use."""
        deadline = time.monotonic() + timeout_s
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: there will be no answer
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise SlurmUnavailable(f"pyslurm: {question['ask']}: no answer within {timeout_s:g} s")
                read = self._process.stdout.read(1 << 16)
                if not read:
                    raise SlurmUnavailable(f"pyslurm: {question['ask']}: {self._how_it_ended()}")
                self._rest += read
        line, self._rest = self._rest.split(b"\n", 1)
        try:
            return dict(json.loads(line))
        except (ValueError, TypeError):
            raise SlurmUnavailable(f"pyslurm: {question['ask']}: {line[:120]!r}") from None

    def _how_it_ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        self._said.seek(0)
        words = " ".join(self._said.read(SAID_BYTES).decode(errors="replace").split())
        return f"its process ended with {self._process.poll()}: {words}"

    def end(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._process.kill()
        self._process.wait()
        self._said.close()
