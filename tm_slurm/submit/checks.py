"""What can be known to be wrong before anything is submitted.

No import of the user's code, and none of torch.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tm_slurm.config import Config
from tm_slurm.config.time_limit import parse_time_limit
from tm_slurm.slurm import HostlistError, PartitionInfo, Slurm, expand
from tm_slurm.submit.job_dir import shared_root
from tm_slurm.submit.resources import cpus_per_node


class Unsubmittable(RuntimeError):
    """The job could not run as it is configured: one line, what was expected and found and which key to
    change.
    """


def check_program(config: Config) -> None:
    """Raise Unsubmittable when the script or module to run cannot be found. Imports nothing."""
    train = config.train
    if train.script is not None and not Path(train.script).is_file():
        raise Unsubmittable(f"train.script: no such file: {train.script}")
    same_python = config.job.python is None or Path(config.job.python) == Path(sys.executable)
    if train.module is not None and same_python and not _module_exists(train.module):
        raise Unsubmittable(
            f"train.module: no module {train.module} in {os.getcwd()} or what {sys.executable} has installed"
        )


def check_torch(config: Config) -> None:
    """Raise Unsubmittable when the torch that is installed is not the one that tm_slurm is for: its native
    part would not load. Only where this Python is the one that the job runs with; imports nothing.
    """
    if config.job.python is not None and Path(config.job.python) != Path(sys.executable):
        return
    from importlib.metadata import PackageNotFoundError, requires, version

    try:
        pins = [text for text in requires("tm_slurm") or () if text.startswith("torch==")]
    except PackageNotFoundError:  # run from a checkout that is not installed
        return
    wanted = pins[0].partition("==")[2] if pins else None
    try:
        found = version("torch").partition("+")[0]
    except PackageNotFoundError:
        found = "is missing"
    if wanted is not None and found != wanted:
        raise Unsubmittable(
            f"torch {found}: {sys.executable} needs torch {wanted}, which tm_slurm is built for: "
            f"pip install torch=={wanted}"
        )


def check_options(config: Config) -> None:
    """Raise Unsubmittable when an example that ships with tm_slurm could not run with its `train.options` on
    so many ranks. What a user's own program makes of them is its own affair.
    """
    package, _, name = (config.train.module or "").rpartition(".")
    if package != "tm_slurm.examples" or not _module_exists(f"{package}.{name}_options"):
        return
    options = importlib.import_module(f"{package}.{name}_options")
    try:
        options.check(config.train.options, config.job.nodes * config.job.ranks_per_node)
    except ValueError as error:
        raise Unsubmittable(str(error)) from None


def check_directory(config: Config) -> None:
    """Raise Unsubmittable when no job directory can be made where the resolved `config` wants it."""
    root = shared_root(config)
    existing = root
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise Unsubmittable(f"job.directory: {existing} is not a directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise Unsubmittable(
            f"job.directory: {existing} cannot be written; choose a place of yours that nodes share"
        )


def check_partition(config: Config, slurm: Slurm) -> None:
    """Raise Unsubmittable when the partition does not exist or cannot hold the job.

    Raises SlurmUnavailable and SlurmRefused like every question.
    """
    partition = _partition(config, slurm.partitions())
    job = config.job
    try:
        excluded = set(expand(job.exclude or ""))
    except HostlistError as error:
        raise Unsubmittable(f"job.exclude: {error}") from error
    usable = [node for node in partition.nodes if node not in excluded]
    limit = min(len(usable), partition.max_nodes or len(usable))
    if job.all_nodes > limit:
        raise Unsubmittable(
            f"job.nodes {job.nodes} and job.standbys {job.standbys} need {job.all_nodes} nodes, "
            f"partition {partition.name} has {limit} for a job: ask for fewer, or set job.partition"
        )
    cpus = max((node.cpus for node in slurm.nodes(usable).values()), default=0)
    if cpus and cpus_per_node(config) > cpus:
        raise Unsubmittable(
            f"job.ranks_per_node {job.ranks_per_node} and job.cpus_per_rank {job.cpus_per_rank} need "
            f"{cpus_per_node(config)} CPUs a node, the largest node of partition {partition.name} has {cpus}"
        )
    asked = parse_time_limit(job.time_limit)
    if asked is not None and partition.max_time_s is not None and asked > partition.max_time_s:
        raise Unsubmittable(
            f"job.time_limit: {asked / 60:g} minutes, partition {partition.name} allows "
            f"{partition.max_time_s / 60:g}: ask for less; the job goes back into the queue and on by itself"
        )


def _partition(config: Config, partitions: dict[str, PartitionInfo]) -> PartitionInfo:
    name = config.job.partition
    if name is None:
        for partition in partitions.values():
            if partition.is_default:
                return partition
        raise Unsubmittable(
            f"job.partition: the cluster has no default; choose one of {', '.join(partitions)}"
        )
    if name not in partitions:
        close = difflib.get_close_matches(name, list(partitions), n=1)
        hint = f"; did you mean {close[0]}?" if close else f"; there are {', '.join(partitions) or 'none'}"
        raise Unsubmittable(f"job.partition: no partition {name!r}{hint}")
    return partitions[name]


def _module_exists(name: str) -> bool:
    """Look a module up as `python -m` does from here, package by package, without importing any."""
    search: Sequence[str] | None = [os.getcwd(), *sys.path]
    parts = name.split(".")
    for depth in range(len(parts)):
        spec = importlib.machinery.PathFinder.find_spec(".".join(parts[: depth + 1]), search)
        if spec is None and depth == 0:
            spec = importlib.util.find_spec(parts[0])  # of a package that is installed with -e
        if spec is None:
            return depth == 0 and len(parts) == 1 and name in sys.builtin_module_names
        search = spec.submodule_search_locations
        if search is None and depth < len(parts) - 1:
            return False
    return True
