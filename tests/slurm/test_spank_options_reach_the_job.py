"""`--tm-standbys`, `--tm-policy`, `--tm-lead` and `--tm-off`: refused where they are typed, heard where they
count; and a plugin of another release, which keeps no job from running."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from administration import administered_cluster, installed  # noqa: F401
from waiting import until

from tm_slurm.config import load
from tm_slurm.install import Installed
from tm_slurm.localcluster import LocalCluster

pytestmark = pytest.mark.slurm

GIVEN = ["--tm-standbys=2", "--tm-policy=double-up,fail", "--tm-lead=5", "--tm-off"]
HEARD = {
    "TM_SLURM_STANDBYS": "2",
    "TM_SLURM_POLICY": "double-up,fail",
    "TM_SLURM_LEAD_MINUTES": "5",
    "TM_SLURM_OFF": "1",
}

WRONG = {
    "--tm-standbys=two": "a number of nodes from 0 to 65535",
    "--tm-standbys=70000": "a number of nodes from 0 to 65535",
    "--tm-policy=pray": "some of wait,double-up,",
    "--tm-policy=wait,wait": "none twice",
    "--tm-lead=0": "minutes from 1 to 10080",
}


@pytest.fixture
def cluster(administered_cluster: LocalCluster) -> Iterator[LocalCluster]:  # noqa: F811
    yield administered_cluster
    administered_cluster.reset()


def heard(text: str) -> dict[str, str]:
    """The variables of ours in the output of env."""
    pairs = [line.partition("=") for line in text.splitlines()]
    return {name: value for name, _, value in pairs if name in HEARD}


def test_what_is_asked_for_is_in_the_environment_of_the_job(cluster: LocalCluster, shared_dir: Path) -> None:
    assert heard(cluster.run(["srun", *GIVEN, "env"]).stdout) == HEARD
    assert heard(cluster.run(["salloc", *GIVEN, "env"]).stdout) == HEARD
    out = shared_dir / "out"
    cluster.run(["sbatch", *GIVEN, f"--output={out}", "--wrap=env; srun env; echo done"])
    until(lambda: out.exists() and out.read_text().endswith("done\n"))
    assert heard(out.read_text()) == HEARD
    assert out.read_text().count("\nTM_SLURM_STANDBYS=2\n") == 2, "in the batch script and in its step"


def test_a_wrong_value_is_refused_at_submission(cluster: LocalCluster) -> None:
    for option, expected in WRONG.items():
        for command in (
            ["sbatch", option, "--wrap=true"],
            ["srun", option, "true"],
            ["salloc", option, "true"],
        ):
            done = cluster.run(command, check=False)
            assert done.returncode != 0
            ours = [line for line in done.stderr.splitlines() if line.startswith("tm_slurm: ")]
            assert len(ours) == 1 and option.partition("=")[0] in ours[0] and expected in ours[0], done.stderr
    assert cluster.run(["squeue", "--noheader"]).stdout == ""


def test_values_reach_the_configuration_of_the_job(cluster: LocalCluster, shared_dir: Path) -> None:
    config = shared_dir / "job.yaml"
    config.write_text("job: {nodes: 3, directory: jobs}\ntrain: {module: this}\n")
    prepare = f"{sys.executable} -m tm_slurm.submit.prepare {config}"
    out = shared_dir / "out"
    script = f"{prepare} || echo refused; echo done"
    options = ["--nodes=3", "--cpus-per-task=1", f"--output={out}"]
    cluster.run(
        ["sbatch", *options, "--tm-standbys=1", "--tm-policy=double-up,fail", f"--wrap={script}"],
        cwd=shared_dir,
    )
    until(lambda: out.exists() and out.read_text().endswith("done\n"), timeout_s=60.0)
    (written,) = shared_dir.glob("jobs/*/config.yaml")
    found = load(written)
    assert (found.job.nodes, found.job.standbys) == (2, 1)
    assert found.policy.on_no_standby == ["double-up", "fail"]
    out.unlink()
    cluster.run(["sbatch", *options, "--tm-standbys=3", f"--wrap={script}"], cwd=shared_dir)
    until(lambda: out.exists() and out.read_text().endswith("done\n"), timeout_s=60.0)
    assert "tm_slurm: --tm-standbys=3: the job has 3 nodes" in out.read_text()


def test_a_plugin_of_another_release_is_left_out(
    cluster: LocalCluster,
    tmp_path: Path,
    installed: Installed,  # noqa: F811
) -> None:
    headers = tmp_path / "include"
    shutil.copytree("/usr/include/slurm", headers / "slurm")
    for header in (headers / "slurm").glob("*.h"):
        text = header.read_text()
        if "define SLURM_VERSION_NUMBER" in text:
            header.write_text(
                "\n".join(
                    "#define SLURM_VERSION_NUMBER 0x630b00"
                    if line.startswith("#define SLURM_VERSION_NUMBER")
                    else line
                    for line in text.splitlines()
                )
            )
    build = tmp_path / "build"
    plugin = build / "tm_slurm.so"
    sources = Path(__file__).parents[2] / "spank"
    command = ["make", "-s", "-C", str(sources), str(plugin), f"BUILD={build}", f"SLURM_INCLUDE={headers}"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    usual = installed.plugin.with_suffix(".usual")
    installed.plugin.rename(usual)
    try:
        shutil.copy(plugin, installed.plugin)
        done = cluster.run(["srun", "echo", "ran"])
        assert done.stdout == "ran\n"
        assert "ncompatible" in done.stderr and str(installed.plugin) in done.stderr, done.stderr
        assert cluster.run(["srun", "--tm-off", "true"], check=False).returncode != 0, (
            "there is no such option"
        )
        assert "DRAIN" not in "".join(cluster.node_states().values())
    finally:
        usual.replace(installed.plugin)
    assert cluster.run(["srun", "--tm-off", "echo", "ran"]).stdout == "ran\n"


def test_only_what_slurm_calls_is_exported(installed: Installed) -> None:  # noqa: F811
    done = subprocess.run(
        ["nm", "-D", "--defined-only", str(installed.plugin)],
        capture_output=True,
        text=True,
        check=True,
        timeout=10,
    )
    names = {line.split()[-1] for line in done.stdout.splitlines()}
    others = {name for name in names if not name.startswith("slurm_spank_")}
    assert others == {"plugin_name", "plugin_type", "plugin_version", "spank_plugin_version"}, "Slurm's own"


def test_install_shows_what_is_there_and_uninstall_removes_it(
    installed: Installed,  # noqa: F811
    tmp_path: Path,
) -> None:
    shown = [sys.executable, "-m", "tm_slurm", "install", "--print", f"--prefix={installed.prefix}"]
    lines = subprocess.run(shown, capture_output=True, text=True, check=True, timeout=60).stdout
    named = set(re.findall(rf"{installed.prefix}[^\s*]*", lines))
    assert len(named) >= 9 and all(Path(path).exists() for path in named), named
    sources = Path(__file__).parents[2] / "spank"
    made = ["make", "-s", "-C", str(sources), f"PREFIX={installed.prefix}", f"STATE={installed.prefix}/state"]
    for goal in ("install", "uninstall"):
        done = subprocess.run(
            [*made, f"DESTDIR={tmp_path}", goal], capture_output=True, text=True, check=True, timeout=60
        )
        found = [path for path in tmp_path.rglob("*") if not path.is_dir()]
        assert bool(found) == (goal == "install"), (found, done.stderr)
    assert installed.is_there, "what is installed elsewhere is left alone"


def test_the_c_parts_do_as_they_say(tmp_path: Path) -> None:
    sources = Path(__file__).parents[2] / "spank"
    command = ["make", "-s", "-C", str(sources), "check", f"BUILD={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["test_notify:", "ok", "test_plugin:", "ok"]
