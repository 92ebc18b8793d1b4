"""A process that leads a large job as an agent would, without a node under it. A program of bench_scale:

python scale_leader.py JOB_DIR ACTIVE STANDBYS NODE HEARTBEAT_S KEEPALIVE_S LEASE_S

It stands for the lead when nobody has it, and leads until it is killed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from pathlib import Path

from tm_slurm.agent.following import LOOK_S
from tm_slurm.agent.leading import STAND_BACK_S
from tm_slurm.control import read_secret
from tm_slurm.coordinator.election import Candidate, LeaderWatch
from tm_slurm.coordinator.leader import Leader, Limits
from tm_slurm.coordinator.model import Plan

HOST = "127.0.0.1"


def plan_of(active: int, standbys: int) -> Plan:
    order = [f"n{number:05d}" for number in range(active + standbys)]
    return Plan(order, None, active, 1, release=True)


async def lead(
    job_dir: Path, plan: Plan, node: str, *, heartbeat_s: float, keepalive_s: float, lease_s: float
) -> None:
    watch = LeaderWatch(job_dir, 0, lease_s)
    candidate = Candidate(watch, node=node, host=HOST)
    limits = Limits(
        poll_interval_s=1.0, heartbeat_s=heartbeat_s, start_timeout_s=3600.0, reconnect_s=keepalive_s
    )
    stand_back_s = 0.0 if watch.look() is None else STAND_BACK_S  # the first leader has nobody before it
    while True:
        watch.look()
        over_s = watch.over_for_s()
        leadership = candidate.claim() if over_s is not None and over_s >= stand_back_s else None
        if leadership is None:
            await asyncio.sleep(LOOK_S)
            continue
        leader = Leader(
            job_id=None,
            node=node,
            host=HOST,
            plan=plan,
            leadership=leadership,
            secret=read_secret(job_dir),
            slurm=None,
            limits=limits,
        )
        await leader.lead()  # until another leads, or the machine has let it starve


def _end_with_the_bench() -> None:
    sys.stdin.read()
    os._exit(0)


def main() -> None:
    job_dir, active, standbys, node = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    heartbeat_s, keepalive_s, lease_s = map(float, sys.argv[5:8])
    logging.basicConfig(
        filename=job_dir / f"leader-{os.getpid()}.log",
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(message)s",
    )
    limits = {"heartbeat_s": heartbeat_s, "keepalive_s": keepalive_s, "lease_s": lease_s}
    threading.Thread(target=_end_with_the_bench, daemon=True).start()
    print("ready", flush=True)
    asyncio.run(lead(job_dir, plan_of(active, standbys), node, **limits))


if __name__ == "__main__":
    main()
