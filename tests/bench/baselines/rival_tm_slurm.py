"""tm_slurm itself; and its parts switched off one by one, down to a naive migration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

from training_jobs import TM_SLURM, TrainingJob

from baselines.rival import RANKS, Rival
from baselines.training import STEPS

QUICK = {"keepalive_s": 0.5, "heartbeat_s": 0.1}
"""As long as the others' timeouts for a peer that has fallen silent; the default is 2 s."""


class TmSlurm(Rival):
    """A job of 4 nodes and one standby, submitted as a user does."""

    name = "tm_slurm"
    what = "tm_slurm with one standby"
    settings: ClassVar[dict[str, dict[str, Any]]] = {"policy": QUICK}
    """section → key → value, beyond the defaults"""
    tuning: ClassVar = {**settings, "reserve": "one standby"}
    job: TrainingJob

    def start(self) -> None:
        files = self.site.files
        job = {"name": self.name, "nodes": RANKS, "standbys": 1, "time_limit": 30}
        job["directory"] = str(files.directory / "job-%j")
        train = {"module": "baselines.tm_slurm_rank", "args": [str(files.directory)], "steps": STEPS}
        whole = {"job": job, "train": {**train, "options": files.options}, **self.settings}
        config = files.directory / "config.yaml"
        config.write_text(json.dumps(whole))  # JSON is YAML
        answer = self.site.run(TM_SLURM, "submit", str(config), "--json", timeout_s=60.0)
        told = json.loads(answer)
        self.job = TrainingJob(self.site.cluster, int(told["job_id"]), Path(told["job_dir"]))

    def is_ready(self) -> bool:
        return bool(self.job.files.notes("warm"))

    def leave(self, node: str, rank: int) -> None:
        """It has seen the drain."""

    def lost(self, fault: str, node: str, rank: int) -> None:
        """It notices by itself."""

    def why_not(self) -> str | None:
        verdict = self.job.files.verdict()
        return None if verdict is None else f"{verdict['state']}: {verdict.get('reason')}"
