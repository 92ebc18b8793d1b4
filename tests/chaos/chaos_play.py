"""Plays a plan against a running job, paced by the steps of the training and the entries of its timeline."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from chaos_faults import INFLICT, LOSES_THE_NODE, MEND, SLOW
from chaos_plan import KINDS, STANDBYS, START_GATE, Fault, Plan
from training_jobs import TrainingJob

from tm_slurm.coordinator.election import LeaderFile
from tm_slurm.localcluster import LocalClusterError
from tm_slurm.observe.follow import JsonLines

LOOK_S = 0.003
ASK_SLURM_S = 2.0
ENTRY_LIMIT_STEPS = 50
"""A fault that waits for an entry of the timeline comes without it after so many steps."""

RUN_LIMIT_S = 240.0


class DidNotEnd(AssertionError):
    """The training has come to no end within the limit."""


@dataclass
class Mending:
    """What is undone at a step."""

    step: int
    kind: str
    node: str


@dataclass
class Play:
    """One job under one plan. `events`: what was really done, and when."""

    job: TrainingJob
    plan: Plan
    limit_s: float = RUN_LIMIT_S
    events: list[dict[str, Any]] = field(default_factory=list)
    batch_host_lost: bool = False

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._steps = JsonLines(self.job.files.job_dir / "steps.jsonl")
        self._timeline = JsonLines(self.job.files.job_dir / "timeline.jsonl")
        self.step = -1
        self.entries: list[dict[str, Any]] = []
        self._mendings: list[Mending] = []
        self._beside: list[threading.Thread] = []
        self._batch_host: str | None = None
        self._asked_slurm_at = 0.0
        self._gone = False

    def run(self) -> None:
        """Until the verdict. DidNotEnd when none comes."""
        self.job.note("started")
        self._batch_host = self.job.info().batch_host
        if self.plan.all_warm:
            self.job.warm(STANDBYS)
        self.job.open_gate(START_GATE)
        last = START_GATE
        seen = 0
        for fault in self.plan.faults:
            if fault.when.startswith("step"):
                due = last + int(fault.when.removeprefix("step +"))
                self._go_on_until(lambda: self.step >= due)  # noqa: B023
                last = due
            elif fault.when.startswith("on"):
                self._await_entry(fault.when.removeprefix("on "), seen)
            if self._over():
                self._say(fault, None, "the training had ended before")
                continue
            seen = len(self.entries)
            self._inflict(fault)
        self._go_on_until(lambda: False)
        for thread in self._beside:
            thread.join(60.0)

    def _await_entry(self, what: str, since: int) -> None:
        began = self.step

        def come() -> bool:
            new = any(entry["what"] == what for entry in self.entries[since:])
            return new or self.step > began + ENTRY_LIMIT_STEPS

        self._go_on_until(come)

    def _go_on_until(self, test: Any) -> None:
        """Look, and mend what is due, until the test holds or the job has ended."""
        while True:
            self.step = max([self.step, *(int(step["step"]) for step in self._steps.new())])
            self.entries += self._timeline.new()
            for mending in [m for m in self._mendings if m.step <= self.step]:
                self._mendings.remove(mending)
                self._mend(mending)
            if test() or self._over():
                return
            if time.monotonic() - self._began > self.limit_s:
                raise DidNotEnd(f"no end within {self.limit_s:.0f} s, at step {self.step}")
            time.sleep(LOOK_S)

    def _over(self) -> bool:
        """Whether there is a verdict, or Slurm has ended the job without one."""
        if not self._gone and time.monotonic() - self._asked_slurm_at > ASK_SLURM_S:
            self._asked_slurm_at = time.monotonic()
            self._gone = self.job.info().state not in ("RUNNING", "COMPLETING")
        return self._gone or self.job.files.verdict() is not None

    # ---- doing it ----

    def _inflict(self, fault: Fault) -> None:
        kind = KINDS[fault.kind]
        node = self._node_of(fault)
        if node is not None and kind.spares_batch_host and node == self._batch_host:
            node = self._another_than(node)
        if node is None:
            self._say(fault, None, "there was no such node")
            return
        done = "done"
        try:
            INFLICT[fault.kind](self.job, node)
        except (AssertionError, ProcessLookupError, LocalClusterError) as error:
            done = f"could not be done: {error}"
        self._say(fault, node, done)
        if node == self._batch_host and fault.kind in LOSES_THE_NODE:
            self.batch_host_lost = True
        if fault.mends_after is not None:
            self._mendings.append(Mending(self.step + fault.mends_after, fault.kind, node))

    def _mend(self, mending: Mending) -> None:
        def mend() -> None:
            done = "mended"
            try:
                MEND[mending.kind](self.job, mending.node)
            except LocalClusterError as error:
                done = f"could not be mended: {error}"
            event = {"at": time.time(), "step": self.step, "mended": mending.kind, "node": mending.node}
            self.events.append({**event, "how": done})

        if mending.kind in SLOW:
            thread = threading.Thread(target=mend, daemon=True)
            thread.start()
            self._beside.append(thread)
        else:
            mend()

    def _say(self, fault: Fault, node: str | None, how: str) -> None:
        event = {"at": time.time(), "step": self.step, "fault": str(fault).strip(), "node": node, "how": how}
        self.events.append(event)

    # ---- on whom ----

    def _node_of(self, fault: Fault) -> str | None:
        status = self.job.files.status()
        word, _, number = fault.target.partition(" ")
        if word == "leader":
            known = LeaderFile.read(self.job.files.job_dir)
            return known.node if known is not None else None
        if word == "joiner":
            return self._joiner(status)
        if status is None:
            return None
        if word == "rank":
            return str(next(rank["node"] for rank in status["ranks"] if rank["rank"] == int(number)))
        standbys = self._standbys(status)
        return standbys[int(number) % len(standbys)] if standbys else None

    @staticmethod
    def _standbys(status: dict[str, Any]) -> list[str]:
        return [str(node["node"]) for node in status["nodes"] if node["standing"] == "standby"]

    def _joiner(self, status: dict[str, Any] | None) -> str | None:
        """Who takes ranks over now, as far as the timeline tells; else the first standby."""
        for entry in reversed(self.entries):
            if entry.get("pairs"):
                return str(entry["pairs"][0]["joiner"])
            if entry["what"] in ("failed", "started"):
                break
        standbys = self._standbys(status) if status is not None else []
        return standbys[0] if standbys else None

    def _another_than(self, node: str) -> str | None:
        with contextlib.suppress(TypeError, KeyError):
            status = self.job.files.status()
            assert status is not None
            return next(str(rank["node"]) for rank in status["ranks"] if rank["node"] != node)
        return None
