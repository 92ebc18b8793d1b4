"""torchft: replicas that find each other anew for each step, through a lighthouse."""

from __future__ import annotations

import json
from typing import Any, ClassVar

from baselines.rival import PLANNED, RANKS, WithStandby

SETTINGS = "BASELINES_TORCHFT"
"""Environment variable: what a replica has to know, as JSON."""

PORT = 29510
LIGHTHOUSE = {"join_timeout_ms": 500, "quorum_tick_ms": 10, "heartbeat_timeout_ms": 300}
TIMEOUT_S = 0.5
"""Of collectives, connections and what else waits; a third replica notices a loss by nothing else."""

MANAGER = {
    "timeout_s": TIMEOUT_S,
    "quorum_timeout_s": 30,
    "heartbeat_ms": 50,
    "min_replica_size": RANKS - 1,
}


class Torchft(WithStandby):
    """One replica a node. `least`: replicas without which the lighthouse gives no quorum."""

    least: ClassVar[int]
    packages = ("torch", "torchft")

    @classmethod
    def tuned(cls) -> dict[str, Any]:
        return {
            "lighthouse": {**LIGHTHOUSE, "min_replicas": cls.least, "on": "a host that nothing happens to"},
            "manager": {**MANAGER, "init_sync": False},
            "hook": "own: torchft's fails an assertion on gloo after a loss",
            "leaving": "at the end of a step",
        }

    def start(self) -> None:
        self.site.allocate()
        bind = {"bind": f"[::]:{PORT}", "min_replicas": self.least, **LIGHTHOUSE}
        self.site.serve("-m", "baselines.torchft_lighthouse", json.dumps(bind))
        lighthouse = f"http://{self.site.cluster.address('ctl')}:{PORT}"
        told = json.dumps({**MANAGER, "lighthouse": lighthouse})
        for rank, node in enumerate(self.site.nodes[:RANKS]):
            self.site.launch(node, "-m", "baselines.torchft_replica", str(rank), **{SETTINGS: told})
        self.site.files.make_standby(self.reserve)
        self.site.launch(self.reserve, "-m", "baselines.torchft_replica", **{SETTINGS: told})

    def leave(self, node: str, rank: int) -> None:
        self.site.files.order_to_leave(node)
        self.lost(PLANNED, node, rank)

    def lost(self, fault: str, node: str, rank: int) -> None:
        """The standby takes the place where all are needed; else those that are left go on without."""
        if self.least == RANKS:
            self.site.files.give_turn(self.reserve, rank)


class TorchftAll(Torchft):
    name = "torchft_all"
    what = "torchft, all four replicas required; a warm standby joins at the instant of the fault or drain"
    least = RANKS
    tuning: ClassVar = {}


class TorchftLess(Torchft):
    name = "torchft_less"
    what = "torchft, going on with three of four replicas (and three quarters of the throughput)"
    least = RANKS - 1
    ranks_after = RANKS - 1
    tuning: ClassVar = {}


TorchftAll.tuning = {**TorchftAll.tuned(), "reserve": "imported, model built, one step done alone"}
TorchftLess.tuning = {**TorchftLess.tuned(), "reserve": "none is used"}
