"""The coordinator's decisions: (state, input) → actions. No clock, no network, no files: the same inputs give
the same decisions, so a journal of the inputs is the whole memory of a leader, and a test needs a
millisecond.

Inputs are JSON objects with `kind` and `at` (wall-clock seconds). TrainMover §3 and §5 describe the two
phases.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tm_slurm.coordinator import windows
from tm_slurm.coordinator.actions import Action, Comment, Release
from tm_slurm.coordinator.comment import comment_of
from tm_slurm.coordinator.deciding import Input
from tm_slurm.coordinator.model import Node, Notice, Recovery
from tm_slurm.coordinator.recovery import ACCUSED_GRACE_S
from tm_slurm.coordinator.refilling import Refilling

AGENT_INPUTS = frozenset(
    {
        "adopted",
        "agent_retired",
        "broken",
        "checkpoint_failed",
        "checkpoint_published",
        "checkpoint_written",
        "gives_up",
        "join_failed",
        "joined",
        "leaver_prepared",
        "not_joined",
        "process_exited",
        "process_ready",
        "process_stopped",
        "process_unwell",
        "process_warm",
        "rank_done",
        "recorded",
        "recording_failed",
        "replica_key",
        "resumed",
        "snapshot_stored",
        "source_ready",
        "stopped",
        "survivor",
        "switching",
        "time_limit",
        "too_late",
        "vault",
    }
)
"""Inputs that an agent may bring."""

OF_A_PROCESS = frozenset(AGENT_INPUTS - {"agent_retired", "process_exited", "process_ready", "vault"})
"""Inputs by which a process speaks: what one says that was declared dead counts for nothing."""

STOP_KINDS = frozenset({"time_limit", "preempt"})
"""Events after which the whole job stops as soon as its state is kept."""

LEAVE_KINDS = frozenset({"drain", "fail", "down", "maintenance", "reboot", "unhealthy", "straggler"})
"""Events after which a node is left and given back to the administrator."""

LOST_FOR_GOOD_S = 20.0
"""So long a lost node may come back into the job: less than any machine needs to start again."""

STOP_LIMIT_S = 600.0
"""A rank that is interrupted stops at its next collective: until then it may work on alone for long (an
evaluation, say)."""


class UnknownInput(ValueError):
    """An input of a kind that this version does not know."""


class Decisions(Refilling):
    """Holds the state and turns each input into actions. `leader_node` is where this leader itself runs."""

    _commented = ""
    _seen_about: tuple[Any, ...] = ()

    def handle(self, given: Input) -> list[Action]:
        """Take one input; return what to do about it, in order. UnknownInput changes nothing."""
        handler: Callable[[Input], None] | None = getattr(self, f"_on_{given['kind']}", None)
        if handler is None:
            raise UnknownInput(f"unknown input kind {given['kind']!r}")
        self.now = float(given.get("at", self.now))
        self.actions = []
        if not self.state.ended and not self._is_of_the_past(given):
            handler(given)
            self._plan_moves()
            self._plan_refill()
            self._keep_comment()
        return self.actions

    def _is_of_the_past(self, given: Input) -> bool:
        spoken = given["kind"] in OF_A_PROCESS and "incarnation" in given
        return spoken and self._known(given) is None

    def _keep_comment(self) -> None:
        about = self._commented_on()
        if about == self._seen_about:
            return
        self._seen_about = about
        text = comment_of(self.state)
        if text != self._commented:
            self._commented = text
            self.actions.append(Comment(text))

    def _commented_on(self) -> tuple[Any, ...]:
        """All that the comment says: it is made anew when some of that has changed."""
        state = self.state
        asks = [(ask.number, ask.job_id, ask.is_coming) for ask in state.asks.values()]
        windows = [(window.id, window.opens, window.nodes) for window in state.windows]
        counts = (state.epoch, state.moves_done, len(state.absent), state.move is None)
        phase = (state.started, state.ended, state.finishing, state.stopping, state.begins)
        return (state.nodes.version, *counts, *phase, asks, windows)

    def due(self, now: float) -> list[Input]:
        """Inputs that time itself brings: a preparation, a switch or a recovery that has taken too long."""
        state, plan = self.state, self.state.plan
        move, recovery = state.move, state.recovery
        if state.ended:
            return []
        if state.finishing and now - state.finishing_since > plan.finish_timeout_s:
            return [{"kind": "finish_expired"}]
        if state.stopping and not state.finishing and now - state.stopping_since > plan.stop_timeout_s:
            return [{"kind": "stop_expired"}]
        if self._is_to_ask_again(now):
            return [{"kind": "ask_again"}]
        if recovery is not None:
            return self._recovery_due(recovery, now)
        if state.accusations and now - state.accusations[0].at > ACCUSED_GRACE_S:
            return [{"kind": "accusations_due"}]
        gone = [node.name for node in state.nodes.special() if self._is_gone(node, now)]
        if gone:
            return [{"kind": "lost_for_good", "node": name} for name in gone]
        asked = windows.due(state, now)
        if asked:
            return asked
        if move is None:
            return []
        moving = sum(state.state_bytes.get(rank, 0) for rank in move.ranks())
        if move.phase == "switching" and now - move.switching_at > plan.transfer_timeout_s(moving):
            return [{"kind": "switch_expired", "epoch": move.epoch}]
        if move.phase == "preparing" and now - move.started_at > plan.prepare_timeout_s:
            return [{"kind": "prepare_expired", "epoch": move.epoch}]
        return []

    def _is_gone(self, node: Node, now: float) -> bool:
        """Whether a lost node is not waited for any longer."""
        since = node.lost_at if node.standing == "lost" and not node.batch_host else None
        limit = LOST_FOR_GOOD_S if node.may_return else 0.0
        return self.state.plan.release and since is not None and now - since >= limit

    def _recovery_due(self, recovery: Recovery, now: float) -> list[Input]:
        plan = self.state.plan
        starting = not all(map(self.state.process_at, recovery.places.values()))
        limit = plan.prepare_timeout_s if recovery.settled and starting else plan.switch_timeout_s
        if not recovery.settled:
            limit = max(limit, STOP_LIMIT_S)
        if recovery.settled and self._unplaced(recovery):
            since = recovery.waiting_since
            over = since is not None and now - since >= plan.refill_wait_s
            return [{"kind": "refill_expired"}] if over else []
        over = now - recovery.begun_at > limit
        if recovery.target is not None:
            over = any(now > self._resumes_by(recovery, rank) for rank in self._not_resumed(recovery))
        if over:
            return [{"kind": "recovery_expired", "epoch": recovery.epoch}]
        return []

    # ---- the outside world ----

    def _on_events(self, given: Input) -> None:
        """What was seen at one time is decided on together: several leavers are one epoch."""
        for event in given["events"]:
            self._take_event(event)

    def _take_event(self, event: Input) -> None:
        if event["kind"] in STOP_KINDS:
            self._note(f"event_{event['kind']}", source=event["source"], reason=event.get("reason", ""))
            self._stop_soon(event)
            return
        node = self.state.nodes.get(event["node"])
        if node is None:
            return
        fields = {
            "node": node.name,
            "source": event["source"],
            "reason": event.get("reason", ""),
            "id": event["id"],
        }
        self._note(f"event_{event['kind']}", **fields)
        if event["kind"] == "resume":
            self._can_be_asked_for(node)
            if node.notice is None or not node.notice.window:  # else it speaks of something that was before
                self._resumed_by_admin(node)
        elif event["kind"] == "request" or event["kind"] in LEAVE_KINDS:
            self._noticed(node, event)

    def _on_straggler(self, given: Input) -> None:
        """A rank's own work takes longer than that of its replicas, step after step: its node is left. Where
        the rank has been slow on another node, too, its work is more, and no node is to blame."""
        rank = int(given["rank"])
        if rank not in self.state.seats or self.state.recovery is not None or self.state.finishing:
            return
        node = self.state.nodes[self.state.seats[rank][0]]
        slow_on = self.state.slow_on.setdefault(rank, [])
        if node.name not in slow_on:
            slow_on.append(node.name)
        if len(slow_on) > 1:
            self._note("slow_everywhere", rank=rank, nodes=list(slow_on), ratio=given["ratio"])
        elif node.notice is None:
            reason = f"rank {rank} has taken {float(given['ratio']):.2f} times as long as its replicas"
            about = {"id": f"straggler/{node.name}/{given['step']}", "source": "agent", "reason": reason}
            self._take_event({"kind": "straggler", "node": node.name, **about})

    def _on_time_limit(self, given: Input) -> None:
        """Slurm has warned a node's agent (sbatch --signal): of the end of the job, or of the standby job
        that brought this one node."""
        self._note("event_time_limit", node=given["node"], source="agent", reason=given["reason"])
        node = self.state.nodes[given["node"]]
        if node.job_id is None:
            self._stop_soon(given)
        else:
            self._noticed(node, {**given, "id": f"time_limit/{node.name}/{node.job_id}", "source": "agent"})

    def _stop_soon(self, event: Input) -> None:
        """The job's time is over: a checkpoint at the next step boundary, then back into the queue."""
        state = self.state
        if state.stopping_for and "window" not in event:
            state.stopping_for = ""  # now it stops whatever becomes of the window
        if state.finishing or state.stopping:
            return
        state.stopping = f"{event['kind']}: {event.get('reason', '')}"
        state.stopping_since = self.now
        if not state.started:
            self._end("requeue", 1, state.stopping)
        else:
            self._tell_rank(state.pacer(), {"kind": "checkpoint"})

    def _stop_no_more(self) -> None:
        """What it was to stop for is taken back."""
        state = self.state
        self._note("stop_cancelled", window=state.stopping_for)
        state.stopping, state.stopping_for, state.begins = "", "", None
        for node in state.nodes.values():
            if node.batch_host and node.notice is not None:
                self._stops_for(node)  # it had a reason of its own

    def _stays_without_checkpoint(self) -> bool:
        """It was to stop for its batch host, and no checkpoint can be had: nothing presses, so the batch host
        is kept instead of what was computed being lost."""
        state = self.state
        node = next((node for node in state.nodes.values() if state.stopping_for == _stop_for(node)), None)
        if node is None:
            return False
        state.stays_for = state.stopping_for
        self._stop_no_more()
        if node.standing == "standby" and not self._about_to_take_ranks(node):
            self._standby_leaves(node)
        return True

    def _on_stop_expired(self, given: Input) -> None:
        """The checkpoint has not come, and what is left of the time is needed to leave in order."""
        state = self.state
        if not state.stopping or state.finishing or self._stays_without_checkpoint():
            return
        written = state.checkpoint_in_work.where if state.checkpoint_in_work is not None else {}
        late = [rank for rank in sorted(state.seats) if rank not in written]
        who = f"ranks {late} have not written a checkpoint" if late else "the checkpoint was not published"
        how = f"{who} within {state.plan.stop_timeout_s:g} s (policy.stop_timeout_s)"
        if state.recovery is not None:
            how += f", in the recovery at epoch {state.recovery.epoch} ({state.recovery.how})"
        newest = state.checkpoint
        from_where = f"from the checkpoint of step {newest.step}" if newest is not None else "from the start"
        self._note("late", nodes=sorted({state.seats[rank][0] for rank in late}), how=how)
        self._end("requeue", 1, f"{state.stopping}; {how}; it goes on {from_where}")

    def _noticed(self, node: Node, event: Input) -> None:
        gives_back = event["kind"] != "request"
        if node.notice is not None and (node.notice.gives_back or not gives_back):
            if node.notice.window and "window" not in event:  # now more than that speaks against it
                told = {key: event.get(key, "") for key in ("kind", "reason", "source")}
                node.notice = replace(node.notice, event_id=event["id"], **told, window="", deadline=None)
            if event["kind"] == "down":
                node.notice.kind = "down"  # this one cannot be taken back
            return
        node.notice = Notice(
            event["id"], event["kind"], event.get("reason", ""), self.now, event["source"], gives_back
        )
        node.notice.window, node.notice.deadline = event.get("window", ""), event.get("deadline")
        if self.state.finishing or self._stops_for(node):
            return
        if node.standing == "standby":
            if not gives_back:
                node.notice = None
            elif not self._about_to_take_ranks(node):
                self._standby_leaves(node)
        elif node.standing == "lost":
            self._lost(node)
        elif node.standing == "expected" and not self.state.started:
            self._swap_before_start(node)

    def _stops_for(self, node: Node) -> bool:
        """Whether the whole job goes back into the queue for a node that it cannot be without."""
        plan, notice = self.state.plan, node.notice
        wanted_back = notice is not None and notice.gives_back and notice.kind != "down"
        if not (node.batch_host and wanted_back and plan.batch_host_drain == "requeue"):
            return False
        if plan.requeues_left <= 0 or not plan.release or node.standing in ("lost", "released"):
            return False
        if self.state.stays_for == _stop_for(node):
            return False
        if not self.state.stopping:
            self.state.stopping_for = _stop_for(node)
        assert notice is not None
        reason = f"batch host {node.name} should be given back ({notice.reason or notice.kind})"
        self._stop_soon({"kind": notice.kind, "reason": reason, "window": _stop_for(node)})
        return True

    def _about_to_take_ranks(self, node: Node) -> bool:
        """Whether it is too late to leave as a standby: once it has the ranks they are moved on."""
        move, recovery = self.state.move, self.state.recovery
        if recovery is not None and any(place[0] == node.name for place in recovery.places.values()):
            return True
        return move is not None and move.phase != "preparing" and node.name in move.joiners()

    def _swap_before_start(self, node: Node) -> None:
        """Noticed before training began: a standby takes the seats, nothing has to be moved."""
        spare = self._spare_before_start(node)
        if spare is None:
            return
        self._substitute(node, spare)
        self._standby_leaves(node)
        self._start_if_ready()

    def _resumed_by_admin(self, node: Node) -> None:
        """A node that was DOWN is no node of this job any more: Slurm has cut it out, and when its slurmd
        answers again that ends what still runs there (Slurm 22.05: within 0.5 s). Whoever is there leaves it
        all the same."""
        if node.notice is None or (node.notice.kind == "down" and node.agent_up):
            return
        node.notice = None
        if self.state.stays_for == _stop_for(node):
            self.state.stays_for = ""
        if self.state.stopping_for == _stop_for(node):
            self._stop_no_more()
        move = self.state.move
        if move is not None and node.name in move.leavers():
            self._stop_move(f"node {node.name} was resumed")
        elif node.standing == "kept":
            node.standing = "standby"
            node.failures = 0
            self._tell(node.name, None, {"kind": "spawn"})

    # ---- what Slurm has in store ----

    def _on_outlook(self, given: Input) -> None:
        """Slurm was asked, and something has changed: what was done for a window that is gone is undone."""
        state = self.state
        known = {window.id for window in state.windows}
        state.outlook = {key: given[key] for key in ("windows", "starts", "ends")}
        state.windows = windows.coming(state, given)
        state.ends_at, state.lasts_s = windows.end_of_time(given)
        for window in state.windows:
            if window.id not in known:
                fields = {"window": window.id, "nodes": list(window.nodes)}
                self._note("window", **fields, opens_in_s=window.opens_at - self.now)
        imminent = windows.imminent(state, self.now)
        for_a_window = state.stopping_for.startswith(windows.ID)
        if for_a_window and state.stopping_for not in {window.id for window in imminent}:
            self._stop_no_more()
        if not imminent:
            state.begins = None
        for node in state.nodes.values():
            if node.notice is None or not node.notice.window:
                continue
            opens = [window.opens_at for window in imminent if node.name in window.nodes]
            if opens:
                node.notice.deadline = opens[0]
                continue
            self._note("window_gone", node=node.name, window=node.notice.window)
            self._resumed_by_admin(node)

    def _on_window_due(self, given: Input) -> None:
        """It is time to leave nodes, before the window opens."""
        window = next((w for w in self.state.windows if w.id == given["window"]), None)
        if window is None:
            return
        for name in given["nodes"]:
            seen = {"source": "poll", "reason": windows.reason_of(window), "id": f"{window.id}/{name}"}
            self._note("event_maintenance", node=name, **seen)
            event = {**seen, "kind": "maintenance", "window": window.id, "deadline": window.opens_at}
            self._noticed(self.state.nodes[name], event)

    def _on_stop_due(self, given: Input) -> None:
        """It is time to stop, before a window over the whole job opens or its time is over."""
        window = next((w for w in self.state.windows if w.id == given["window"]), None)
        reason = windows.reason_of(window) if window is not None else "the job's time is nearly over"
        self._note(f"event_{given['why']}", source="poll", reason=reason)
        if window is not None:
            self.state.stopping_for = window.id
            if given["whole"]:
                closes = [w.closes for w in windows.imminent(self.state, self.now)]
                self.state.begins = max(closes, default=window.closes)  # time has passed since it was due
        self._stop_soon({"kind": given["why"], "reason": reason, "window": given["window"]})

    # ---- leaving ----

    def _on_resign_failed(self, given: Input) -> None:
        """The agent that was to lead is not connected: ask another."""
        self.state.nodes[given["to"]].away = True
        leader = self.state.nodes[self.leader_node]
        if leader.standing == "leaving":
            self._emptied(leader)

    def _on_led(self, given: Input) -> None:
        """A new leader has taken over; a node that only waited for the leader to go can leave now."""
        self.leader_node = given["node"]
        for node in self.state.nodes.values():
            node.connected = False  # each will come
        if self.state.recovery is not None:
            self._recover("the leader has changed")
        for node in self.state.nodes.values():
            if node.standing == "lost":
                self._lost(node)
            if node.standing == "leaving" and not node.processes:
                if node.agent_up:
                    self._emptied(node)
                else:
                    self.actions.append(Release(node.name))

    def _on_agent_retired(self, given: Input) -> None:
        """The agent has said its last word. Its node may be taken only when its process has ended: Slurm
        kills what is left, and a killed task would make the job's step a failed one."""
        node = self.state.nodes[given["node"]]
        node.agent_up = node.connected = False

    def _on_agent_gone(self, given: Input) -> None:
        node = self.state.nodes[given["node"]]
        if node.standing == "leaving":
            self.actions.append(Release(node.name))

    def _on_released(self, given: Input) -> None:
        node = self.state.nodes[given["node"]]
        node.standing = "released"
        took = self.now - node.notice.at if node.notice else None
        self._note("released", node=node.name, after_notice_s=took)

    def _on_node_drained(self, given: Input) -> None:
        """Slurm says that a released node is DRAINED: the administrator has it."""
        node = self.state.nodes[given["node"]]
        node.drained = True
        took = self.now - node.notice.at if node.notice else None
        self._note("drained", node=node.name, state=given["state"], after_notice_s=took)

    def _on_release_refused(self, given: Input) -> None:
        node = self.state.nodes[given["node"]]
        node.standing, node.kept_because = "kept", f"Slurm refused to take it back: {given['why']}"
        self._note("release_refused", node=node.name, why=given["why"])

    # ---- the end ----

    def _on_rank_done(self, given: Input) -> None:
        state = self.state
        state.done[int(given["rank"])] = {"step": given["step"], "digest": given["digest"]}
        self._finish_if_done()

    def _finish_if_done(self) -> None:
        """Not while ranks are missing: their successors are to end as all others do."""
        state = self.state
        if len(state.done) < len(state.seats) or not set(state.seats) <= set(state.done):
            return
        if state.finishing or state.recovery is not None:
            return
        state.finishing, state.finishing_since = True, self.now
        if state.move is not None:
            self._cancel_move("training is done")
        step = max(told["step"] for told in state.done.values())
        self._note("trained", step=step, digests=self._digests())
        for rank in state.seats:
            self._tell_rank(rank, {"kind": "finish"})

    def _on_finish_expired(self, given: Input) -> None:
        """A rank hangs while it ends. Its training is done: that must not hold all nodes until the time
        limit."""
        state = self.state
        if not state.finishing:
            return
        late = [rank for rank in sorted(state.seats) if state.process(rank) is not None]
        nodes = ", ".join(sorted({state.seats[rank][0] for rank in late}))
        limit = state.plan.finish_timeout_s
        how = f"ranks {late} on {nodes} did not end within {limit:g} s after the last step"
        self._note("late", nodes=nodes.split(", "), how=how)
        undone = sorted(set(state.seats) - set(state.done))
        if undone:
            self._end("failed", 1, f"{how} (policy.finish_timeout_s); ranks {undone} had not finished")
        else:
            self._end("completed", 0, f"all ranks have finished; {how}")

    def _digests(self) -> list[str]:
        return [str(self.state.done[rank]["digest"]) for rank in sorted(self.state.done)]

    def _on_stop(self, given: Input) -> None:
        self._end("failed", int(given.get("exit_code", 1)), given["reason"])


def _stop_for(node: Node) -> str:
    """What `JobState.stopping_for` is when the job stops for its batch host."""
    return f"node/{node.name}"
