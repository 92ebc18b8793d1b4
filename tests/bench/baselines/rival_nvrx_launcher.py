"""nvidia-resiliency-ext's launcher: as torchrun, with a monitor for each rank (in-job restart)."""

from __future__ import annotations

from typing import ClassVar

from baselines.rival_torchrun import ARRANGED, Torchrun

OPTIONS = (
    "--monitor-interval=0.1",
    "--ft-workload-check-interval=0.1",
    "--ft-node-health-check-interval=0.5",
    "--ft-restart-check-interval=0.5",
    "--workers-stop-timeout=1",
)


class FtLauncher(Torchrun):
    name = "ft_launcher"
    what = "ft_launcher (in-job restart) 4:4 with a node in reserve, a checkpoint each step"
    module = "nvidia_resiliency_ext.fault_tolerance.launcher"
    options: ClassVar = OPTIONS
    tuning: ClassVar = {**ARRANGED, "checkpoint_every": 1, "options": list(OPTIONS)}
    packages = ("torch", "nvidia-resiliency-ext")
