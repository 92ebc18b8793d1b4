"""The coordinator's decisions: (state, input) → actions. No clock, no network, no files: the same inputs give
the same decisions, so a journal of the inputs is the whole memory of a leader, and a test needs a
millisecond.

Inputs are JSON objects with `kind` and `at` (wall-clock seconds). TrainMover §3 and §5 describe the two
phases.
"""

from __future__ import annotations

from collections.abc import Callable

from tm_slurm.coordinator.actions import Action, Comment, Release
from tm_slurm.coordinator.comment import comment_of
from tm_slurm.coordinator.deciding import Input
from tm_slurm.coordinator.membership import Membership
from tm_slurm.coordinator.model import Node, Notice, Recovery
from tm_slurm.coordinator.recovery import ACCUSED_GRACE_S

AGENT_INPUTS = frozenset(
    {
        "agent_retired",
        "broken",
        "checkpoint_failed",
        "checkpoint_published",
        "checkpoint_written",
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


class Decisions(Membership):
    """Holds the state and turns each input into actions. `leader_node` is where this leader itself runs."""

    _commented = ""

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
            self._keep_comment()
        return self.actions

    def _is_of_the_past(self, given: Input) -> bool:
        spoken = given["kind"] in OF_A_PROCESS and "incarnation" in given
        return spoken and self._known(given) is None

    def _keep_comment(self) -> None:
        text = comment_of(self.state)
        if text != self._commented:
            self._commented = text
            self.actions.append(Comment(text))

    def due(self, now: float) -> list[Input]:
        """Inputs that time itself brings: a preparation, a switch or a recovery that has taken too long."""
        state, plan = self.state, self.state.plan
        move, recovery = state.move, state.recovery
        if state.ended:
            return []
        if recovery is not None:
            return self._recovery_due(recovery, now)
        if state.accusations and now - state.accusations[0].at > ACCUSED_GRACE_S:
            return [{"kind": "accusations_due"}]
        gone = [node.name for node in state.nodes.values() if self._is_gone(node, now)]
        if gone:
            return [{"kind": "lost_for_good", "node": name} for name in gone]
        if move is None:
            return []
        if move.phase == "switching" and now - move.switching_at > plan.switch_timeout_s:
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
        if now - max(recovery.begun_at, recovery.agreed_at) > limit:
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
            self._resumed_by_admin(node)
        elif event["kind"] == "request" or event["kind"] in LEAVE_KINDS:
            self._noticed(node, event)

    def _on_time_limit(self, given: Input) -> None:
        """Slurm has warned a node's agent (sbatch --signal)."""
        self._note("event_time_limit", node=given["node"], source="agent", reason=given["reason"])
        self._stop_soon(given)

    def _stop_soon(self, event: Input) -> None:
        """The job's time is over: a checkpoint at the next step boundary, then back into the queue."""
        state = self.state
        if state.finishing or state.stopping:
            return
        state.stopping = f"{event['kind']}: {event.get('reason', '')}"
        if not state.started:
            self._end("requeue", 1, state.stopping)
        else:
            self._tell_rank(0, {"kind": "checkpoint"})

    def _noticed(self, node: Node, event: Input) -> None:
        gives_back = event["kind"] != "request"
        if node.notice is not None and (node.notice.gives_back or not gives_back):
            if event["kind"] == "down":
                node.notice.kind = "down"  # this one cannot be taken back
            return
        node.notice = Notice(
            event["id"], event["kind"], event.get("reason", ""), self.now, event["source"], gives_back
        )
        if self.state.finishing:
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
        move = self.state.move
        if move is not None and node.name in move.leavers():
            self._stop_move(f"node {node.name} was resumed")
        elif node.standing == "kept":
            node.standing = "standby"
            node.failures = 0
            self._tell(node.name, None, {"kind": "spawn"})

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
        self.state.nodes[given["node"]].agent_up = False

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
        if len(state.done) < state.plan.world_size or state.finishing or state.recovery is not None:
            return
        state.finishing = True
        if state.move is not None:
            self._cancel_move("training is done")
        step = max(told["step"] for told in state.done.values())
        self._note("trained", step=step, digests=self._digests())
        for rank in state.seats:
            self._tell_rank(rank, {"kind": "finish"})

    def _digests(self) -> list[str]:
        return [str(self.state.done[rank]["digest"]) for rank in sorted(self.state.done)]

    def _on_stop(self, given: Input) -> None:
        self._end("failed", int(given.get("exit_code", 1)), given["reason"])
