"""The job's comment in Slurm (`squeue -o %k`, `scontrol show job`): one line that says how things stand."""

from __future__ import annotations

from tm_slurm.coordinator.model import JobState


def comment_of(state: JobState) -> str:
    """What an administrator or a user should know now. JOBID stands for the job's id."""
    parts = []
    waiting = [n.name for n in state.nodes.values() if n.notice is not None and n.standing == "active"]
    if waiting and state.move is None and not state.finishing:
        names = ",".join(waiting)
        parts.append(
            f"{names} should be left but no standby is free: training goes on there; "
            f"to cancel: scontrol update nodename={names} state=resume"
        )
    for node in state.nodes.values():
        if node.standing == "kept":
            parts.append(
                f"{node.name} has no ranks any more but stays DRAINING: {node.kept_because}; "
                "it is given back when the job ends, or at once with: scontrol requeue JOBID"
            )
    if state.absent and not state.finishing:
        ranks = ",".join(map(str, sorted(state.absent)))
        parts.append(f"no node is left for ranks {ranks}: others do their shares until one comes")
    if not parts:
        parts.append("training ended" if state.ended else "training" if state.started else "starting")
    return f"tm_slurm epoch={state.epoch} moves={state.moves_done}: " + "; ".join(parts)
