"""`python -m tm_slurm.demo`: the same training twice, undisturbed and with two nodes drained under it;
compares the end.

Exit code 0 only if both ended with the same bits, both nodes are DRAINED and the job is COMPLETED.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from tm_slurm.demo.job import DemoFailed, DemoJob
from tm_slurm.demo.show import Show, closing_table
from tm_slurm.localcluster import LocalCluster, LocalClusterError
from tm_slurm.observe.follow import where

ACTIVE_NODES = 4
STANDBYS = 2
RUN_LIMIT_S = 240.0
DRAINED_LIMIT_S = 30.0
REASON = "demo: disk is to be replaced"
RATE_BYTES = 64 << 20


class Drainer:
    """An administrator: drains the node of a rank each time training reaches one of `at_steps`."""

    def __init__(self, cluster: LocalCluster, job: DemoJob, show: Show, at_steps: list[int]) -> None:
        self._cluster = cluster
        self._job = job
        self._show = show
        self._at_steps = at_steps
        self.drained: dict[str, float] = {}
        """node → wall-clock seconds when `scontrol` was called"""

    def entry(self, entry: dict[str, Any]) -> None:
        self._show.entry(entry)
        if entry["what"] == "step" and self._at_steps and entry["step"] >= self._at_steps[0]:
            self._at_steps.pop(0)
            node = self._node_to_drain()
            self.drained[node] = time.time()
            self._cluster.drain(node, reason=REASON)
            self._show.line(f"$ scontrol update nodename={node} state=drain reason='{REASON}'")

    def _node_to_drain(self) -> str:
        """A node that has had a rank from the beginning."""
        nodes = self._job.files.notes("started")[0]["nodes"]
        return str(next(name for name in nodes[1:] if name not in self.drained))


def _move_result(
    job: DemoJob, cluster: LocalCluster, node: str, called_at: float, rate: float
) -> dict[str, Any]:
    """What one drain cost. `rate`: raw socket bytes a second in this run, for the floor."""

    def leaves(entry: dict[str, Any]) -> bool:
        return any(pair["leaver"] == node for pair in entry["pairs"])

    cost = where(job.files.notes("downtime"), leaves)
    if cost is None:
        raise DemoFailed(f"the ranks of {node} were not moved: see {job.files.job_dir}/timeline.jsonl")
    drained = where(job.files.notes("drained"), lambda entry: bool(entry["node"] == node))
    if drained is None:
        raise DemoFailed(f"{node} was not given back: see {job.files.job_dir}/timeline.jsonl")
    pair = next(p for p in cost["pairs"] if p["leaver"] == node)
    cluster.wait_node(node, "IDLE+DRAIN", timeout_s=DRAINED_LIMIT_S)
    return {
        "node": node,
        "joiner": pair["joiner"],
        "downtime_s": cost["downtime_s"],
        "floor_s": cost["bytes"] / rate,
        "prepare_s": cost["prepare_s"],
        "drain_to_released_s": drained["at"] - called_at,
        "node_state": "DRAINED",
    }


def demo(config: Path, steps: int, jobs: Path, console: Console) -> dict[str, Any]:
    """Run it, with job directories in `jobs`; the content of demo.json.

    DemoFailed or LocalClusterError when it cannot be run to its end."""
    from tm_slurm.state.rate import raw_rate

    cluster = LocalCluster(nodes=ACTIVE_NODES + STANDBYS, name="demo")
    with cluster:
        console.print(f"Slurm cluster of {ACTIVE_NODES + STANDBYS} nodes is up ({cluster.mode})")
        settings: dict[str, Any] = {"train.steps": steps, "job.nodes": ACTIVE_NODES, "job.standbys": STANDBYS}
        settings["job.directory"] = str(jobs / "%j")
        undisturbed = DemoJob(cluster, config, settings)
        verdict = undisturbed.follow(Show(console, "undisturbed").entry, timeout_s=RUN_LIMIT_S)
        if verdict["state"] != "completed":
            raise DemoFailed(f"the undisturbed run ended {verdict['state']}: {verdict['reason']}")
        migrated = DemoJob(cluster, config, settings)
        show = Show(console, "drained    ")
        drainer = Drainer(cluster, migrated, show, [steps * 2 // 5, steps * 7 // 10])
        verdict = migrated.follow(drainer.entry, timeout_s=RUN_LIMIT_S)
        words = migrated.last_words()
        if words is not None:
            show.line(words)
        rate = statistics.median(raw_rate(RATE_BYTES) for _ in range(5))
        moves = [_move_result(migrated, cluster, node, at, rate) for node, at in drainer.drained.items()]
        losses = [step["loss"] for step in migrated.files.steps() if step["loss"] is not None]
        return {
            "steps": steps,
            "digest_undisturbed": undisturbed.digests(),
            "digest_migrated": migrated.digests(),
            "bit_identical": undisturbed.digests() == migrated.digests(),
            "loss_first": losses[0],
            "loss_last": losses[-1],
            "moves": moves,
            "downtime_median_s": statistics.median(move["downtime_s"] for move in moves),
            "job_state": migrated.state(),
        }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tm_slurm.demo", description=__doc__)
    parser.add_argument("--config", type=Path, default=Path("configs/char_gpt.yaml"))
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--json", type=Path, help="also write the outcome here")
    given = parser.parse_args()
    console = Console(soft_wrap=True)
    jobs = Path(tempfile.mkdtemp(prefix="tm-slurm-demo-"))
    try:
        result = demo(given.config, given.steps, jobs, console)
    except (DemoFailed, LocalClusterError) as error:
        print(f"demo failed: {error}", file=sys.stderr)
        return 1  # the job directories stay, to be looked at
    shutil.rmtree(jobs)
    console.print(closing_table(result))
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    good = (
        result["bit_identical"]
        and len(result["moves"]) == 2
        and all(move["node_state"] == "DRAINED" for move in result["moves"])
        and result["job_state"] == "COMPLETED"
    )
    equal = (
        "bit for bit the same as undisturbed" if result["bit_identical"] else "NOT the same as undisturbed"
    )
    console.print(
        f"loss {result['loss_first']:.3f} → {result['loss_last']:.3f}; weights and optimizer state: {equal}"
    )
    console.print(f"job {result['job_state']}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
