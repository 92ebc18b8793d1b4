"""What is inherited from Slurm: the site always, the allocation where it is needed, options never."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tm_slurm.slurm import environment

# What srun and sbatch leave behind in a job with bindings, GPUs and an array.
OUTER_JOB = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/home/user",
    "SLURM_CONF": "/etc/elsewhere/slurm.conf",
    "SLURM_JOB_ID": "7",
    "SLURM_JOBID": "7",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_NNODES": "3",
    "SLURM_TASKS_PER_NODE": "1(x3)",
    "SLURM_CPU_BIND": "quiet,mask_cpu:0x1",
    "SLURM_CPU_BIND_LIST": "0x1",
    "SLURM_CPU_BIND_TYPE": "mask_cpu:",
    "SLURM_CPUS_PER_TASK": "7",
    "SLURM_TRES_PER_TASK": "cpu:3",
    "SLURM_NTASKS": "9",
    "SLURM_NPROCS": "9",
    "SLURM_DISTRIBUTION": "cyclic",
    "SLURM_KILL_BAD_EXIT": "1",
    "SLURM_EXPORT_ENV": "NONE",
    "SLURM_MEM_PER_CPU": "99999",
    "SLURM_GPUS_PER_TASK": "4",
    "SLURM_HET_SIZE": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_ARRAY_JOB_ID": "5",
    "SLURM_ARRAY_TASK_ID": "3",
    "SBATCH_PARTITION": "gpu",
    "SBATCH_CPU_BIND": "quiet,mask_cpu:0x1",
    "SRUN_DEBUG": "3",
    "SUBMITIT_EXECUTOR": "slurm",
    "TM_SLURM_JOB_DIR": "/home/user/outer",
}


def test_the_way_to_the_controller_is_always_kept() -> None:
    """Cleaning SLURM_* also removed SLURM_CONF, and sbatch stopped working."""
    for clean in (environment.for_client, environment.for_step, environment.for_submission):
        assert clean(OUTER_JOB)["SLURM_CONF"] == "/etc/elsewhere/slurm.conf"
        assert clean(OUTER_JOB)["PATH"] == "/usr/bin:/bin"


def test_a_step_inherits_no_binding() -> None:
    """An inherited SLURM_CPU_BIND pinned all ranks of a nested srun to one core."""
    assert not [name for name in environment.for_step(OUTER_JOB) if "_BIND" in name]


def test_a_step_inherits_no_options_that_contradict_each_other() -> None:
    """SLURM_TRES_PER_TASK against SLURM_CPUS_PER_TASK."""
    kept = {name for name in environment.for_step(OUTER_JOB) if environment.is_slurm_variable(name)}
    assert kept == {
        "SLURM_CONF",
        "SLURM_JOB_ID",
        "SLURM_JOBID",
        "SLURM_JOB_NODELIST",
        "SLURM_JOB_NUM_NODES",
        "SLURM_NNODES",
        "SLURM_TASKS_PER_NODE",
        "SLURM_ARRAY_JOB_ID",
        "SLURM_ARRAY_TASK_ID",
    }


def test_a_submission_from_inside_a_job_knows_nothing_of_that_job() -> None:
    kept = environment.for_submission(OUTER_JOB)
    assert kept == {
        "PATH": "/usr/bin:/bin",
        "HOME": "/home/user",
        "SLURM_CONF": "/etc/elsewhere/slurm.conf",
        "SBATCH_PARTITION": "gpu",
    }


def test_a_question_is_asked_outside_of_any_job() -> None:
    kept = environment.for_client(OUTER_JOB)
    assert kept["LC_ALL"] == "C" and kept["SLURM_TIME_FORMAT"] == "%s"
    assert not [name for name in kept if name.startswith("SLURM_JOB")]


@given(
    st.dictionaries(
        st.one_of(
            st.sampled_from(sorted(OUTER_JOB)),
            st.from_regex(r"S(LURM|BATCH|RUN)_[A-Z_]{1,12}", fullmatch=True),
            st.from_regex(r"[A-Z][A-Z0-9_]{0,12}", fullmatch=True),
        ),
        st.just("x"),
    )
)
def test_nothing_is_invented_and_nothing_of_the_user_is_lost(inherited: dict[str, str]) -> None:
    for clean in (environment.for_step, environment.for_submission):
        kept = clean(inherited)
        assert kept.items() <= inherited.items()
    users = {name: x for name, x in inherited.items() if not environment.is_slurm_variable(name)}
    assert users.items() <= environment.for_step(inherited).items()


def test_a_shell_gets_there_by_unset() -> None:
    names = environment.dropped(OUTER_JOB, environment.for_step(OUTER_JOB))
    done = subprocess.run(
        ["/bin/bash", "-c", f"unset {' '.join(names)}; exec env"],
        capture_output=True,
        check=True,
        env=OUTER_JOB,
        text=True,
        timeout=10,
    )
    seen = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert {n: v for n, v in seen.items() if n in OUTER_JOB} == environment.for_step(OUTER_JOB)


def test_a_name_that_no_shell_can_unset_does_not_break_it() -> None:
    assert environment.dropped({"SLURM_A-B": "1", "SLURM_C": "1"}, {}) == ["SLURM_C"]


@pytest.mark.parametrize(
    ("found", "job_id"),
    [({"SLURM_JOB_ID": "7"}, 7), ({"SLURM_JOBID": "8"}, 8), ({}, None), ({"SLURM_JOB_ID": ""}, None)],
)
def test_the_job_is_known_by_its_new_or_old_name(found: dict[str, str], job_id: int | None) -> None:
    assert environment.job_id(found) == job_id
