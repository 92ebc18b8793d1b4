"""`tm-slurm cluster` and the one-line errors of the local cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from cluster_names import own_name

from tm_slurm.cli.cluster import cluster as command
from tm_slurm.localcluster import LocalCluster, LocalClusterError, requirements
from tm_slurm.localcluster.layout import Layout

pytestmark = pytest.mark.slurm

MAIN = "import sys; from tm_slurm.cli.cluster import cluster; cluster(sys.argv[1:], prog_name='tm-slurm')"


def tm_slurm(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", MAIN, *words],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def refused(*words: str) -> str:
    """The one line with which a command refuses."""
    done = CliRunner().invoke(command, list(words))
    assert done.exit_code == 2, done.output
    assert done.output.startswith("Error: ") and len(done.output.splitlines()) == 1
    return done.output


def test_a_cluster_from_up_to_down() -> None:
    name = ("--name", own_name("cli"))
    try:
        up = tm_slurm("up", "--nodes", "3", *name)
        assert up.returncode == 0, up.stderr
        assert (
            "export SLURM_CONF=" in up.stdout
            and f"tm-slurm cluster run --name {name[1]} -- squeue" in up.stdout
        )
        assert tm_slurm("run", *name, "--", "sinfo", "-h", "-o", "%D %T").stdout == "3 idle\n"
        assert tm_slurm("run", *name, "--", "sh", "-c", "exit 7").returncode == 7
        for words in (("power-off", "n1"), ("unplug", "n2"), ("freeze", "n3")):
            assert tm_slurm(*words, *name).returncode == 0
        status = json.loads(tm_slurm("status", "--json", *name).stdout)
        assert status["state"] == "up" and status["mode"] == "namespaces"
        assert [node["host"] for node in status["nodes"]] == ["off", "unplugged", "frozen"]
        for node in ("n1", "n2", "n3"):
            assert tm_slurm("restore", node, *name).returncode == 0
        assert tm_slurm("status", *name).stdout.count(" on ") == 3
        assert "runs with nodes=3, asked for 4" in refused("up", "--nodes", "4", *name)
        for words in (("freeze", "n7", *name), ("run", "--node", "n7", *name, "--", "true")):
            assert "no node 'n7': this cluster has n1 to n3" in refused(*words)
        assert f"`tm-slurm cluster down {' '.join(name)}` first" in refused("up", "--nodes", "4", *name)
    finally:
        assert tm_slurm("down", *name).returncode == 0
    assert tm_slurm("status", *name).returncode == 1
    assert "is not up: start it with" in refused("run", *name, "--", "squeue")


@pytest.mark.parametrize("verb", ["power-off", "unplug", "freeze", "restore", "run"])
def test_a_cluster_that_is_down_is_told_and_nothing_is_made(verb: str) -> None:
    name = own_name("down")
    error = refused(verb, "--name", name, "n1")
    assert f"is not up: start it with `tm-slurm cluster up --name {name}`" in error
    assert not LocalCluster(name=name).directory.exists()


def test_every_command_is_described_on_one_whole_line() -> None:
    shown = CliRunner().invoke(command, ["--help"], terminal_width=80).output
    assert "power-off" in shown and "...\n" not in shown.partition("Commands:")[2]


def test_missing_programs_are_named_with_their_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(requirements, "search_path", lambda: str(tmp_path))
    error = refused("up", "--mode", "plain", "--name", own_name("none"))
    assert "munged, slurmctld, slurmd" in error and "apt-get install munge slurm-wlm" in error


def test_a_directory_with_other_things_in_it_is_left_alone(tmp_path: Path) -> None:
    precious = tmp_path / "thesis.tex"
    precious.write_text("x")
    for verb in ("up", "down"):
        assert "holds other things (thesis.tex)" in refused(verb, "--directory", str(tmp_path))
    assert precious.read_text() == "x" and list(tmp_path.iterdir()) == [precious]


def test_a_directory_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    assert "too long for Slurm's sockets" in refused("up", "--directory", f"/tmp/{'x' * 80}")


@pytest.mark.parametrize("name", ["", "Local", "a b", "../x", "x" * 33])
def test_a_name_that_is_no_plain_word_is_refused(name: str) -> None:
    with pytest.raises(LocalClusterError, match="expected at most 32"):
        Layout.of(name, None)


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(LocalClusterError, match="nodes is 0: expected 1 to 250"):
        LocalCluster(nodes=0)
    with pytest.raises(LocalClusterError, match="mode 'real': expected auto, namespaces or plain"):
        LocalCluster(mode="real", name=own_name("real")).up()


def test_lines_of_slurm_conf_can_be_replaced_and_features_given() -> None:
    with LocalCluster(
        nodes=2,
        mode="plain",
        name=own_name("conf"),
        features={"n2": "service"},
        extra_conf="KillWait=7\nEpilog=/bin/true",
    ) as cluster:
        lines = cluster.run(["scontrol", "show", "config"]).stdout.splitlines()
        shown = {" ".join(line.split()) for line in lines}  # how wide the columns are depends on the release
        # of 26.05 on an epilog is a list
        assert "KillWait = 7 sec" in shown and {"Epilog = /bin/true", "Epilog[0] = /bin/true"} & shown
        assert cluster.run(["sinfo", "-h", "-N", "-o", "%N %f"]).stdout.split("\n")[1].strip() == "n2 service"


@pytest.mark.parametrize("mode", ["namespaces", "plain"])
def test_what_slurm_says_against_a_configuration_is_told(mode: str) -> None:
    name = own_name("wrong")
    error = refused("up", "--mode", mode, "--name", name, "--conf", "Colour=red")
    assert "slurmctld ended at once" in error and "unrecognized key: Colour" in error
    assert not LocalCluster(name=name).directory.exists()
