"""Nodes and rank processes come and go: who has reported, who has a seat, what the end of a process means."""

from __future__ import annotations

from tm_slurm.coordinator.actions import Tell
from tm_slurm.coordinator.deciding import Input
from tm_slurm.coordinator.model import FAILURE_LIMIT, Node, Process
from tm_slurm.coordinator.recovery import Recoveries
from tm_slurm.coordinator.roster import PeerTable

NOT_STARTED = (
    "node {name} did not start within policy.start_timeout_s and no standby is ready: logs/agent-{name}.log "
    "says why; where there is none, see by `tm-slurm doctor` whether the nodes share job.directory and "
    "reach each other"
)


class Membership(Recoveries):
    """The part of the decisions that is about who is there."""

    def _on_node_joined(self, given: Input) -> None:
        node = self.state.nodes.get(given["node"])
        if node is None or node.standing == "released":
            self._tell(given["node"], None, {"kind": "exit", "reason": "not a node of this job"})
            return
        was_lost = not node.agent_up
        node.agent_up, node.connected, node.away = True, True, False
        if node.standing == "lost" or (node.dead and was_lost):
            self._tell(node.name, None, {"kind": "kill"})  # what still runs there belongs to the past
        if node.standing == "lost":
            node.standing = "leaving"
            self._emptied(node)
        self._repeat_to(node)
        self._repeat_recovery(node)
        self._advance_recovery()

    def _repeat_to(self, node: Node) -> None:
        """Say again what concerns a node whose agent has (re)connected, perhaps to a new leader that only has
        the journal. Every receiver takes a repeated message as one."""
        before = len(self.actions)
        seated = self.state.started and self.state.recovery is None  # else they may have other processes
        for rank in self.state.ranks_on(node.name) if seated else ():
            if self.state.finishing:
                self._tell_rank(rank, {"kind": "finish"})
            elif rank not in self.state.replica_keys:  # else it has said what only a rank can
                self._tell_rank(rank, self._assignment(rank, self.state.peers()))
        if node.standing == "standby" and node.notice is None:
            for process in node.processes.values():
                process.wanted_warm = None
            self._warm_standby(node)
        elif node.standing == "leaving":
            self._leave(node)
        if self._takes_part(node.name):
            self._repeat_move()
        concerns = [a for a in self.actions[before:] if not isinstance(a, Tell) or a.node == node.name]
        self.actions[before:] = concerns

    def _takes_part(self, name: str) -> bool:
        """Whether the move in flight has anything to tell to a node."""
        move = self.state.move
        if move is None:
            return False
        if name in move.leavers() or name in move.joiners():
            return True
        ranks = self.state.ranks_on(name)
        return any(rank in linked for linked in move.linked.values() for rank in ranks)

    def _on_process_ready(self, given: Input) -> None:
        node = self.state.nodes[given["node"]]
        slot = int(given["slot"])
        known = node.processes.get(slot)
        if known is not None and known.incarnation == given["incarnation"]:
            return
        if int(given["incarnation"]) in node.banned:
            return  # it was told to be killed
        node.processes[slot] = Process(slot, int(given["incarnation"]), given["host"], int(given["port"]))
        self.state.nodes.touched.add(node.name)
        if not self.state.started:
            self._start_if_ready()
        if node.standing == "standby":
            self._warm_standby(node)
        elif node.standing == "leaving":
            self._tell(node.name, slot, {"kind": "retire"})
        self._advance_recovery()

    def _on_agent_away(self, given: Input) -> None:
        """The connection to a node's agent has ended: it comes back, or will be lost."""
        node = self.state.nodes.get(given["node"])
        if node is not None:
            node.connected = False

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
            coming = [n for n in self.state.nodes.special() if n.standing == "leaving" and n.notice is None]
            if substitute is None and any(n.well() for n in coming):
                return  # one that was to be left, and is not any more, is on its way back to the pool
            if substitute is None:
                self._end("failed", 1, NOT_STARTED.format(name=name))
                return
            self._substitute(missing, substitute)
            if not missing.agent_up:
                missing.standing = "lost"
        self._start_if_ready()

    def _start_if_ready(self) -> None:
        state = self.state
        if not self._all_there():
            return
        state.started = True
        state.built_at = state.checkpoint.step if state.checkpoint is not None else 0
        seated = {name for name, _ in state.seats.values()}
        for name in seated:
            state.nodes[name].standing = "active"
        peers = state.peers()
        state.first_peers = peers.base
        for rank in state.seats:
            self._tell_rank(rank, self._assignment(rank, peers))
        self._note("started", world_size=state.plan.world_size, nodes=sorted(seated))

    def _all_there(self) -> bool:
        """Whether every rank has a process. Those that were found to be there are looked at again only when
        all others have come."""
        state = self.state
        for ranks in (range(state.ready_below, state.plan.world_size), range(state.ready_below)):
            for rank in ranks:
                if not self._all_ready(state.nodes[state.seats[rank][0]]):
                    state.ready_below = rank
                    return False
        return True

    def _assignment(self, rank: int, peers: PeerTable) -> Input:
        """Whoever already has a rank takes no notice of it."""
        plan = self.state.plan
        return {
            "kind": "assign",
            "rank": rank,
            "world_size": plan.world_size,
            "ranks_per_node": plan.ranks_per_node,
            "epoch": self.state.epoch,
            "peers": peers,
            "restore": self._restore(),
        }

    def _restore(self) -> Input | None:
        """Where a fresh start begins: at the checkpoint that an earlier start has left, if there is one."""
        checkpoint = self.state.checkpoint
        if checkpoint is None:
            return None
        return {"source": "checkpoint", "step": checkpoint.step, "path": checkpoint.path}

    def _all_ready(self, node: Node) -> bool:
        return node.agent_up and len(node.processes) == self.state.plan.ranks_per_node

    def _on_process_warm(self, given: Input) -> None:
        process = self._known(given)
        if process is None:
            return
        rank = int(given["rank"])
        if process.warm_for != rank:
            process.warm_for, process.warm_at = rank, self.now
        if rank != process.wanted_warm and given.get("ordered") == process.wanted_warm:
            self._take_choice(given["node"], process)
        warm = {"node": given["node"], "rank": given["rank"], "seconds": given.get("seconds")}
        self._note("warm", **warm, each_s=given.get("each_s"), answers=given.get("answers"))
        self._have_standbys_reserve()
        self._advance_move()

    def _take_choice(self, name: str, process: Process) -> None:
        """It was to warm up for any rank, and has chosen another than was named; unless it is to take a
        certain one by now."""
        process.wanted_warm = process.warm_for
        for rank, place in self._places_to_take().items():
            if place == (name, process.slot) and rank != process.warm_for:
                self._want_warm(self.state.nodes[name], process.slot, rank)

    def _on_resumed(self, given: Input) -> None:
        """A standby has a rank now: with what it was warmed up."""
        self._note("promoted", node=given["node"], rank=given["rank"], answers=given.get("answers"))
        super()._on_resumed(given)

    def _on_recorded(self, given: Input) -> None:
        """The first steps of a role class are recorded, for standbys to warm up with."""
        about = ("role_class", "ranks", "bytes", "recorded_bytes", "calls", "steps")
        self._note("recorded", **{key: given[key] for key in about})
        self.state.recorded_bytes[given["role_class"]] = int(given["bytes"])

    def _on_recording_failed(self, given: Input) -> None:
        """There is none of this class: standbys warm up with identity answers, training goes on."""
        self._note("recording_failed", role_class=given["role_class"], why=given["why"])

    def _on_process_exited(self, given: Input) -> None:
        node = self.state.nodes[given["node"]]
        slot, incarnation = int(given["slot"]), int(given["incarnation"])
        if incarnation <= node.ended.get(slot, -1):
            return  # told again
        node.ended[slot] = incarnation
        process = self._known(given)
        if process is None:
            self._unheard_exit(node, given)
            return
        del node.processes[process.slot]
        if node.standing in ("active", "expected"):
            self._active_exit(node, given, process.slot)
        elif node.standing == "standby":
            self._standby_exit(node, given)
        if node.standing == "leaving" and not node.processes:
            self._emptied(node)

    def _unheard_exit(self, node: Node, given: Input) -> None:
        """A process has ended before it ever reported; the end of one that was replaced is no news."""
        if int(given["slot"]) in node.processes or self.state.finishing:
            return
        if int(given["incarnation"]) in node.banned:
            node.banned.discard(int(given["incarnation"]))
            return
        if self._successor_died(node, int(given["slot"]), given):
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

    def _active_exit(self, node: Node, given: Input, slot: int) -> None:
        if self.state.finishing:
            if given["code"] != 0:
                self._end("failed", 1, f"a rank on {node.name} ended with {given['how']}; {_log(given)}")
            else:
                self._complete_if_all_have_ended()
        elif not self.state.started:
            self._end("failed", 1, f"a rank on {node.name} ended with {given['how']}; {_log(given)}")
        elif self._successor_died(node, slot, given):
            pass
        elif (node.name, slot) in self.state.seats.values():
            ranks = ", ".join(map(str, sorted(self.state.ranks_on(node.name))))
            how = f"rank {ranks} on {node.name} ended with {given['how']}; {_log(given)}"
            self._ranks_died(node, how, crashed=given)

    def _successor_died(self, node: Node, slot: int, given: Input) -> bool:
        """Whether it was one that was to take a lost rank on an active node, or could have: then the recovery
        begins again, and no step is to blame."""
        recovery, place = self.state.recovery, (node.name, slot)
        if recovery is None or node.standing != "active":
            return False
        in_question = any(self.state.seats.get(rank) == place for rank in recovery.unsure)
        without_a_rank = in_question and place not in recovery.statements
        if place not in recovery.places.values() and not without_a_rank:
            return False
        node.failures += 1
        self._recover(
            f"the new process in slot {slot} of {node.name} ended with {given['how']}; {_log(given)}"
        )
        return True

    def _complete_if_all_have_ended(self) -> None:
        if not any(map(self.state.process_at, self.state.seats.values())):
            self._end("completed", 0, "all ranks have finished")

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
        node.agent_up = node.connected = False
        node.may_return = bool(given.get("may_return", True))
        node.vault = None
        self._ban(node)
        self._note("node_lost", node=node.name, reason=given.get("reason", ""))
        how = f"node {node.name} was lost: {given.get('reason', '')}"
        if was in ("active", "expected") and self.state.ranks_on(node.name):
            if self.state.finishing:
                self._lost(node)
                self._complete_if_all_have_ended()
            elif self.state.started:
                self._ranks_died(node, how)
            else:
                self._lost_before_start(node, how)
            return
        self._lost(node)
        self._joiner_gone(node.name, how)
        if not self.state.ended:
            self._assign_duties()

    def _lost_before_start(self, node: Node, how: str) -> None:
        spare = self._spare_before_start(node)
        if spare is None:
            self._end("failed", 1, f"{how}, and there is no standby")
            return
        self._substitute(node, spare)
        self._lost(node)
        self._start_if_ready()

    def _on_gives_up(self, given: Input) -> None:
        """A rank cannot go on, and neither would its successor: gradients that are not numbers, where the
        policy is to stop."""
        rank, node = int(given["rank"]), str(given["node"])
        self._note("gives_up", node=node, rank=rank, why=given["why"])
        if self.state.started and not self.state.finishing:
            self._end("failed", 1, f"rank {rank} on {node}: {given['why']}")

    def _on_process_unwell(self, given: Input) -> None:
        """A rank process is in a state that may pass or may not: people should know."""
        self._note("unwell", node=given["node"], slot=given["slot"], how=given["how"])

    def _on_process_stopped(self, given: Input) -> None:
        """A rank process is there and does not run."""
        node = self.state.nodes[given["node"]]
        if self._known(given) is None:
            return
        how = f"slot {given['slot']} on {node.name} is {given['how']}"
        if self.state.finishing:
            if (node.name, int(given["slot"])) in self.state.seats.values():
                self._end("failed", 1, f"after the last step, {how}")
            return
        if node.standing == "active" and self.state.started:
            self._ranks_died(node, how)
        elif node.standing == "standby":
            self._ban(node)
            self._standby_exit(node, given)


def _log(given: Input) -> str:
    return f"its log: {given.get('log', 'none')}"
