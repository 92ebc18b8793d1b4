"""nvidia-resiliency-ext's in-process restart: the processes stay, the training in them begins again, and one
in reserve takes a place."""

from __future__ import annotations

import json
from typing import ClassVar

from baselines.rival import RANKS, WithStandby

SETTINGS = "BASELINES_NVRX"
"""Environment variable: what a process has to know, as JSON."""

PORT = 29600
WRAPPER = {
    "monitor_thread_interval": 0.1,
    "monitor_process_interval": 0.1,
    "heartbeat_interval": 0.1,
    "progress_watchdog_interval": 0.1,
    "last_call_wait": 0.1,
    "heartbeat_timeout": 1.0,
    "soft_timeout": 10.0,
    "hard_timeout": 15.0,
    "barrier_timeout": 60.0,
    "completion_timeout": 60.0,
}
"""Seconds."""
GLOO_TIMEOUT_S = 0.5
"""As torchft's. Whoever is no neighbour of a lost rank notices by nothing else."""


class NvrxInprocess(WithStandby):
    name = "nvrx_inprocess"
    what = "nvidia-resiliency-ext's in-process restart, one warm process in reserve, a checkpoint each step"
    tuning: ClassVar = {
        "wrapper": WRAPPER,
        "gloo_timeout_s": GLOO_TIMEOUT_S,
        "checkpoint_every": 1,
        "reserve": "imported, and one step done alone",
        "store": "of the training: in a process of its own, on a host that nothing happens to",
        "leaving": "the leaver ends at the end of a step",
    }
    packages = ("torch", "nvidia-resiliency-ext")

    def start(self) -> None:
        self.site.allocate()
        self.site.serve("-m", "baselines.rendezvous_store", str(PORT))
        store = [self.site.cluster.address("ctl"), PORT]
        told = json.dumps({"wrapper": WRAPPER, "gloo_timeout_s": GLOO_TIMEOUT_S, "store": store})
        master = self.site.cluster.address(self.site.nodes[0])
        for rank, node in enumerate(self.site.nodes[: RANKS + 1]):
            place = {"RANK": str(rank), "WORLD_SIZE": str(RANKS + 1), "LOCAL_RANK": "0"}
            address = {"MASTER_ADDR": master, "MASTER_PORT": str(PORT)}
            self.site.launch(node, "-m", "baselines.nvrx_rank", **place, **address, **{SETTINGS: told})

    def leave(self, node: str, rank: int) -> None:
        self.site.files.order_to_leave(node)

    def lost(self, fault: str, node: str, rank: int) -> None:
        """The others notice by themselves."""
