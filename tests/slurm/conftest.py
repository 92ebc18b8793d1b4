"""Clusters of real Slurm daemons for the tests: one for the session, put back in order after each test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import suite_record
from cluster_names import own_name, was_left_behind
from undisturbed_runs import undisturbed  # noqa: F401  (a fixture for every test here)

from tm_slurm.localcluster import LocalCluster
from tm_slurm.localcluster.layout import default_root

_SOURCES = suite_record.sources()
_OUTCOMES: dict[str, str] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Of the tests in this folder."""
    if report.failed or report.skipped:
        _OUTCOMES[report.nodeid] = report.outcome
    elif report.when == "call":
        _OUTCOMES[report.nodeid] = "passed"


def pytest_sessionfinish() -> None:
    """What has passed on this release is written down: `make bench-slurm` tells it."""
    if _OUTCOMES:
        suite_record.record(_OUTCOMES, _SOURCES)


@pytest.fixture(scope="session", autouse=True)
def no_clusters_of_dead_tests() -> None:
    """Takes down what killed test processes have left behind; those of running ones are left alone."""
    root = default_root()
    for path in root.glob("test-*") if root.is_dir() else ():
        if was_left_behind(path.name):
            LocalCluster(name=path.name).down()


def in_order(cluster: LocalCluster) -> Iterator[LocalCluster]:
    """It is up; afterwards jobs are cancelled and nodes restored, until all are idle."""
    cluster.up()
    yield cluster
    cluster.reset()


@pytest.fixture(scope="session")
def session_cluster() -> Iterator[LocalCluster]:
    """Six nodes, each a host of its own (root). A machine that cannot is an error, not a reason to skip."""
    with LocalCluster(nodes=6, mode="namespaces", name=own_name("hosts")) as cluster:
        yield cluster


@pytest.fixture
def cluster(session_cluster: LocalCluster) -> Iterator[LocalCluster]:
    """The session's cluster; afterwards jobs are cancelled and nodes restored, until all are idle."""
    yield from in_order(session_cluster)


@pytest.fixture(scope="module")
def module_plain_cluster() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=6, mode="plain", name=own_name("plain")) as cluster:
        yield cluster


@pytest.fixture
def plain_cluster(module_plain_cluster: LocalCluster) -> Iterator[LocalCluster]:
    """Six slurmd on loopback, one cluster for each module of tests, put back in order after each test."""
    yield from in_order(module_plain_cluster)


@pytest.fixture(scope="module")
def module_wide_cluster() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=8, mode="namespaces", name=own_name("wide")) as cluster:
        yield cluster


@pytest.fixture
def wide(module_wide_cluster: LocalCluster) -> Iterator[LocalCluster]:
    """Eight nodes, each a host of its own, put back in order after each test."""
    yield from in_order(module_wide_cluster)


@pytest.fixture
def shared_dir(tmp_path: Path) -> Path:
    """A directory of the test that every node and every user reaches."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and folder.name.startswith(("pytest-", tmp_path.name)):
            folder.chmod(0o755)
    tmp_path.chmod(0o777)
    return tmp_path
