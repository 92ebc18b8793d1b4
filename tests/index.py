"""Makes tests/README.md: what is proved where, from what each file says of itself.

python tests/index.py > tests/README.md
"""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).parent
HEAD = """\
# What is proved where

    make test                                            # all of it: what continuous integration runs
    make test-unit                                       # no Slurm, few processes
    .venv/bin/python -m pytest tests/comm                # processes, no Slurm
    .venv/bin/python -m pytest tests/slurm -k drained    # real Slurm daemons
    make test-next                                       # tests/slurm with Slurm 26.05 and pyslurm
    make test-layouts                                    # larger layouts and compiled models: minutes
    make chaos SEEDS=20                                  # random faults against a training run
    make bench-downtime                                  # one benchmark; it writes build/bench/downtime.json
    make sanitize                                        # the native parts under sanitizers

Run as root, each node of the local cluster is a host of its own. A test that fails prints what it awaited,
and of a job the timeline and the ends of the logs. A test that was killed leaves its cluster; the next run
takes it down. No test skips because something is missing on the machine but for CUDA devices: a package
that is not there is an error.

This file is made by `python tests/index.py > tests/README.md`, from the first sentences of the files.
"""
PARTS = {
    "unit": "Functions and objects, in one process, or the coordinator over loopback.",
    "comm": "Several processes and the native transport, no Slurm.",
    "slurm": "Real slurmctld, slurmd, munged and jobs on this machine (`tm_slurm/localcluster`).",
    "chaos": "Random faults; a few seeds here, as many as wanted by `make chaos`.",
    "bench": "Benchmarks; they write `build/bench/*.json`, and are not run by `make test`.",
}


def said_by(path: Path) -> str:
    """The first paragraph of a file's docstring, in one line; ValueError if there is none."""
    said = ast.get_docstring(ast.parse(path.read_text()))
    if not said:
        raise ValueError(f"{path}: expected a docstring that says what is proved")
    return " ".join(said.split("\n\n")[0].split()).replace("|", "\\|")


def readme() -> str:
    lines = [HEAD]
    for part, about in PARTS.items():
        pattern = "bench_*.py" if part == "bench" else "test_*.py"
        lines += [f"## tests/{part}", "", about, "", "| file | it says |", "|---|---|"]
        for path in sorted((TESTS / part).glob(pattern)):
            lines.append(f"| `{path.name}` | {said_by(path)} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(readme(), end="")
