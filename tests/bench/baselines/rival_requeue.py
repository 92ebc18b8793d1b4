"""Slurm's requeue: the whole job ends, waits in the queue, and starts again from its checkpoint, on nodes
that are well."""

from __future__ import annotations

import time
from typing import ClassVar

from baselines.rival import RANKS, Rival
from tm_slurm.slurm.interface import REQUEUE_PAUSE_S

LOOK_S = 0.3
GOING = {"RUNNING", "PENDING", "COMPLETING", "REQUEUED", "CONFIGURING", "NODE_FAIL"}


class Requeue(Rival):
    name = "requeue"
    what = "Slurm requeue through submitit, a checkpoint each step"
    every: ClassVar[int] = 1
    tuning: ClassVar = {
        "checkpoint_every": 1,
        "srun": "--kill-on-bad-exit=1",
        "begin": f"asked for {REQUEUE_PAUSE_S} s after the requeue; Slurm itself waits for 120 s",
        "reserve": "one idle node, so that nothing is waited for in the queue",
        "scheduler": "the local cluster's: sched_interval=1, SlurmdTimeout=10",
        "planned": "submitit's preemption signal at the instant of the drain",
    }
    packages = ("torch", "submitit")
    _job: str
    _fields: dict[str, str]
    _looked_at = -LOOK_S
    _asked_for = ""

    def start(self) -> None:
        words = ["-m", "baselines.requeued_training", str(self.site.files.directory), str(RANKS), "1"]
        self._job = self.site.python(*words, timeout_s=60.0).split()[-1]

    def leave(self, node: str, rank: int) -> None:
        self.site.run("scancel", "--signal=USR2", self._job)

    def lost(self, fault: str, node: str, rank: int) -> None:
        """The batch script's last line puts it back into the queue, or Slurm does when it has missed the
        node."""

    def look_after(self) -> None:
        """Once it is back in the queue, ask for an early start."""
        found = self._told()
        if found["JobState"] == "PENDING" and found["EligibleTime"] != self._asked_for:
            soon = f"StartTime=now+{REQUEUE_PAUSE_S}seconds"
            self.site.run("scontrol", "update", f"JobId={self._job}", soon, check=False)
            self._looked_at = -LOOK_S
            self._asked_for = self._told()["EligibleTime"]

    def why_not(self) -> str | None:
        state = self._told()["JobState"]
        return None if state in GOING else f"the job is {state}"

    def _told(self) -> dict[str, str]:
        """What Slurm says of the job; not asked more often than makes sense."""
        if time.monotonic() - self._looked_at >= LOOK_S:
            shown = self.site.run("scontrol", "-o", "show", "job", self._job)
            self._fields = dict(word.partition("=")[::2] for word in shown.split() if "=" in word)
            self._looked_at = time.monotonic()
        return self._fields
