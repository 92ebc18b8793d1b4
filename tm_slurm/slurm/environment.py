"""The one place that knows the names of Slurm's environment variables and what each kind of program may
inherit.

A batch script, and everything below it, inherits some hundred SLURM_* variables. Three mistakes are common:
to pass all of them on (a binding of the outer step then pins every rank of the inner one to a core, and
options that were given twice contradict each other); to drop all of them (SLURM_CONF goes too, and no Slurm
command finds its controller); to believe one that is older than the allocation it describes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

JOB_ID = "SLURM_JOB_ID"
JOB_NODES = "SLURM_JOB_NODELIST"
JOB_NODE_COUNT = "SLURM_JOB_NUM_NODES"
JOB_NAME = "SLURM_JOB_NAME"
RESTART_COUNT = "SLURM_RESTART_COUNT"
ARRAY_JOB_ID = "SLURM_ARRAY_JOB_ID"
NODE_NAME = "SLURMD_NODENAME"
TASK_RANK = "SLURM_PROCID"
STEP_ID = "SLURM_STEP_ID"

_OLD_NAMES = {JOB_ID: "SLURM_JOBID", JOB_NODES: "SLURM_NODELIST", JOB_NODE_COUNT: "SLURM_NNODES"}

SITE_VARIABLES = frozenset(
    {"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_CLUSTERS", "SLURM_CLUSTER_NAME"}
)
"""Where the cluster is, not what a job asked for: kept always (a command without them cannot reach
slurmctld).
"""

# What describes the allocation that srun works in. srun reads these to find it.
_ALLOCATION_VARIABLES = frozenset(
    {
        "SLURM_JOB_ID",
        "SLURM_JOBID",
        "SLURM_JOB_NODELIST",
        "SLURM_NODELIST",
        "SLURM_JOB_NUM_NODES",
        "SLURM_NNODES",
        "SLURM_JOB_CPUS_PER_NODE",
        "SLURM_JOB_PARTITION",
        "SLURM_JOB_NAME",
        "SLURM_JOB_ACCOUNT",
        "SLURM_JOB_QOS",
        "SLURM_JOB_RESERVATION",
        "SLURM_JOB_UID",
        "SLURM_JOB_USER",
        "SLURM_JOB_GID",
        "SLURM_JOB_GPUS",
        "SLURM_JOB_START_TIME",
        "SLURM_JOB_END_TIME",
        "SLURM_JOB_DEPENDENCY",
        "SLURM_ARRAY_JOB_ID",
        "SLURM_ARRAY_TASK_ID",
        "SLURM_ARRAY_TASK_COUNT",
        "SLURM_HINT",
        "SLURM_THREADS_PER_CORE",
        "SLURM_RESTART_COUNT",
        "SLURM_SUBMIT_DIR",
        "SLURM_SUBMIT_HOST",
        "SLURM_TASKS_PER_NODE",
        "SLURM_NODE_ALIASES",
        "SLURM_WORKING_CLUSTER",
        "SLURM_TOPOLOGY_ADDR",
        "SLURM_TOPOLOGY_ADDR_PATTERN",
        "SLURM_PRIO_PROCESS",
        "SLURM_UMASK",
        "SLURM_RLIMIT_MEMLOCK",
        "SLURMD_NODENAME",
    }
)

_PREFIXES = ("SLURM_", "SLURMD_", "SBATCH_", "SALLOC_", "SRUN_", "SCANCEL_", "SCONTROL_", "SQUEUE_", "SINFO_")

_OUTER_JOB_PREFIXES = ("SUBMITIT_", "TM_SLURM_")


def is_slurm_variable(name: str) -> bool:
    """True for a name that a Slurm command or daemon reads or sets."""
    return name.startswith(_PREFIXES)


def for_client(inherited: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the surroundings for a command that asks slurmctld (scontrol, scancel): plain words, epoch
    times.

    No job identity is left in it: `scontrol update NodeList=` writes shell scripts into the current
    directory when it believes itself inside a job.
    """
    kept = _without_slurm_options(inherited)
    return kept | {"LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"}


def for_submission(inherited: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the surroundings for sbatch: nothing of a job that the submission happens to be made from.

    What the user set for sbatch on purpose (SBATCH_PARTITION, SBATCH_ACCOUNT …) is kept, but for the
    bindings, which Slurm itself leaves in a job. What submitit or tm_slurm set inside another job goes too.
    """
    source = os.environ if inherited is None else inherited
    return {
        name: value
        for name, value in source.items()
        if name in SITE_VARIABLES
        or (name.startswith("SBATCH_") and "_BIND" not in name)
        or not (is_slurm_variable(name) or name.startswith(_OUTER_JOB_PREFIXES))
    }


def for_step(inherited: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the surroundings for an srun inside the allocation: the allocation, the site, and no inherited
    option.

    Every SLURM_* variable that srun would take for one of its own options (SLURM_CPU_BIND,
    SLURM_TRES_PER_TASK beside SLURM_CPUS_PER_TASK, SLURM_NTASKS, SLURM_DISTRIBUTION, SLURM_KILL_BAD_EXIT …)
    is dropped; options are given on the command line instead.
    """
    source = os.environ if inherited is None else inherited
    allocation = {name: value for name, value in source.items() if name in _ALLOCATION_VARIABLES}
    return _without_slurm_options(source) | allocation


def dropped(inherited: Mapping[str, str], kept: Mapping[str, str]) -> list[str]:
    """Return the names of `inherited` that are not in `kept`: what a shell has to unset to get from one to
    the other.

    A name that no shell can set or unset is left out.
    """
    return sorted(name for name in inherited if name not in kept and name.isidentifier())


def job_id(environment: Mapping[str, str] | None = None) -> int | None:
    """Return the id of the job that this process is in, or None outside of any."""
    value = read(JOB_ID, environment)
    return int(value) if value and value.isdigit() else None


def is_array_element(job_id: int, environment: Mapping[str, str] | None = None) -> bool:
    """Return whether job `job_id` is the one that this process is in, and may be an element of an array.

    Not surely: a job that was submitted from inside an array element inherits the name of the array.
    """
    return read(JOB_ID, environment) == str(job_id) and bool(read(ARRAY_JOB_ID, environment))


def read(name: str, environment: Mapping[str, str] | None = None) -> str | None:
    """Return a variable under its present name or the older one that Slurm still sets beside it."""
    source = os.environ if environment is None else environment
    value = source.get(name)
    if value is None and name in _OLD_NAMES:
        value = source.get(_OLD_NAMES[name])
    return value


def _without_slurm_options(inherited: Mapping[str, str] | None) -> dict[str, str]:
    source = os.environ if inherited is None else inherited
    return {
        name: value for name, value in source.items() if name in SITE_VARIABLES or not is_slurm_variable(name)
    }
