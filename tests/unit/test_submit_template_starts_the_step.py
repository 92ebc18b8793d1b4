"""The template, run by bash as Slurm runs it, with a program in srun's place that writes down how it was
called.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from batch_job import TEMPLATE, Batch

from tm_slurm.config import load

# What a job inherits when sbatch was called from inside another one.
OUTER = {
    "SLURM_CPU_BIND": "quiet,mask_cpu:0x1",
    "SLURM_TRES_PER_TASK": "cpu:3",
    "SLURM_CPUS_PER_TASK": "7",
    "SLURM_NTASKS": "9",
    "SLURM_KILL_BAD_EXIT": "1",
    "SLURM_EXPORT_ENV": "NONE",
    "SLURM_HET_SIZE": "2",
}


@pytest.fixture
def batch(tmp_path: Path) -> Batch:
    return Batch(tmp_path)


def test_one_agent_a_node_and_the_verdicts_end(batch: Batch) -> None:
    done = batch.run()
    assert done.returncode == 0, done.stderr
    words, _ = batch.call()
    assert words[-5:] == ["-u", "-m", "tm_slurm.agent", "--job-dir", str(batch.job_dir)]
    assert words[-6] == sys.executable
    assert {"--nodes=6", "--ntasks=6", "--ntasks-per-node=1", "--cpus-per-task=1"} <= set(words)
    assert {"--no-kill", "--kill-on-bad-exit=0", "--wait=0"} <= set(words)
    assert "tm_slurm: completed: done exit_code=0" in done.stdout


def test_what_an_outer_job_left_does_not_reach_srun(batch: Batch) -> None:
    """What of Slurm srun must not inherit is taken out, SLURM_CONF stays."""
    done = batch.run(**OUTER)
    assert done.returncode == 0, done.stderr
    _, environment = batch.call()
    assert not OUTER.keys() & environment.keys()
    assert environment["SLURM_CONF"] == "/etc/elsewhere/slurm.conf"
    assert environment["SLURM_JOB_NODELIST"] == "n[1-6]"


def test_a_job_that_is_off_is_told_of_by_nobody(batch: Batch) -> None:
    assert batch.run(TM_SLURM_OFF="1").returncode == 0
    _, environment = batch.call()
    assert environment["TM_SLURM_OFF"] == "1" and "TM_SLURM_EVENTS_TO" not in environment
    assert not load(batch.job_dir / "config.yaml").policy.signed_events
    assert batch.run(str(batch.config), "policy.signed_events=true", TM_SLURM_OFF="1").returncode == 0
    _, environment = batch.call()
    assert environment["TM_SLURM_EVENTS_TO"] == str(batch.job_dir)


def test_overrides_stand_behind_the_configuration(batch: Batch) -> None:
    assert batch.run(str(batch.config), "train.steps=9", "job.name=x y").returncode == 0
    written = load(batch.job_dir / "config.yaml")
    assert (written.train.steps, written.job.name) == (9, "x y")
    assert written.job.directory == str(batch.root / "my $jobs" / "%j")


def test_more_nodes_are_more_standbys(batch: Batch) -> None:
    done = batch.run(SLURM_JOB_NUM_NODES="9")
    assert done.returncode == 0
    assert "5 standbys instead of 2: the job has 9 nodes, 4 are active" in done.stderr
    assert load(batch.job_dir / "config.yaml").job.standbys == 5
    assert "--nodes=9" in batch.call()[0]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {"SLURM_JOB_NUM_NODES": "3"},
            "tm_slurm: the job has 3 nodes, the configuration needs job.nodes 4: use sbatch --nodes=6",
        ),
        ({"SLURM_JOB_NUM_NODES": ""}, "tm_slurm: not in a Slurm job: this runs in a batch script"),
        ({"SLURM_JOB_ID": ""}, "tm_slurm: not in a Slurm job: SLURM_JOB_ID is not set"),
        ({"SLURM_CPUS_ON_NODE": "0"}, "tm_slurm: the job has 0 CPUs a node, the configuration needs 1"),
    ],
)
def test_an_allocation_that_does_not_fit_is_one_line_and_code_2(
    batch: Batch, environment: dict[str, str], message: str
) -> None:
    done = batch.run(**environment)
    assert done.returncode == 2
    assert done.stderr.startswith(message) and done.stderr.count("\n") == 1
    assert not batch.seen.exists() and not batch.job_dir.exists()


def test_a_mistake_in_the_configuration_is_one_line_and_code_2(batch: Batch) -> None:
    batch.config.write_text("job:\n  nodez: 4\n")
    done = batch.run()
    assert done.returncode == 2
    assert done.stderr == f"tm_slurm: {batch.config}:2: unknown key job.nodez; did you mean job.nodes?\n"
    assert (
        batch.run("no such.yaml").stderr
        == "tm_slurm: no such.yaml: cannot be read: No such file or directory\n"
    )
    assert not batch.seen.exists()


@pytest.mark.parametrize("python", ["python-of-the-site", "no-such-python"])
def test_a_python_without_tm_slurm_is_one_line_and_code_2(batch: Batch, python: str) -> None:
    program = batch.root / "bin" / "python-of-the-site"
    program.write_text("#!/bin/sh\necho 'No module named tm_slurm' >&2; exit 1\n")
    program.chmod(0o755)
    done = batch.run(TM_SLURM_PYTHON=python)
    assert done.returncode == 2 and not batch.seen.exists()
    assert done.stderr == (
        f"tm_slurm: {python} has no tm_slurm: activate its environment, or set TM_SLURM_PYTHON\n"
    )


def test_no_configuration_at_all(batch: Batch) -> None:
    done = subprocess.run(
        ["bash", str(TEMPLATE)],
        capture_output=True,
        check=False,
        env=batch.environment,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and "no configuration given" in done.stderr


@pytest.mark.parametrize(
    ("verdict", "code", "said"),
    [
        ({"state": "failed", "exit_code": 3, "reason": "rank 2 died"}, 3, "tm_slurm: failed: rank 2 died"),
        (None, 1, "tm_slurm: no verdict"),
        ({"state": "completed", "exit_code": "0", "reason": ""}, 1, "expected an exit code from 0 to 255"),
        ({"state": "requeue", "exit_code": 0, "begins": "soon"}, 1, "expected Unix seconds as begins"),
        ({"state": "fine", "exit_code": 0, "reason": ""}, 1, "expected completed, failed or requeue"),
    ],
)
def test_the_job_ends_by_the_coordinators_word_not_by_sruns_code(
    batch: Batch, verdict: dict[str, object] | None, code: int, said: str
) -> None:
    """Tasks that were cancelled or released made the job FAILED."""
    batch.srun(verdict=verdict, code=0)
    done = batch.run()
    assert done.returncode == code
    assert said in done.stdout + done.stderr


def test_the_verdict_of_an_earlier_run_ends_nothing(batch: Batch) -> None:
    assert batch.run().returncode == 0
    secret = (batch.job_dir / "secret").read_bytes()
    batch.srun(verdict=None)
    done = batch.run(SLURM_RESTART_COUNT="1")
    assert done.returncode == 1 and "no verdict" in done.stderr
    assert (batch.job_dir / "secret").read_bytes() == secret, "a requeued job keeps its directory"
    assert (batch.job_dir / "verdict.0.json").exists()


def test_a_restart_that_only_an_outer_job_had_is_no_restart(batch: Batch) -> None:
    """SLURM_RESTART_COUNT is passed on to jobs that are submitted from inside a requeued one."""
    assert batch.run().returncode == 0
    secret = (batch.job_dir / "secret").read_bytes()
    record = (
        "JobId=7 JobName=x UserId=u(1) GroupId=g(1) JobState=RUNNING Requeue=1 Restarts=0 TimeLimit=UNLIMITED"
    )
    batch.scontrol(f"echo '{record}'")
    assert batch.run(SLURM_RESTART_COUNT="2").returncode == 0
    assert "SLURM_RESTART_COUNT" not in batch.call()[1]
    assert (batch.job_dir / "secret").read_bytes() != secret


def test_another_job_of_the_same_id_starts_anew(batch: Batch) -> None:
    assert batch.run().returncode == 0
    secret = (batch.job_dir / "secret").read_bytes()
    batch.srun(verdict=None)
    assert batch.run().returncode == 1
    assert (batch.job_dir / "secret").read_bytes() != secret


def test_a_verdict_to_requeue_asks_slurm_for_this_job_alone(batch: Batch) -> None:
    """Requeue of one array element requeued the whole array. The script then waits for Slurm to end
    it."""
    shown = "JobId=7 JobName=x UserId=u(1) GroupId=g(1) JobState=RUNNING Requeue=1 Restarts=0"
    of_array = shown.replace("JobId=7", "JobId=7 ArrayJobId=7 ArrayTaskId=2")
    requeue = f"*requeue*) echo \"$@\" >> '{batch.root}/asked'; kill -KILL $PPID;;"
    batch.scontrol(f"case \"$*\" in *show*) echo '{of_array}';; {requeue} esac")
    batch.srun(verdict={"state": "requeue", "exit_code": 0, "reason": "time limit"})
    assert batch.run(SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="2").returncode == 137
    batch.scontrol(f"case \"$*\" in *show*) echo '{shown}';; {requeue} esac")
    assert batch.run(SLURM_ARRAY_JOB_ID="5", SLURM_ARRAY_TASK_ID="2").returncode == 137  # of an outer job
    assert (batch.root / "asked").read_text() == "requeue 7_2\nrequeue 7\n"
    batch.scontrol("echo 'Requested operation is presently disabled for job 7' >&2; exit 1")
    done = batch.run()
    assert (
        done.returncode == 1 and "was not requeued: Requested operation is presently disabled" in done.stderr
    )


def test_a_verdict_with_a_begin_time_tells_slurm_before_the_script_ends(batch: Batch) -> None:
    """Slurm takes it only of a job in the queue, and by then it is ending this script: SIGTERM to all."""
    batch.scontrol(
        f"echo \"$@\" >> '{batch.root}/asked'\n"
        '[ "$1" != requeue ] || kill -TERM $PPID $(ps -o ppid= -p $PPID)'
    )
    begins = time.time() + 5000.5
    batch.srun(verdict={"state": "requeue", "exit_code": 3, "reason": "reservation", "begins": begins})
    done = batch.run()
    assert done.returncode == 3, "it ends by itself as soon as that is said"
    requeue, begin = (batch.root / "asked").read_text().splitlines()
    assert requeue == "requeue 7" and begin.startswith("update JobId=7 StartTime=now+")
    assert 4900 < int(begin.partition("now+")[2].removesuffix("seconds")) <= 5001


def test_a_begin_time_that_slurm_refuses_is_said_and_no_more(batch: Batch) -> None:
    batch.scontrol(
        '[ "$1" = requeue ] || { echo "Job is no longer pending execution" >&2; exit 1; }\nkill -TERM $PPID'
    )
    batch.srun(verdict={"state": "requeue", "exit_code": 3, "reason": "reservation", "begins": 2e9})
    done = batch.run()
    assert done.returncode == 3 and "no longer pending" in done.stderr


def test_the_template_is_one_that_sbatch_and_bash_read() -> None:
    assert os.access(TEMPLATE, os.R_OK)
    subprocess.run(["bash", "-n", str(TEMPLATE)], check=True, timeout=10)
    options = [line for line in TEMPLATE.read_text().splitlines() if line.startswith("#SBATCH")]
    assert {"#SBATCH --no-kill", "#SBATCH --requeue", "#SBATCH --open-mode=append"} <= set(options)
