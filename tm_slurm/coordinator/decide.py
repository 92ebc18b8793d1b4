"""The coordinator's decisions: (state, input) → actions. No clock, no network, no files: the same inputs give
the same decisions, so a journal of the inputs is the whole memory of a leader, and a test needs a
millisecond.

Inputs are JSON objects with `kind` and `at` (wall-clock seconds). TrainMover §3 and §5 describe the two
phases.
"""

from __future__ import annotations

from collections.abc import Callable

from tm_slurm.coordinator.actions import Action, Comment, Release, Tell
from tm_slurm.coordinator.comment import comment_of
from tm_slurm.coordinator.deciding import Input
from tm_slurm.coordinator.model import FAILURE_LIMIT, Node, Notice, Process
from tm_slurm.coordinator.recovery import Recoveries

LEAVE_KINDS = frozenset({"drain", "fail", "down", "maintenance", "reboot", "unhealthy", "straggler"})
"""Events after which a node is left and given back to the administrator."""


class UnknownInput(ValueError):
    """An input of a kind that this version does not know."""


class Decisions(Recoveries):
    """Holds the state and turns each input into actions. `leader_node` is where this leader itself runs."""

    _commented = ""

    def handle(self, given: Input) -> list[Action]:
        """Take one input; return what to do about it, in order. UnknownInput changes nothing."""
        handler: Callable[[Input], None] | None = getattr(self, f"_on_{given['kind']}", None)
        if handler is None:
            raise UnknownInput(f"unknown input kind {given['kind']!r}")
        self.now = float(given.get("at", self.now))
        self.actions = []
        if not self.state.ended:
            handler(given)
            self._plan_moves()
            self._keep_comment()
        return self.actions

    def _keep_comment(self) -> None:
        text = comment_of(self.state)
        if text != self._commented:
            self._commented = text
            self.actions.append(Comment(text))

    def due(self, now: float) -> list[Input]:
        """Inputs that time itself brings: a preparation, a switch or a recovery that has taken too long."""
        move, recovery, plan = self.state.move, self.state.recovery, self.state.plan
        if self.state.ended:
            return []
        if recovery is not None and now - recovery.started_at > plan.switch_timeout_s:
            return [{"kind": "recovery_expired", "epoch": recovery.epoch}]
        if move is None:
            return []
        if move.phase == "switching" and now - move.switching_at > plan.switch_timeout_s:
            return [{"kind": "switch_expired", "epoch": move.epoch}]
        if move.phase == "preparing" and now - move.started_at > plan.prepare_timeout_s:
            return [{"kind": "prepare_expired", "epoch": move.epoch}]
        return []

    # ---- nodes and processes come and go ----

    def _on_node_joined(self, given: Input) -> None:
        node = self.state.nodes.get(given["node"])
        if node is None or node.standing == "released":
            self._tell(given["node"], None, {"kind": "exit", "reason": "not a node of this job"})
            return
        node.agent_up = True
        if node.standing == "lost":
            node.standing = "leaving"  # what still runs there belongs to the past
            self._tell(node.name, None, {"kind": "kill"})
            self._emptied(node)
        self._repeat_to(node)

    def _repeat_to(self, node: Node) -> None:
        """Say again what concerns a node whose agent has (re)connected, perhaps to a new leader that only has
        the journal. Every receiver takes a repeated message as one."""
        before = len(self.actions)
        for rank in self.state.ranks_on(node.name) if self.state.started else ():
            self._tell_rank(rank, {"kind": "finish"} if self.state.finishing else self._assignment(rank))
        if node.standing == "standby" and node.notice is None:
            for process in node.processes.values():
                process.wanted_warm = None
            self._warm_standby(node)
        elif node.standing == "leaving":
            self._leave(node)
        self._repeat_move()
        concerns = [a for a in self.actions[before:] if not isinstance(a, Tell) or a.node == node.name]
        self.actions[before:] = concerns

    def _on_process_ready(self, given: Input) -> None:
        node = self.state.nodes[given["node"]]
        slot = int(given["slot"])
        known = node.processes.get(slot)
        if known is not None and known.incarnation == given["incarnation"]:
            return
        node.processes[slot] = Process(slot, int(given["incarnation"]), given["host"], int(given["port"]))
        if not self.state.started:
            self._start_if_ready()
        if node.standing == "standby":
            self._warm_standby(node)
        elif node.standing == "leaving":
            self._tell(node.name, slot, {"kind": "retire"})
        self._advance_recovery()

    def _on_start_expired(self, given: Input) -> None:
        """Somebody on an active seat has not come; a standby that has takes its place."""
        if self.state.started:
            return
        for rank in sorted(self.state.seats):
            name, _ = self.state.seats[rank]
            missing = self.state.nodes[name]
            if self._all_ready(missing):
                continue
            substitute = next(
                (n for n in self._standbys_by_preference() if self._all_ready(n)),
                None,
            )
            if substitute is None:
                self._end("failed", 1, f"node {name} did not start within the limit and no standby is ready")
                return
            for seat, slot in self.state.ranks_on(name).items():
                self.state.seats[seat] = (substitute.name, slot)
            missing.standing, substitute.standing = "lost", "expected"
            self._note("substituted", node=name, by=substitute.name)
        self._start_if_ready()

    def _start_if_ready(self) -> None:
        state = self.state
        seated = {name for name, _ in state.seats.values()}
        if not all(self._all_ready(state.nodes[name]) for name in seated):
            return
        state.started = True
        for name in seated:
            state.nodes[name].standing = "active"
        for rank in state.seats:
            self._tell_rank(rank, self._assignment(rank))
        self._note("started", world_size=state.plan.world_size, nodes=sorted(seated))

    def _assignment(self, rank: int) -> Input:
        """Whoever already has a rank takes no notice of it."""
        plan = self.state.plan
        return {
            "kind": "assign",
            "rank": rank,
            "world_size": plan.world_size,
            "ranks_per_node": plan.ranks_per_node,
            "epoch": self.state.epoch,
            "peers": self.state.peers(),
        }

    def _all_ready(self, node: Node) -> bool:
        return node.agent_up and len(node.processes) == self.state.plan.ranks_per_node

    def _on_process_warm(self, given: Input) -> None:
        process = self._known(given)
        if process is None:
            return
        process.warm_for = int(given["rank"])
        self._note("warm", node=given["node"], rank=given["rank"], seconds=given.get("seconds"))
        self._advance_move()

    def _on_process_exited(self, given: Input) -> None:
        node = self.state.nodes[given["node"]]
        process = self._known(given)
        if process is None:
            self._unheard_exit(node, given)
            return
        del node.processes[process.slot]
        if node.standing in ("active", "expected"):
            self._active_exit(node, given)
        elif node.standing == "standby":
            self._standby_exit(node, given)
        if node.standing == "leaving" and not node.processes:
            self._emptied(node)

    def _unheard_exit(self, node: Node, given: Input) -> None:
        """A process has ended before it ever reported; the end of one that was replaced is no news."""
        if int(given["slot"]) in node.processes or self.state.finishing:
            return
        if node.standing == "expected" and not self.state.started:
            how = f"ended with {given['how']} before it called tm_slurm.run"
            log = given.get("log", "none")
            self._end(
                "failed",
                1,
                f"the rank process in slot {given['slot']} of node {node.name} {how}; its log: {log}",
            )
        elif node.standing == "standby":
            self._standby_exit(node, given)

    def _active_exit(self, node: Node, given: Input) -> None:
        if self.state.finishing:
            if given["code"] != 0:
                self._end("failed", 1, f"a rank on {node.name} ended with {given['how']}; {_log(given)}")
            elif not any(self.state.nodes[name].processes for name, _ in self.state.seats.values()):
                self._end("completed", 0, "all ranks have finished")
        elif not self.state.started:
            self._end("failed", 1, f"a rank on {node.name} ended with {given['how']}; {_log(given)}")
        else:
            ranks = ", ".join(map(str, sorted(self.state.ranks_on(node.name))))
            self._ranks_died(node, f"rank {ranks} on {node.name} ended with {given['how']}; {_log(given)}")

    def _standby_exit(self, node: Node, given: Input) -> None:
        if self.state.finishing:
            return
        node.failures += 1
        self._note("standby_died", node=node.name, how=given["how"], log=given.get("log", "none"))
        if node.notice is None and node.failures <= FAILURE_LIMIT:
            self._tell(node.name, None, {"kind": "spawn"})
        self._joiner_gone(node.name, f"standby {node.name} ended with {given['how']}")

    def _on_node_lost(self, given: Input) -> None:
        """A node's agent is gone without having been told to go."""
        node = self.state.nodes[given["node"]]
        was = node.standing
        if was in ("released", "lost") or not node.agent_up:
            return
        node.agent_up = False
        node.processes.clear()
        self._note("node_lost", node=node.name, reason=given.get("reason", ""))
        how = f"node {node.name} was lost: {given.get('reason', '')}"
        if was in ("active", "expected") and self.state.ranks_on(node.name) and not self.state.finishing:
            if self.state.started:
                self._ranks_died(node, how)
            else:
                self._end("failed", 1, how)
            return
        self._lost(node)
        self._joiner_gone(node.name, how)

    def _known(self, given: Input) -> Process | None:
        """The process an input speaks of; None when that incarnation is no longer there."""
        process = self.state.nodes[given["node"]].processes.get(int(given["slot"]))
        if process is None or process.incarnation != given["incarnation"]:
            return None
        return process

    # ---- the outside world ----

    def _on_events(self, given: Input) -> None:
        """What was seen at one time is decided on together: several leavers are one epoch."""
        for event in given["events"]:
            self._take_event(event)

    def _take_event(self, event: Input) -> None:
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

    def _noticed(self, node: Node, event: Input) -> None:
        gives_back = event["kind"] != "request"
        if node.notice is not None and (node.notice.gives_back or not gives_back):
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
        if recovery is not None and any(pair.joiner == node.name for pair in recovery.pairs):
            return True
        return move is not None and move.phase != "preparing" and node.name in move.joiners()

    def _swap_before_start(self, node: Node) -> None:
        """Noticed before training began: a standby takes the seats, nothing has to be moved."""
        spare = [n for n in self.state.nodes.values() if n.standing == "standby" and n.notice is None]
        if not spare:
            return
        substitute = min(spare, key=lambda n: (n.batch_host, n.name))
        for rank, slot in self.state.ranks_on(node.name).items():
            self.state.seats[rank] = (substitute.name, slot)
        node.standing, substitute.standing = "standby", "expected"
        self._note("substituted", node=node.name, by=substitute.name)
        self._standby_leaves(node)
        self._start_if_ready()

    def _resumed_by_admin(self, node: Node) -> None:
        if node.notice is None:
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
        self.state.nodes[given["to"]].agent_up = False
        leader = self.state.nodes[self.leader_node]
        if leader.standing == "leaving":
            self._emptied(leader)

    def _on_led(self, given: Input) -> None:
        """A new leader has taken over; a node that only waited for the leader to go can leave now."""
        self.leader_node = given["node"]
        for node in self.state.nodes.values():
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
        if len(state.done) < state.plan.world_size or state.finishing:
            return
        state.finishing = True
        if state.move is not None:
            self._cancel_move("training is done")
        self._note("trained", step=given["step"], digests=self._digests())
        for rank in state.seats:
            self._tell_rank(rank, {"kind": "finish"})

    def _digests(self) -> list[str]:
        return [str(self.state.done[rank]["digest"]) for rank in sorted(self.state.done)]

    def _on_stop(self, given: Input) -> None:
        self._end("failed", int(given.get("exit_code", 1)), given["reason"])


def _log(given: Input) -> str:
    return f"its log: {given.get('log', 'none')}"
