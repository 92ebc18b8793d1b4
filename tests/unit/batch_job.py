"""A batch script, run by bash as Slurm runs it, with programs in the place of srun and scontrol."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

TEMPLATE = Path(__file__).parents[2] / "sbatch_templates" / "train.sbatch"


class Batch:
    """One job of six nodes, as Slurm would start it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.seen = root / "seen.json"
        self.config = root / "job $1 'x'.yaml"
        self.config.write_text(
            "job: {nodes: 4, standbys: 2, directory: 'my $jobs'}\ntrain: {module: train, steps: 5}\n"
        )
        self.environment = {
            "PATH": f"{root / 'bin'}:/usr/bin:/bin",
            "HOME": str(root),
            "TM_SLURM_PYTHON": sys.executable,
            "SLURM_CONF": "/etc/elsewhere/slurm.conf",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NUM_NODES": "6",
            "SLURM_NNODES": "6",
            "SLURM_JOB_NODELIST": "n[1-6]",
            "SLURM_CPUS_ON_NODE": "1",
        }
        (root / "bin").mkdir()
        self.scontrol("echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1")
        self.srun(verdict={"state": "completed", "exit_code": 0, "reason": "done"})

    def scontrol(self, body: str) -> None:
        """Put a shell script in scontrol's place."""
        program = self.root / "bin" / "scontrol"
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)

    def srun(self, *, verdict: dict[str, object] | None, code: int = 137) -> None:
        """Put a program in srun's place: it writes down its call, leaves `verdict`, and ends with `code`."""
        write = (
            ""
            if verdict is None
            else f"open(sys.argv[-1] + '/verdict.json', 'w').write('''{json.dumps(verdict)}''')"
        )
        program = self.root / "bin" / "srun"
        program.write_text(
            f"#!{sys.executable}\n"
            "import json, os, sys\n"
            f"json.dump([sys.argv[1:], dict(os.environ)], open({str(self.seen)!r}, 'w'))\n"
            f"{write}\n"
            f"sys.exit({code})\n"
        )
        program.chmod(0o755)

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(TEMPLATE), *(arguments or (str(self.config),))],
            capture_output=True,
            check=False,
            cwd=self.root,
            env={**self.environment, **environment},
            text=True,
            timeout=60,
        )

    def call(self) -> tuple[list[str], dict[str, str]]:
        words, environment = json.loads(self.seen.read_text())
        return words, environment

    @property
    def job_dir(self) -> Path:
        return self.root / "my $jobs" / "7"
