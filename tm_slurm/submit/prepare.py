"""What a batch script does first: `eval "$(python -m tm_slurm.submit.prepare CONFIG)"`.

Makes the job directory and prints shell lines: where it is, how srun is to be called, what has to be unset
before (see tm_slurm.slurm.environment), and what watches over the end (tm_slurm.submit.step_watch). With
--submitted the directory and the configuration come from the submitting command, with --joining they are
another job's.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tm_slurm.config import Config, ConfigError, load, parse_override
from tm_slurm.slurm import SlurmRefused, SlurmUnavailable, connect, environment
from tm_slurm.submit.asked_options import OFF, asked_overrides
from tm_slurm.submit.checks import Unsubmittable, check_options
from tm_slurm.submit.job_dir import (
    JobDirError,
    claim,
    new_submission,
    prepare_job_dir,
    resolve,
    set_verdict_aside,
)
from tm_slurm.submit.resources import cpus_per_node, output_option, step_options

UNHEARD = "--unheard"


class AllocationError(RuntimeError):
    """The allocation does not fit the configuration; one line that says what to ask sbatch for."""


def fit_to_allocation(config: Config, inherited: Mapping[str, str]) -> Config:
    """Return `config` with as many standbys as the allocation leaves beyond the active nodes.

    `--nodes` on sbatch's command line thus decides how many standbys there are. Raises AllocationError when
    the active nodes do not fit, or a node has too few CPUs.
    """
    count = environment.read(environment.JOB_NODE_COUNT, inherited)
    if count is None or not count.isdigit():
        raise AllocationError(
            "not in a Slurm job: this runs in a batch script (sbatch sbatch_templates/train.sbatch)"
        )
    standbys = int(count) - config.job.nodes
    if standbys < 0:
        raise AllocationError(
            f"the job has {count} nodes, the configuration needs job.nodes {config.job.nodes}: "
            f"use sbatch --nodes={config.job.all_nodes}"
        )
    cpus = inherited.get("SLURM_CPUS_ON_NODE", "")
    if cpus.isdigit() and int(cpus) < cpus_per_node(config):
        raise AllocationError(
            f"the job has {cpus} CPUs a node, the configuration needs {cpus_per_node(config)} "
            f"(ranks_per_node times cpus_per_rank): use sbatch --cpus-per-task={cpus_per_node(config)}"
        )
    return replace(config, job=replace(config.job, standbys=standbys))


def shell_lines(config: Config, job_dir: Path, inherited: Mapping[str, str]) -> list[str]:
    """Return what the batch script has to evaluate before srun."""
    unset = environment.dropped(inherited, environment.for_step(inherited))
    return [
        *config.job.setup,
        *_unset_line(unset),
        *_place_lines(job_dir, heard=config.policy.signed_events),
        f"python={shlex.quote(config.job.python or sys.executable)}",
        f"step_options=({' '.join(map(shlex.quote, [*step_options(config), output_option(job_dir)]))})",
        _watch_line('"$python"'),
    ]


def start_from_config(path: Path, overrides: Mapping[str, object], inherited: Mapping[str, str]) -> list[str]:
    """Prepare the job that this batch script is, from its configuration; return the shell lines."""
    asked = {**asked_overrides(inherited), **overrides}
    written = resolve(load(path, asked), base=Path.cwd(), python=sys.executable)
    check_options(written)
    config = fit_to_allocation(written, inherited)
    job_id = environment.job_id(inherited)
    if job_id is None:
        raise AllocationError("not in a Slurm job: SLURM_JOB_ID is not set")
    if config.job.standbys != written.job.standbys:
        print(
            f"tm_slurm: {config.job.standbys} standbys instead of {written.job.standbys}: the job has "
            f"{config.job.all_nodes} nodes, {config.job.nodes} are active",
            file=sys.stderr,
        )
    # A first run makes its directory anew, whatever an older job of this id left; a requeued one finds its
    # own.
    restarts = _restarts(job_id, inherited)
    job_dir = prepare_job_dir(config, job_id, None if restarts else new_submission())
    set_verdict_aside(job_dir)
    print(f"tm_slurm: job directory {job_dir}", file=sys.stderr)
    of_another = (
        [environment.RESTART_COUNT] if environment.RESTART_COUNT in inherited and not restarts else []
    )
    return [*_unset_line(of_another), *shell_lines(config, job_dir, inherited)]


def start_submitted(
    pattern: str, submission: str, inherited: Mapping[str, str], *, heard: bool = True
) -> list[str]:
    """Prepare the run of a job that `tm-slurm submit` has submitted; return the shell lines.

    `pattern` is its directory with %j for the id. The agents make it, if the submitting command has not yet.
    `heard`: whether root's programs are to tell what happens (policy.signed_events).
    """
    job_id = environment.job_id(inherited)
    if job_id is None:
        raise AllocationError("not in a Slurm job: SLURM_JOB_ID is not set")
    job_dir = Path(pattern.replace("%j", str(job_id)))
    if claim(job_dir, submission):
        set_verdict_aside(job_dir)
    unset = environment.dropped(inherited, environment.for_step(inherited))
    watch = _watch_line(shlex.quote(sys.executable))
    return [*_unset_line(unset), *_place_lines(job_dir, heard=heard), watch]


def start_joining(job_dir: Path, inherited: Mapping[str, str], *, heard: bool = True) -> list[str]:
    """Prepare the run of a standby job for the training job of `job_dir`; return the shell lines. `heard` is
    as for `start_submitted`.
    """
    if not (job_dir / "config.yaml").is_file():
        raise AllocationError(f"{job_dir}: there is no job here any more")
    return [
        *_unset_line(environment.dropped(inherited, environment.for_step(inherited))),
        *_place_lines(job_dir, heard=heard),
    ]


def _restarts(job_id: int, inherited: Mapping[str, str]) -> int:
    """Return how often Slurm has restarted this job; asks Slurm, as the variable may stem from an outer
    job.
    """
    said = inherited.get(environment.RESTART_COUNT, "0")
    if not said.isdigit() or int(said) == 0:
        return 0
    try:
        return connect().job(job_id).restarts
    except (SlurmRefused, SlurmUnavailable):
        return int(said)


def _unset_line(names: list[str]) -> list[str]:
    return [f"unset {' '.join(names)}"] if names else []


def _place_lines(job_dir: Path, *, heard: bool) -> list[str]:
    """The second is for the SPANK plugin, where there is one: events about the job go there, or nowhere."""
    events = 'export TM_SLURM_EVENTS_TO="$job_dir"' if heard else f"export {OFF}=1"
    return [f"job_dir={shlex.quote(str(job_dir))}", events]


def _watch_line(python: str) -> str:
    """Disowned, so that a script that waits for all its background jobs does not wait for this one."""
    return f'{python} -m tm_slurm.submit.step_watch "$job_dir" $$ </dev/null & disown'


def main(arguments: list[str]) -> int:
    """Run as a program; see the module's text. Exit code 2 and one line for whatever the user can mend."""
    parser = argparse.ArgumentParser(prog="python -m tm_slurm.submit.prepare", description=__doc__)
    parser.add_argument("config", nargs="?", type=Path, help="the job's configuration")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="holds over the configuration")
    parser.add_argument(
        "--submitted",
        nargs=2,
        metavar=("DIRECTORY", "SUBMISSION"),
        help="the job directory, %%j for the job's id, and the name of the submission",
    )
    parser.add_argument(
        "--joining", type=Path, metavar="JOB_DIRECTORY", help="this is a standby job for the job there"
    )
    parser.add_argument(
        UNHEARD, action="store_true", help="root's programs are to tell nothing about this job"
    )
    given = parser.parse_args(arguments)
    try:
        if given.joining is not None:
            lines = start_joining(given.joining, os.environ, heard=not given.unheard)
        elif given.submitted is not None:
            directory, submission = given.submitted
            lines = start_submitted(directory, submission, os.environ, heard=not given.unheard)
        elif given.config is not None:
            overrides = dict(parse_override(text) for text in given.overrides)
            lines = start_from_config(given.config, overrides, os.environ)
        else:
            raise ConfigError("no configuration given: sbatch sbatch_templates/train.sbatch CONFIG")
    except (ConfigError, AllocationError, JobDirError, Unsubmittable) as error:
        print(f"tm_slurm: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
