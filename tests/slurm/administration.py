"""A cluster with the administrators' part installed: one for a module of tests."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_names import own_name

from tm_slurm.cli.install import build_and_install
from tm_slurm.install import Installed
from tm_slurm.localcluster import LocalCluster


@contextlib.contextmanager
def open_directory(name: str) -> Iterator[Path]:
    """A directory that every user reaches: pytest's own are for one user, and every pytest that starts makes
    them so again."""
    with tempfile.TemporaryDirectory(prefix=f"tm-slurm-{name}-", dir="/tmp") as path:
        os.chmod(path, 0o755)
        yield Path(path)


@pytest.fixture(scope="session")
def installed() -> Iterator[Installed]:
    """Built against this machine's headers and put below a prefix of its own, as an administrator does."""
    with open_directory("administration") as prefix:
        build_and_install(prefix, state=prefix / "state")
        yield Installed(prefix)


@pytest.fixture(scope="module")
def administered_cluster(installed: Installed) -> Iterator[LocalCluster]:
    with LocalCluster(
        nodes=3, mode="namespaces", name=own_name("spank"), administration=installed.prefix
    ) as cluster:
        yield cluster
