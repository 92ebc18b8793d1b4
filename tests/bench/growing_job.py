"""A job of growing_training on a local cluster, out of which nodes are drained and in which ranks die, and
what each of that costs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "slurm"))

from growth_figures import since_the_fault, spread
from injected_faults import process_deaths
from training_jobs import TrainingJob

from tm_slurm.localcluster import LocalCluster

SCRIPT = Path(__file__).with_name("growing_training.py")
STEPS = 100_000
"""More than are ever done: the job is cancelled when it is through."""

PAUSE_S = 0.1
BETWEEN = 10
"""Steps between two interruptions."""

LOOKED_AT = 100
"""Steps before an interruption whose times are compared."""

START_LIMIT_S = 240.0
SMALL_STATE_BYTES = 1 << 20
PIECES = 300_000
"""Of a fixed piece of computing: some 0.1 s, as long as a step."""

POLICY = {
    "release": False,  # a drained node stays in the job, and is a standby again when it is resumed
    "snapshots": "never",
    "poll_interval_s": 0.5,
    "keepalive_s": 5.0,
}

Row = dict[str, Any]


def crowding() -> float:
    """How crowded the processors are: seconds that a fixed piece of computing takes, over its processor
    seconds."""
    wall, processor = time.perf_counter(), time.thread_time()
    for number in range(PIECES):
        sum(range(number % 100))
    return (time.perf_counter() - wall) / (time.thread_time() - processor)


class GrowingJob:
    """One job; each node has one rank."""

    def __init__(
        self,
        cluster: LocalCluster,
        directory: Path,
        *,
        ranks: int,
        standbys: int = 1,
        state_bytes: int = SMALL_STATE_BYTES,
        groups: int = 1,
    ) -> None:
        directory.mkdir(parents=True)
        self.standbys = standbys
        self.ranks = ranks
        self._cluster = cluster
        options = {"pause_s": PAUSE_S, "state_bytes": state_bytes, "groups": groups}
        job = {"name": "growing", "nodes": ranks, "standbys": standbys, "directory": str(directory / "%j")}
        config = directory / "config.yaml"
        train = {"script": str(SCRIPT), "steps": STEPS, "options": options}
        job |= {"sbatch": {"exclusive": True}}  # several jobs may run side by side, not on the same nodes
        config.write_text(json.dumps({"job": job, "train": train, "policy": POLICY}))  # JSON is YAML
        self.job = TrainingJob.submit_config(cluster, config)

    def seats(self) -> list[str]:
        """The node of each rank now."""
        return self.job.seats()

    def reserve(self) -> list[str]:
        """The nodes that are standbys now."""
        status = self.job.files.status() or {"nodes": []}
        return [str(node["node"]) for node in status["nodes"] if node["standing"] == "standby"]

    def calm(self) -> None:
        """Wait until all standbys are warm and some steps have been done since the last interruption."""
        what = f"{self.standbys} warm standbys and a running pace of {self.ranks} ranks"
        self.job.until(what, self.job.unless_failed(self._is_calm), START_LIMIT_S)

    def _is_calm(self) -> bool:
        status = self.job.files.status()
        if status is None or None in (rank["step"] for rank in status["ranks"]):
            return False
        ready = sum(node["standing"] == "standby" and node["warm"] for node in status["nodes"])
        over = self.job.files.notes("downtime")
        last = over[-1]["step"] if over else 0
        return ready == self.standbys and min(rank["step"] for rank in status["ranks"]) >= last + BETWEEN

    def drain(self, nodes: Sequence[str]) -> Row:
        """Drain nodes with ranks, all at once, and resume them when their ranks have moved: what it has cost,
        and to where they have moved. AssertionError if that was not one move."""
        before = self._before()
        known = len(self.job.files.notes("downtime"))
        self._update(nodes, "drain", "reason=bench")
        cost = self._next_cost(known, f"the move of {', '.join(nodes)}")
        leavers = [str(pair["leaver"]) for pair in cost["pairs"]]
        if sorted(leavers) != sorted(nodes):
            raise AssertionError(f"expected one move of {sorted(nodes)}, found one of {sorted(leavers)}")
        kept = self.job.unless_failed(lambda: all(self.job.standing(node) == "kept" for node in nodes))
        self.job.until(f"no rank on {', '.join(nodes)} any more", kept)
        self._update(nodes, "resume")
        return {
            "kind": "drain",
            "nodes": list(nodes),
            "joiners": [str(pair["joiner"]) for pair in cost["pairs"]],
            "downtime_s": float(cost["downtime_s"]),
            **before,
            **{key: cost[key] for key in ("steady_step_s", "prepare_s", "state_s", "bytes", "resumed")},
        }

    def lose(self, ranks: Sequence[int]) -> Row:
        """Kill the processes of ranks at once: what it has cost, from that instant. They may be heard of one
        after another, and recovered from in one go or in several: the last one counts."""
        before = self._before()
        known = len(self.job.files.notes("downtime"))
        nodes = [self.seats()[rank] for rank in ranks]
        at = process_deaths(self.job, nodes)

        def costs() -> list[dict[str, Any]]:
            found = self.job.files.notes("downtime")[known:]
            left = {str(pair["leaver"]) for cost in found for pair in cost["pairs"]}
            return found if left >= set(nodes) else []

        found = self.job.until(f"the recovery of ranks {list(ranks)}", self.job.unless_failed(costs))
        cost = max(found, key=lambda cost: float(cost["at"]))
        return {
            "kind": "process_death",
            "nodes": nodes,
            "recoveries": len(found),
            "downtime_s": since_the_fault(at, cost),
            **before,
            "parts": {"detect_s": float(cost["started_at"]) - at, **cost["parts"]},
            "steady_step_s": cost["steady_step_s"],
        }

    def _before(self) -> Row:
        """How it stands just before an interruption."""
        seconds = [float(step["seconds"]) for step in self.job.files.steps()[-LOOKED_AT:]]
        return {"crowding": crowding(), "step_spread_s": spread(seconds)}

    def _next_cost(self, known: int, what: str) -> dict[str, Any]:
        new = self.job.unless_failed(lambda: self.job.files.notes("downtime")[known:])
        return dict(self.job.until(f"the downtime of {what}", new)[0])

    def _update(self, nodes: Sequence[str], state: str, *words: str) -> None:
        names = f"nodename={','.join(nodes)}"
        self._cluster.run(["scontrol", "update", names, f"state={state}", *words], timeout_s=20.0)
