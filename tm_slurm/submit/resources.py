"""What a job asks Slurm for, and how its agents are started: the same for submitit and for the template."""

from __future__ import annotations

from pathlib import Path

from tm_slurm.config import Config

# --no-kill: a node that is lost or given back does not end the step. --kill-on-bad-exit=0 --wait=0: nor
# does a task that ends, whatever its code. --overlap: somebody can still run a command of their own in the
# job (srun --jobid=J). --export=ALL --mpi=none: nothing of what the cluster or an outer job prefers.
_STEP_FLAGS = (
    "--no-kill",
    "--kill-on-bad-exit=0",
    "--wait=0",
    "--overlap",
    "--export=ALL",
    "--mpi=none",
)


def cpus_per_node(config: Config) -> int:
    """Return the CPUs that the ranks of one node need."""
    return config.job.ranks_per_node * config.job.cpus_per_rank


def gpus_per_node(config: Config) -> int:
    """Return the GPUs that the ranks of one node need."""
    return config.job.ranks_per_node * config.job.gpus_per_rank


def step_options(config: Config) -> list[str]:
    """Return srun's options for the one step of the job: one agent on every node, standbys included."""
    count = config.job.all_nodes
    options = [
        f"--nodes={count}",
        f"--ntasks={count}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={cpus_per_node(config)}",
        *_STEP_FLAGS,
    ]
    if gpus_per_node(config):
        options.append(f"--gpus-per-node={gpus_per_node(config)}")
    return options


def output_option(job_dir: Path) -> str:
    """Return srun's option by which the nodes themselves write what their agents print: srun does not
    stay."""
    return f"--output={job_dir}/logs/step-%j-%N.log"


def memory_of(config: Config) -> str | None:
    """Return the memory a node in Slurm's spelling, None when the configuration leaves it to the cluster."""
    memory = config.job.memory
    return f"{memory}M" if isinstance(memory, int) else memory
