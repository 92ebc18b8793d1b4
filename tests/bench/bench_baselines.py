"""What an interruption costs with tm_slurm, and with what people would use instead: 4 ranks on 4 nodes, one
node in reserve, char_gpt.

    python tests/bench/bench_baselines.py [--only RIVAL]… [--fault FAULT]… [--repeat 5]

The same model, data, cluster, faults and definition of downtime (`baselines.downtime`) for all of them; each
with the tuning that the JSON names. Rivals take turns, so that what else the machine does is shared out
evenly. The restarting rivals' packages are in the extra `bench`, which `make bench-baselines` installs.

Writes build/bench/baselines.json after each trial; a part (one fault of one rival) that is not run keeps its
trials from the run before, unless the rival was tuned in another way then. Each trial says when and of which
sources it was made, and how busy the machine was.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "slurm"))
sys.path.insert(0, str(Path(__file__).parent))

from baselines import summary, trial
from baselines.rival import FAULTS, RANKS, Rival
from baselines.rival_naive import DeltaGroups, Naive
from baselines.rival_nvrx_inprocess import NvrxInprocess
from baselines.rival_nvrx_launcher import FtLauncher
from baselines.rival_requeue import Requeue
from baselines.rival_tm_slurm import TmSlurm
from baselines.rival_torchft import TorchftAll, TorchftLess
from baselines.rival_torchrun import TorchrunEach, TorchrunTen

from tm_slurm.localcluster import LocalCluster

RESULT = Path(__file__).parents[2] / "build" / "bench" / "baselines.json"
RIVALS: dict[str, type[Rival]] = {
    kind.name: kind
    for kind in (
        TmSlurm,
        DeltaGroups,
        Naive,
        TorchrunEach,
        TorchrunTen,
        Requeue,
        FtLauncher,
        NvrxInprocess,
        TorchftAll,
        TorchftLess,
    )
}


def about(kind: type[Rival]) -> dict[str, Any]:
    """What the JSON says of a rival beside its trials."""
    versions = {package: importlib.metadata.version(package) for package in kind.packages}
    return {"what": kind.what, "tuning": dict(kind.tuning), "versions": versions}


def begun(kind: type[Rival], before: Mapping[str, Any]) -> dict[str, Any]:
    """What is known of a rival when a run begins. `before`: what the file has of it; trials with another
    tuning, or other releases of its packages, are dropped."""
    now = about(kind)
    as_written = json.loads(json.dumps(now))
    same = all(before.get(key) == as_written[key] for key in ("tuning", "versions"))
    if before and not same:
        print(f"{kind.name}: earlier trials are dropped, it was tuned in another way", flush=True)
    return {**now, "faults": before["faults"] if same else {}}


def save(parts: dict[str, Any]) -> dict[str, Any]:
    """Write all that is known by now."""
    ordered = {name: parts[name] for name in RIVALS if name in parts}
    result = {
        "name": "baselines",
        "machine": {"cpus": os.cpu_count(), "kernel": platform.release(), "processor": platform.machine()},
        "versions": {"torch": importlib.metadata.version("torch"), "python": platform.python_version()},
        "bars": summary.BARS,
        "counted": summary.COUNTED,
        "figures": summary.figures(ordered),
        "rivals": ordered,
    }
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=list(RIVALS), metavar="RIVAL")
    parser.add_argument("--fault", action="append", choices=FAULTS)
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    chosen = [RIVALS[name] for name in arguments.only or RIVALS]
    faults = arguments.fault or list(FAULTS)
    parts = json.loads(RESULT.read_text())["rivals"] if RESULT.exists() else {}
    for kind in chosen:
        parts[kind.name] = begun(kind, parts.get(kind.name, {}))
        for fault in faults:
            if fault in kind.cannot:
                parts[kind.name]["faults"][fault] = {"cannot": kind.cannot[fault]}
    with (
        LocalCluster(nodes=RANKS + 1, mode="namespaces", name="bench-baselines") as cluster,
        tempfile.TemporaryDirectory(prefix="tm-slurm-bench-") as runs,
    ):
        for number in range(arguments.repeat):
            for fault in faults:
                for kind in chosen:
                    if fault in kind.cannot:
                        continue
                    row = trial.run(kind, fault, number, cluster, Path(runs, f"{kind.name}-{fault}-{number}"))
                    found = parts[kind.name]["faults"]
                    earlier = found[fault]["rows"] if number else []
                    found[fault] = {"rows": [*earlier, row]}
                    save(parts)
                    told = row.get("failed") or f"{row['downtime_s']:.3f} s"
                    print(f"{kind.name:>22} {fault:>14} rank {row['rank']}: {told}", flush=True)
    result = save(parts)
    print("\n" + summary.table(result["rivals"]) + "\n")
    print(json.dumps(result["figures"], indent=1))
    for name, bar in summary.BARS.items():
        found = result["figures"][name]
        if found is not None:
            print(f"{name:>40} {found:8.2f}  at least {bar:g}{'  MISSED' if found < bar else ''}")


if __name__ == "__main__":
    main()
