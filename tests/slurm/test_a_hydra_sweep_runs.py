"""The hydra example: what it composes is a configuration of ours and one of the launcher's, and a sweep of
two jobs runs on a real cluster to its end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf

from tm_slurm.config import loads
from tm_slurm.localcluster import LocalCluster
from tm_slurm.observe.follow import JobFiles

CONFIGS = Path(__file__).parents[2] / "configs" / "hydra"


def test_what_is_composed_is_valid_on_both_sides() -> None:
    with initialize_config_dir(config_dir=str(CONFIGS), version_base="1.3"):
        whole = compose("char_gpt", overrides=["job.nodes=3"], return_hydra_config=True)
        ours = compose("char_gpt", overrides=["job.nodes=3", "train.options.learning_rate=1e-3"])
    config = loads(OmegaConf.to_yaml(ours, resolve=True), name="composed")
    assert (config.job.nodes, config.train.options["learning_rate"]) == (3, 1e-3)
    OmegaConf.set_readonly(whole.hydra, False)
    whole.hydra.sweep.dir, whole.hydra.job.name = "sweep", "sweep"
    launcher = instantiate(whole.hydra.launcher)
    assert type(launcher).__name__ == "SlurmLauncher"
    assert (launcher.params["nodes"], launcher.params["tasks_per_node"], launcher.params["name"]) == (
        1,
        1,
        "char_gpt",
    )


@pytest.mark.slurm
def test_a_sweep_of_two_jobs_comes_to_its_end(cluster: LocalCluster, tmp_path: Path) -> None:
    words = ["job.nodes=1", "job.standbys=0", f"job.directory={tmp_path}/jobs", "train.steps=3"]
    words += ["train.options.learning_rate=1e-3,3e-3", "hydra.launcher.timeout_min=10"]
    command = [sys.executable, "-m", "tm_slurm.examples.hydra_sweep", "--config-dir", str(CONFIGS)]
    done = cluster.run(
        [*command, "--config-name=char_gpt", "--multirun", f"hydra.sweep.dir={tmp_path}/sweep", *words],
        cwd=tmp_path,
        timeout_s=240.0,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = [JobFiles(path).verdict() for path in (tmp_path / "jobs").iterdir()]
    assert [verdict and verdict["state"] for verdict in verdicts] == ["completed", "completed"]
    losses = {JobFiles(path).steps()[-1]["loss"] for path in (tmp_path / "jobs").iterdir()}
    assert len(losses) == 2  # the second had another learning rate
