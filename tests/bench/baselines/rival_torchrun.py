"""torchrun: all ranks restart from the newest checkpoint, on the nodes that are left and one in reserve."""

from __future__ import annotations

from typing import ClassVar

from baselines.ddp_rank import EVERY
from baselines.rival import DEATH, RANKS, WithStandby

PORT = 29400
RENDEZVOUS = {
    "is_host": 0,
    "join_timeout": 60,
    "last_call_timeout": 1,
    "close_timeout": 5,
    "keep_alive_interval": 1,
    "keep_alive_max_attempt": 2,
}
ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""With the store shared, restarted workers find the addresses of those before."""


class Torchrun(WithStandby):
    """`every`: steps between two checkpoints."""

    module = "torch.distributed.run"
    every: ClassVar[int] = 1
    options: ClassVar[tuple[str, ...]] = ("--monitor-interval=0.1",)

    def arguments(self, node: str) -> list[str]:
        store, here = self.site.cluster.address("ctl"), self.site.cluster.address(node)
        conf = ",".join(f"{key}={value}" for key, value in RENDEZVOUS.items())
        return [
            f"--nnodes={RANKS}:{RANKS}",
            "--nproc-per-node=1",
            "--max-restarts=100",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={store}:{PORT}",
            "--rdzv-id=baselines",
            f"--rdzv-conf={conf}",
            f"--local-addr={here}",
            *self.options,
            "--module",
            "baselines.ddp_rank",
        ]

    def start(self) -> None:
        self.site.allocate()
        self.site.serve("-m", "baselines.rendezvous_store", str(PORT))
        environment = {**ENVIRONMENT, EVERY: str(self.every)}
        for node in self.site.nodes[:RANKS]:
            self.site.launch(node, "-m", self.module, *self.arguments(node), **environment)
        self.site.files.make_standby(self.reserve)
        words = ["-m", "baselines.standby_launcher", self.module, *self.arguments(self.reserve)]
        self.site.launch(self.reserve, *words, **environment)

    def leave(self, node: str, rank: int) -> None:
        self.site.files.order_to_leave(node)
        self.site.files.give_turn(self.reserve)

    def lost(self, fault: str, node: str, rank: int) -> None:
        """A dead worker is started again where it was."""
        if fault != DEATH:
            self.site.files.give_turn(self.reserve)


ARRANGED = {
    "rendezvous": RENDEZVOUS,
    "environment": ENVIRONMENT,
    "store": "in a process of its own, on a host that nothing happens to",
    "reserve": "a launcher that has imported all it needs joins at the instant of the fault or drain",
    "leaving": "a checkpoint at the next step's end, then the leaver goes, at the end of a step",
}


class TorchrunEach(Torchrun):
    name = "torchrun"
    what = "torchrun 4:4 with a node in reserve, a checkpoint each step"
    tuning: ClassVar = {**ARRANGED, "checkpoint_every": 1, "options": list(Torchrun.options)}


class TorchrunTen(Torchrun):
    name = "torchrun_10"
    what = "torchrun 4:4 with a node in reserve, a checkpoint each 10 steps"
    every = 10
    tuning: ClassVar = {**ARRANGED, "checkpoint_every": 10, "options": list(Torchrun.options)}
