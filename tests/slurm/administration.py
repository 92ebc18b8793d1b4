"""A cluster with the administrators' part installed: one for a module of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster_names import own_name

from tm_slurm.cli.install import build_and_install
from tm_slurm.install import Installed
from tm_slurm.localcluster import LocalCluster


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Built against this machine's headers and put below a prefix of its own, as an administrator does."""
    prefix = tmp_path_factory.mktemp("administration")
    for folder in (prefix, prefix.parent, prefix.parent.parent):
        folder.chmod(0o755)
    build_and_install(prefix, state=prefix / "state")
    return Installed(prefix)


@pytest.fixture(scope="module")
def administered_cluster(installed: Installed) -> Iterator[LocalCluster]:
    with LocalCluster(
        nodes=3, mode="namespaces", name=own_name("spank"), administration=installed.prefix
    ) as cluster:
        yield cluster
