"""How long the command line takes to answer: seconds by the clock and of the processor, median of ten.

The limits are --help 0.2 s, status 0.3 s, of the processor: a busy machine changes the clock's figure alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from figures_record import Stamp, stamp
from job_on_disk import VERDICT, status_of

from tm_slurm.submit.registry import register

RESULT = Path("build/bench/cli.json")
TM_SLURM = str(Path(sys.executable).with_name("tm-slurm"))
TIMES = 10
COMMANDS = {
    "help": (["--help"], 0.2),
    "submit_help": (["submit", "--help"], 0.2),
    "status": (["status", "7"], 0.3),
    "status_of_the_only_one": (["status"], 0.3),
    "standbys": (["standbys", "7"], 0.3),
    "events": (["events", "7"], 0.3),
    "plan": (["plan", "--gpus", "1024"], None),
}
"""The words typed, and the limit in seconds of the processor, where there is one."""

BARS = {f"{name}_cpu_s": limit_s for name, (_, limit_s) in COMMANDS.items() if limit_s is not None}


def make_job(root: Path) -> None:
    """Job 7 of this user, which runs; and one that has ended."""
    for job_id, ended in ((5, True), (7, False)):
        directory = root / str(job_id)
        directory.mkdir(parents=True)
        (directory / "config.yaml").write_text("job: {name: small}\ntrain: {module: this}\n")
        if ended:
            (directory / "verdict.json").write_text(json.dumps(VERDICT))
        lines = (json.dumps({"at": 1.0 + number, "what": "leads"}) for number in range(500))
        (directory / "timeline.jsonl").write_text("\n".join(lines) + "\n")
        register(job_id, directory)


def is_seen_to_run(directory: Path) -> None:
    """The coordinator has just written of the job: an old status has Slurm asked, which is not to be
    measured."""
    status = status_of(job_id=int(directory.name)) | {"at": time.time()}
    (directory / "status.json").write_text(json.dumps(status))


def once(words: list[str]) -> tuple[float, float]:
    """Seconds by the clock, and of the processor, of one call; SystemExit when it fails."""
    began = time.perf_counter()
    pid = os.posix_spawn(
        TM_SLURM,
        [TM_SLURM, *words],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)],
    )
    _, code, usage = os.wait4(pid, 0)
    wall_s = time.perf_counter() - began
    if code:
        raise SystemExit(f"tm-slurm {' '.join(words)} ended with {os.waitstatus_to_exitcode(code)}")
    return wall_s, usage.ru_utime + usage.ru_stime


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    figures: dict[str, Any] = {}
    parts: dict[str, list[tuple[float, float]]] = {}
    made: dict[str, Stamp] = {}
    over = []
    with tempfile.TemporaryDirectory(prefix="bench-cli-") as folder:
        os.environ["XDG_STATE_HOME"] = str(Path(folder) / "state")
        (Path(folder) / "slurm.conf").write_text("ClusterName=here\n")
        os.environ["SLURM_CONF"] = str(Path(folder) / "slurm.conf")
        jobs = Path(folder) / "jobs"
        make_job(jobs)
        for name, (words, limit_s) in COMMANDS.items():
            parts[name], made[name] = [], stamp()
            for _ in range(TIMES + 1):
                is_seen_to_run(jobs / "7")
                parts[name].append(once(words))
            del parts[name][0]  # from then on its files are in the page cache
            wall_s, cpu_s = (statistics.median(column) for column in zip(*parts[name], strict=True))
            figures |= {f"{name}_wall_s": wall_s, f"{name}_cpu_s": cpu_s}
            print(f"{'tm-slurm ' + ' '.join(words):<28} {wall_s:6.3f} s  {cpu_s:6.3f} s of the processor")
            if limit_s is not None and cpu_s > limit_s:
                over.append(f"tm-slurm {' '.join(words)}: {cpu_s:.3f} s, expected {limit_s} s at most")
    result = {
        "name": "cli",
        "machine": {
            "cpus": os.cpu_count(),
            "kernel": platform.release(),
            "processor": platform.machine(),
            "load": os.getloadavg()[0],
        },
        "versions": {"python": platform.python_version()},
        "made": made,
        "bars": BARS,
        "figures": figures,
        "parts": parts,
    }
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    if over:
        raise SystemExit("\n".join(over))


if __name__ == "__main__":
    main()
