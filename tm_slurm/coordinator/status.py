"""What `tm-slurm status` shows, as one JSON object."""

from __future__ import annotations

import time
from typing import Any

from tm_slurm.coordinator.model import JobState
from tm_slurm.observe.record import Record


def status_of(state: JobState, record: Record, leader: str, term: int, job_id: int | None) -> dict[str, Any]:
    """Nodes with their standing and notice, ranks with their step, the move in flight, the last
    interruption."""
    phase = (
        "ended"
        if state.ended
        else "finishing"
        if state.finishing
        else "training"
        if state.started
        else "starting"
    )
    nodes = [
        {
            "node": node.name,
            "standing": node.standing,
            "batch_host": node.batch_host,
            "standby_job": node.job_id,
            "ranks": sorted(state.ranks_on(node.name)),
            "warm": bool(node.processes) and all(p.warm_for is not None for p in node.processes.values()),
            "notice": None
            if node.notice is None
            else {"kind": node.notice.kind, "reason": node.notice.reason},
            "kept_because": node.kept_because,
            "waiting": node.notice is not None and node.notice.said_waiting and node.standing == "active",
        }
        for node in state.nodes.values()
    ]
    ranks = [
        {**record.latest.get(rank, {"epoch": None, "step": None}), "rank": rank, "node": name, "slot": slot}
        for rank, (name, slot) in sorted(state.seats.items())
    ]
    move = None
    if state.move is not None:
        pairs = [[pair.leaver, pair.joiner] for pair in state.move.pairs]
        move = {"epoch": state.move.epoch, "phase": state.move.phase, "pairs": pairs}
    recovery = None
    if state.recovery is not None:
        recovery = {"epoch": state.recovery.epoch, "how": state.recovery.how}
    return {
        "job_id": job_id,
        "phase": phase,
        "at": time.time(),
        "leader": leader,
        "term": term,
        "epoch": state.epoch,
        "step": max((r["step"] for r in record.latest.values()), default=None),
        "step_at": record.last_step_at,
        "loss": record.last_loss,
        "steady_step_s": record.steady_step_s(),
        "nodes": nodes,
        "ranks": ranks,
        "absent": {str(rank): absent.adopter for rank, absent in sorted(state.absent.items())},
        "move": move,
        "recovery": recovery,
        "asked": [{"ask": ask.number, "job": ask.job_id} for ask in state.asks.values() if ask.is_coming],
        "windows": state.outlook.get("windows", []),
        "stopping": state.stopping,
        "moves_done": state.moves_done,
        "recorded_bytes": state.recorded_bytes,
        "last_interruption": record.last_move,
    }
