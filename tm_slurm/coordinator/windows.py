"""When the job gets out of the way of what Slurm has in store for its nodes. Pure: (state, time) → the inputs
that are due.

a window over some nodes     they are left `lead_s` before it opens, like drained ones; standbys that are in
                             a window themselves come last, and none takes ranks that it could not keep
over all that could go on    the job goes back into the queue `stop_lead_s` before, with a checkpoint, and
                             begins again when the window has closed
the job's time is over       the same, where a checkpoint takes longer than Slurm's warning allows for
"""

from __future__ import annotations

from tm_slurm.coordinator.deciding import Input
from tm_slurm.coordinator.model import ComingWindow, JobState, Node

LEAD_S = 600.0
"""How long before a window its nodes are left, unless the config says otherwise or preparing takes longer."""

ID = "window/"
"""How the ids of windows begin."""

LEARNED_TIMES = 3.0
"""What has taken so long before is given so many times as long."""


def lead_s(state: JobState) -> float:
    """How long before a window its nodes are left, in seconds."""
    given = state.plan.window_lead_s
    return given if given is not None else max(LEAD_S, LEARNED_TIMES * state.prepared_s)


def stop_lead_s(state: JobState) -> float:
    """How long before it must have stopped the whole job begins to, in seconds."""
    return max(state.plan.stop_lead_s, LEARNED_TIMES * state.checkpoint_s)


def coming(state: JobState, given: Input) -> list[ComingWindow]:
    """The windows that an `outlook` tells of. Slurm's times become the job's: the wall clock of this leader
    counts only at the moment when it was told."""
    ahead = float(given["at"]) - float(given["wall"])
    return [
        ComingWindow(
            id=f"{ID}{told['name']}/{told['opens']:.0f}",
            name=str(told["name"]),
            nodes=tuple(name for name in told["nodes"] if name in state.nodes),
            opens_at=float(told["opens"]) + ahead,
            closes_at=float(told["closes"]) + ahead,
            opens=float(told["opens"]),
            closes=float(told["closes"]),
        )
        for told in given["windows"]
    ]


def end_of_time(given: Input) -> tuple[float | None, float]:
    """When the job's time is over, in the job's time, and how many seconds that is from its start, by an
    `outlook`; None when Slurm does not say."""
    starts, ends = given.get("starts"), given.get("ends")
    if starts is None or ends is None:
        return None, 0.0
    return float(ends) + float(given["at"]) - float(given["wall"]), float(ends) - float(starts)


def stops_at(state: JobState) -> float | None:
    """When the job begins to stop because of its time limit, if it should before Slurm's warning (SIGUSR2).

    Half of its time at most goes into that: a job that stops as soon as it has started gets nowhere."""
    learned = LEARNED_TIMES * state.checkpoint_s
    if state.ends_at is None or learned <= state.plan.stop_lead_s:
        return None
    return state.ends_at - min(learned, state.lasts_s / 2)


def imminent(state: JobState, now: float) -> list[ComingWindow]:
    """Windows for which nodes, or the whole job, may have to be out of the way by now."""
    return _within(state, max(lead_s(state), stop_lead_s(state)), now)


def _within(state: JobState, lead: float, now: float) -> list[ComingWindow]:
    return [window for window in state.windows if window.opens_at - lead <= now < window.closes_at]


def opens_next(state: JobState, node: str, now: float) -> float | None:
    """When the next window over a node opens, or has opened; None when none is known."""
    ahead = [w.opens_at for w in state.windows if node in w.nodes and w.closes_at > now]
    return min(ahead, default=None)


def outlasts(state: JobState, joiner: Node, leaver: Node, now: float) -> bool:
    """Whether ranks that leave a node for a window could stay on the joiner beyond it."""
    if leaver.notice is None or not leaver.notice.window or leaver.notice.deadline is None:
        return True
    opens = opens_next(state, joiner.name, now)
    return opens is None or opens > leaver.notice.deadline + lead_s(state)


def due(state: JobState, now: float) -> list[Input]:
    """What windows and the end of the job's time ask for at `now`, the job's time; nothing while the job ends
    or stops anyway."""
    if state.finishing or state.ended or state.stopping:
        return []
    stops = stops_at(state)
    if stops is not None and now >= stops:
        return [{"kind": "stop_due", "why": "time_limit", "window": ""}]
    windows = imminent(state, now)
    if not windows:
        return []
    covered = {name for window in windows for name in window.nodes}
    members = [node for node in state.nodes.values() if node.standing not in ("released", "lost")]
    outside = [n for n in members if n.name not in covered and _could_go_on(n, started=state.started)]
    if not outside or _has_to_be_requeued(state, windows, now):
        first = windows[0]
        if now < first.opens_at - stop_lead_s(state):
            return []
        return [{"kind": "stop_due", "why": "maintenance", "window": first.id, "whole": not outside}]
    found: list[Input] = []
    for window in _within(state, lead_s(state), now):
        nodes = [node.name for node in members if node.name in window.nodes and _is_to_be_noticed(node)]
        nodes = [name for name in nodes if not any(name in earlier["nodes"] for earlier in found)]
        if nodes:
            found.append({"kind": "window_due", "window": window.id, "nodes": nodes})
    return found


def reason_of(window: ComingWindow) -> str:
    """Why a node in it is left, for people."""
    return f"reservation {window.name}"


def _could_go_on(node: Node, *, started: bool) -> bool:
    """Whether ranks could be there when the windows have opened."""
    return (node.agent_up or not started) and node.standing != "leaving" and _is_to_be_noticed(node)


def _is_to_be_noticed(node: Node) -> bool:
    """Whether nothing speaks against the node yet."""
    return node.notice is None or not node.notice.gives_back


def _has_to_be_requeued(state: JobState, windows: list[ComingWindow], now: float) -> bool:
    """Whether ranks are left over on nodes of a window that is about to open, and the config would have the
    job requeued rather than lose them there."""
    if "requeue" not in state.plan.on_no_standby or state.move is not None or not state.started:
        return False
    lead = stop_lead_s(state)
    pressing = {name for w in windows if now >= w.opens_at - lead for name in w.nodes}
    return any(
        node.name in pressing
        and node.standing == "active"
        and node.notice is not None
        and node.notice.said_waiting
        for node in state.nodes.values()
    )
