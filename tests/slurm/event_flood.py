"""Signed events at a given rate from the controller's host of a cluster, each fact told twice.

As a program: `python event_flood.py JOB_DIR JOB_ID NODE PER_S SECONDS`; prints {"sent": …, "seconds": …}.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from event_receiver import Receiver
from waiting import until

from tm_slurm.control.frames import encode
from tm_slurm.coordinator.election import LeaderFile
from tm_slurm.events.signed import signed_frame
from tm_slurm.localcluster import LocalCluster

SENDERS = 8


@dataclass(frozen=True)
class Flooded:
    """What was sent, and what came of it. `taken`: distinct facts in the coordinator's timeline."""

    sent: int
    seconds: float
    facts: int
    taken: int


def flood(
    cluster: LocalCluster, coordinator: Receiver, job_id: int, *, per_s: int, seconds: float
) -> Flooded:
    """Send for `seconds`, a connection an event, as tm-notify does; wait until all is taken, or nothing more
    comes."""
    command = [
        sys.executable,
        __file__,
        str(coordinator.job_dir),
        str(job_id),
        "n1",
        str(per_s),
        str(seconds),
    ]
    done = cluster.run(command, env={"PYTHONPATH": os.pathsep.join(sys.path)}, timeout_s=seconds + 60)
    said = json.loads(done.stdout)
    facts = said["sent"] // 2

    def taken() -> int:
        return len({event["id"] for event in coordinator.events("task_exit") if "/flood-" in event["id"]})

    def settled() -> bool:
        before = taken()
        time.sleep(0.5)
        return before == taken()

    until(settled)
    return Flooded(said["sent"], said["seconds"], facts, taken())


async def _flood(job_dir: Path, job_id: int, node: str, per_s: int, seconds: float) -> None:
    leader = LeaderFile.read(job_dir)
    assert leader is not None
    secret = (job_dir / "secret").read_bytes()
    count = int(per_s * seconds)
    began = time.monotonic()

    def frame(number: int) -> bytes:
        told = {"v": 1, "job": job_id, "restart": 0, "term": leader.term, "at": time.time(), "node": node}
        fact = {"kind": "task_exit", "source": "spank", "fact": f"flood-{number // 2}", "reason": "flood"}
        return encode(signed_frame(secret, {**told, **fact, "nonce": secrets.token_hex(16)}))

    async def tell(number: int) -> None:
        reader, writer = await asyncio.open_connection(leader.host, leader.port)
        writer.write(frame(number))
        size = int.from_bytes(await reader.readexactly(4), "big")
        answer = json.loads(await reader.readexactly(size))
        assert answer == {"ok": True}, answer
        writer.close()

    async def send(first: int) -> None:
        for number in range(first, count, SENDERS):
            await asyncio.sleep(max(0.0, began + number / per_s - time.monotonic()))
            await asyncio.wait_for(tell(number), 30.0)

    await asyncio.gather(*(send(first) for first in range(SENDERS)))
    print(json.dumps({"sent": count, "seconds": time.monotonic() - began}))


if __name__ == "__main__":
    asyncio.run(
        _flood(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), float(sys.argv[5]))
    )
