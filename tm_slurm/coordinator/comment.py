"""The job's comment in Slurm (`squeue -o %k`, `scontrol show job`): one line that says how things stand."""

from __future__ import annotations

import time

from tm_slurm.coordinator.model import JobState, Node


def comment_of(state: JobState) -> str:
    """What an administrator or a user should know now. JOBID stands for the job's id."""
    parts = []
    if state.stopping:
        after = f", and begins again after {_utc(state.begins)}" if state.begins is not None else ""
        parts.append(f"stopping ({state.stopping}): goes back into the queue with a checkpoint{after}")
    coming = [w for w in state.windows if any(_is_there(state.nodes[name]) for name in w.nodes)]
    for window in () if state.stopping else coming[:1]:
        names = ",".join(name for name in window.nodes if _is_there(state.nodes[name]))
        opens = _utc(window.opens)
        parts.append(f"{names} will be left before reservation {window.name} begins at {opens}")
    special = state.nodes.special()
    waiting = [n.name for n in special if n.notice is not None and n.standing == "active"]
    if waiting and state.move is None and not state.finishing:
        names = ",".join(waiting)
        for_windows = all(_notice_is_for_a_window(state.nodes[name]) for name in waiting)
        cancel = "delete the reservation" if for_windows else f"scontrol update nodename={names} state=resume"
        parts.append(
            f"{names} should be left but no standby is free: training goes on there; to cancel: {cancel}"
        )
    for node in special:
        if node.standing == "kept":
            at_once = (
                ", or at once with: scancel --signal=USR2 JOBID (checkpoint, and back into the queue)"
                if state.plan.requeues_left > 0
                else ""
            )
            parts.append(
                f"{node.name} has no ranks any more but stays DRAINING: {node.kept_because}; "
                f"it is given back when the job ends{at_once}"
            )
    asked = [ask for ask in state.asks.values() if ask.is_coming]
    if asked and not state.finishing:
        jobs = ",".join(str(ask.job_id) for ask in asked if ask.job_id is not None)
        parts.append(f"waiting for {len(asked)} more node(s)" + (f" (job {jobs})" if jobs else ""))
    if state.absent and not state.finishing:
        ranks = ",".join(map(str, sorted(state.absent)))
        parts.append(f"no node is left for ranks {ranks}: others do their shares until one comes")
    if not parts:
        parts.append("training ended" if state.ended else "training" if state.started else "starting")
    return f"tm_slurm epoch={state.epoch} moves={state.moves_done}: " + "; ".join(parts)


def _is_there(node: Node) -> bool:
    return node.standing not in ("released", "lost")


def _notice_is_for_a_window(node: Node) -> bool:
    return node.notice is not None and bool(node.notice.window)


def _utc(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))
