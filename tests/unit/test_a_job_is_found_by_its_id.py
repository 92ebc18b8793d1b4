"""A job id names a job of the cluster that the shell is set up for, never one of another cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from tm_slurm.cli.status import status
from tm_slurm.slurm import configuration
from tm_slurm.submit.registry import register, registered


class Shell:
    """One user's home, and the slurm.conf that SLURM_CONF names, changed at will."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self._monkeypatch = monkeypatch
        monkeypatch.setenv("XDG_STATE_HOME", str(root / "state"))
        monkeypatch.setattr(configuration, "_PLACES", ())
        self.use(None)

    def use(self, text: str | None, file: str = "slurm.conf") -> None:
        if text is None:
            self._monkeypatch.delenv("SLURM_CONF", raising=False)
            return
        (self.root / file).write_text(text)
        self._monkeypatch.setenv("SLURM_CONF", str(self.root / file))

    def job(self, name: str) -> Path:
        (self.root / name).mkdir()
        return self.root / name


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    return Shell(tmp_path, monkeypatch)


A = "# made by hand\nClusterName=a\nSlurmctldHost=ctl(10.77.1.254)\n"


@pytest.mark.parametrize(
    "other",
    [
        "ClusterName=b\nSlurmctldHost=ctl(10.77.1.254)\n",
        "ClusterName=a\nSlurmctldHost=ctl(10.77.2.254)\n",
        A + "SlurmctldPort=7000\n",
    ],
)
def test_clusters_are_told_apart(shell: Shell, other: str) -> None:
    first, second = shell.job("first"), shell.job("second")
    shell.use(A)
    register(3, first)
    shell.use(other)
    assert registered(3) is None
    register(3, second)
    assert registered(3) == second
    shell.use(A)
    assert registered(3) == first


def test_a_copy_of_the_configuration_elsewhere_is_the_same_cluster(shell: Shell) -> None:
    shell.use(A, "cache.conf")
    register(3, shell.job("first"))
    shell.use(
        "SlurmctldPort=6817 # the default\nclustername = a\n" + A.lower().replace("#", "##"), "other.conf"
    )
    assert registered(3) == shell.root / "first"


def test_without_a_configuration_the_only_job_of_that_id_is_meant(shell: Shell) -> None:
    assert registered(3) is None
    shell.use(A)
    register(3, shell.job("first"))
    shell.use(None)
    assert registered(3) == shell.root / "first"
    shell.use("ClusterName=b\n")
    register(3, shell.job("second"))
    shell.use(None)
    assert registered(3) is None
    done = CliRunner().invoke(status, ["3"])
    assert (
        done.exit_code == 3
        and "job 3 is one of a@ctl_10.77.1.254_@6817 and of b@@6817: set SLURM_CONF" in done.stderr
    )


def test_the_newest_job_of_an_id_is_found_and_what_is_gone_is_forgotten(shell: Shell) -> None:
    shell.use(A)
    register(7, shell.job("old"))
    register(7, shell.job("new"))
    assert registered(7) == shell.root / "new"
    (shell.root / "new").rmdir()
    shell.use("ClusterName=b\n")
    register(8, shell.job("other"))
    assert [path.name for path in (shell.root / "state/tm_slurm/jobs").iterdir()] == ["b@@6817"]


def test_a_home_that_cannot_be_written_is_no_hindrance(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    (shell.root / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(shell.root / "file"))
    register(7, shell.job("job"))
    assert registered(7) is None
