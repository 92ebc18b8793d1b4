"""One training job of the demo: submitted, followed while it runs, judged at its end."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tm_slurm.localcluster import LocalCluster
from tm_slurm.observe.follow import JobFiles, JsonLines
from tm_slurm.slurm.scontrol_text import parse_jobs

POLL_S = 0.05


class DemoFailed(RuntimeError):
    """The demo did not show what it promises."""


class DemoJob:
    """`on_entry` is called with each entry of the timeline and each step (`what` is then "step") as it
    comes."""

    def __init__(self, cluster: LocalCluster, config: Path, settings: dict[str, Any]) -> None:
        self._cluster = cluster
        words = [f"--set={key}={value}" for key, value in settings.items()]
        submitted = cluster.run(
            [sys.executable, "-m", "tm_slurm", "submit", str(config), "--json", *words],
            timeout_s=60.0,
            check=True,
        )
        answer = json.loads(submitted.stdout)
        self.job_id = int(answer["job_id"])
        self.files = JobFiles(Path(answer["job_dir"]))

    def follow(self, on_entry: Callable[[dict[str, Any]], None], *, timeout_s: float) -> dict[str, Any]:
        """Until the job has ended; returns its verdict. DemoFailed when that takes longer than
        `timeout_s`."""
        sources = [JsonLines(self.files.job_dir / name) for name in ("timeline.jsonl", "steps.jsonl")]
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            verdict = self.files.verdict()
            for source in sources:
                for entry in source.new():
                    on_entry(entry if "what" in entry else {"what": "step", **entry})
            if verdict is not None:
                return verdict
            time.sleep(POLL_S)
        raise DemoFailed(
            f"job {self.job_id} has not ended within {timeout_s:.0f} s: see {self.files.job_dir}"
        )

    def state(self, *, timeout_s: float = 20.0) -> str:
        """Slurm's word for how the job ended."""
        deadline = time.monotonic() + timeout_s
        while True:
            shown = self._cluster.run(["scontrol", "-o", "show", "job", str(self.job_id)], timeout_s=10.0)
            state = parse_jobs(shown.stdout)[0].state
            if state not in ("RUNNING", "COMPLETING", "PENDING") or time.monotonic() > deadline:
                return state
            time.sleep(POLL_S)

    def digests(self) -> list[str]:
        """The digest of every rank's parameters and optimizer state at the end. DemoFailed when there is
        none."""
        trained = self.files.notes("trained")
        if not trained:
            raise DemoFailed(f"job {self.job_id} did not finish training: see {self.files.job_dir}")
        return [str(digest) for digest in trained[-1]["digests"]]

    def last_words(self) -> str | None:
        """What rank 0 of char_gpt says when it has trained, from its log."""
        for path in sorted((self.files.job_dir / "logs").glob("*.log")):
            for line in path.read_text(errors="replace").splitlines():
                if line.startswith("char_gpt: trained"):
                    return line
        return None
