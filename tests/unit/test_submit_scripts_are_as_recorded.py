"""The batch scripts that are submitted are the recorded ones, to the letter; hostile names included.

After a change that is meant: TM_SLURM_RECORD=1 pytest tests/unit -k as_recorded, then read the difference.
"""

from __future__ import annotations

import getpass
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tm_slurm.config import Config, load, loads
from tm_slurm.submit.job_dir import resolve
from tm_slurm.submit.prepare import shell_lines
from tm_slurm.submit.submission import script_text

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).with_name("golden")
PYTHON = "/opt/venv/bin/python3"
SUBMISSION = "0123456789abcdef"
INHERITED = {
    "PATH": "/usr/bin",
    "SLURM_CONF": "/etc/slurm.conf",
    "SLURM_JOB_ID": "7",
    "SLURM_CPU_BIND": "quiet,mask_cpu:0x1",
    "SLURM_TRES_PER_TASK": "cpu:3",
    "SLURM_CPUS_PER_TASK": "7",
}

HOSTILE = r"""
job:
  name: $(reboot) "two words" 'quoted' \
  nodes: 2
  standbys: 1
  ranks_per_node: 2
  cpus_per_rank: 3
  gpus_per_rank: 1
  partition: gpu queue
  account: a;b
  time_limit: UNLIMITED
  signal_delay_s: 300
  constraint: "[rack1|rack2]"
  exclude: n[1-2]
  reservation: maint $HOME
  memory: 16000
  directory: /scratch/it's $HOME/%j/run `x`
  python: /opt/my python/bin/python3
  setup: ["module load cuda", 'export WHO="$USER"']
  sbatch: {mail-user: "me <me@example.org>", exclusive: true, oversubscribe: false, nice: 5}
train:
  script: my $train.py
"""


def resolved(text: str | Path) -> Config:
    config = load(text) if isinstance(text, Path) else loads(text, name="x")
    return resolve(config, base=Path("/home/user/run"), python=PYTHON)


def compare(name: str, text: str) -> None:
    text = text.replace(f".submitit-{getpass.getuser()}/", ".submitit-USER/")
    text = text.replace(f".submitit-{getpass.getuser()}", ".submitit-USER")
    path = GOLDEN / name
    if os.environ.get("TM_SLURM_RECORD"):
        path.write_text(text)
    assert text == path.read_text()


def test_the_example_through_submitit() -> None:
    compare("submit_char_gpt.sh", script_text(resolved(ROOT / "configs" / "char_gpt.yaml"), SUBMISSION))


def test_hostile_names_through_submitit() -> None:
    compare("submit_hostile.sh", script_text(resolved(HOSTILE), SUBMISSION))


def test_without_a_time_limit_the_partition_decides() -> None:
    text = script_text(resolved("train: {module: t}"), SUBMISSION)
    assert "--time" not in text
    assert "--wckey" not in text


def test_the_batch_host_is_asked_for_by_its_feature() -> None:
    alone = script_text(resolved("job: {batch_feature: svc}\ntrain: {module: t}"), SUBMISSION)
    assert "#SBATCH --batch=svc\n" in alone and "#SBATCH --constraint='svc*1'\n" in alone
    among = "job: {batch_feature: svc, constraint: 'gpu*5&svc*1'}\ntrain: {module: t}"
    text = script_text(resolved(among), SUBMISSION)
    assert "#SBATCH --batch=svc\n" in text and "#SBATCH --constraint='gpu*5&svc*1'\n" in text


def test_the_example_through_the_template() -> None:
    config = resolved(ROOT / "configs" / "char_gpt.yaml")
    compare(
        "template_char_gpt.sh",
        "\n".join(shell_lines(config, Path("/home/user/run/jobs/7"), INHERITED)) + "\n",
    )


def test_hostile_names_through_the_template() -> None:
    job_dir = Path("/scratch/it's $HOME/7/run `x`")
    compare("template_hostile.sh", "\n".join(shell_lines(resolved(HOSTILE), job_dir, INHERITED)) + "\n")


def test_both_ways_start_the_step_with_the_same_options() -> None:
    config = resolved(HOSTILE)
    (srun,) = [line for line in script_text(config, SUBMISSION).splitlines() if line.startswith("srun ")]
    (options,) = [
        line for line in shell_lines(config, Path("/x"), INHERITED) if line.startswith("step_options=")
    ]
    *words, output = shlex.split(options.removeprefix("step_options=(").removesuffix(")"))
    assert set(words) <= set(shlex.split(srun))
    assert output == "--output=/x/logs/step-%j-%N.log"
    assert {"--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--ntasks-per-node=1"} <= set(words)


@pytest.mark.parametrize("name", ["submit_char_gpt.sh", "submit_hostile.sh"])
def test_a_script_is_one_that_bash_reads(name: str) -> None:
    subprocess.run(["bash", "-n", str(GOLDEN / name)], check=True, timeout=10)


def test_a_shell_makes_of_hostile_names_what_was_meant() -> None:
    lines = shell_lines(resolved(HOSTILE), Path("/scratch/it's $HOME/7/run `x`"), INHERITED)
    script = "\n".join(line for line in lines if not line.startswith("module")) + (
        '\nprintf "%s\\n" "$job_dir" "$python" "${#step_options[@]}"; env'
    )
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, check=True, env=INHERITED, text=True, timeout=10
    )
    job_dir, python, count, *environment = done.stdout.splitlines()
    assert job_dir == "/scratch/it's $HOME/7/run `x`"
    assert python == "/opt/my python/bin/python3"
    assert int(count) == 12
    names = {line.partition("=")[0] for line in environment}
    assert "SLURM_CONF" in names and "SLURM_JOB_ID" in names
    assert not names & {"SLURM_CPU_BIND", "SLURM_TRES_PER_TASK", "SLURM_CPUS_PER_TASK"}


def test_showing_a_script_imports_no_torch() -> None:
    code = (
        "import sys; from tm_slurm.cli.app import main; "
        "main(['submit', 'configs/char_gpt.yaml', '--dry-run'], standalone_mode=False); "
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=False, cwd=ROOT, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("#!/bin/bash\n") and "--nodes=6" in done.stdout
