"""Unplanned failures (TrainMover §7): whoever is left stops, lost seats are found out and given away, all go
on together at a new epoch.

stopping    every living process that has, or may have, a seat is interrupted and says where it has stopped;
            in a switch that failed both leaver and joiner are asked, and whoever has the state keeps the seat
settled     it is known which seats are lost; they get places (placing.py)
resolved    the boundary and the source of the state are chosen (resolving.py)
recovered   the lost ranks have resumed; a node that is well itself comes back as a standby

Whatever fails meanwhile begins it again, with a new epoch: a process that has resumed by then is a survivor
like any other.
"""

from __future__ import annotations

from typing import Any

from tm_slurm.coordinator.deciding import Input
from tm_slurm.coordinator.model import Accusation, Node, Recovery, Statement
from tm_slurm.coordinator.resolving import Resolving
from tm_slurm.coordinator.roster import Place

ACCUSED_GRACE_S = 0.3
"""How long a broken link waits for another explanation before the rank at its other end is held for dead."""

RESTARTS_LIMIT = 12
"""A recovery that has begun again so often, with no more lost than before, is given up."""


class Recoveries(Resolving):
    """The part of the decisions that is about ranks that died."""

    # ---- somebody is dead ----

    def _ranks_died(self, node: Node, how: str, *, crashed: Input | None = None) -> None:
        """All ranks of a node are lost, for whatever reason. `crashed`: the exit of a rank process that ended
        by itself."""
        move = self.state.move
        if move is not None and move.phase == "preparing":
            self._cancel_move(f"node {node.name} failed")
        self._ban(node)
        node.dead = True
        ranks = sorted(self.state.ranks_on(node.name))
        fields: dict[str, Any] = {"node": node.name, "ranks": ranks, "how": how}
        killed = crashed is not None and _was_killed(crashed)
        if crashed is not None:
            fields |= {"last_words": str(crashed.get("tail", ""))[-2000:], "log": crashed.get("log", "none")}
            fields |= self._where_it_failed(node, crashed)
            if self._is_held_against_the_step(node, crashed):
                node.crashed = True
                self.state.crashes.append(fields)
        self._note("failed", **fields)
        self._recover(how, killed=killed)

    def _where_it_failed(self, node: Node, crashed: Input) -> Input:
        """Of a rank process that has ended by itself: its rank, its step, its data position, and what it has
        written of the cause."""
        place = (node.name, int(crashed["slot"]))
        failing = crashed.get("failing") or {}
        return {
            "rank": next((rank for rank, seat in self.state.seats.items() if seat == place), None),
            "step": crashed.get("committed") if not failing else failing.get("step"),
            "position": failing.get("position", {}),
            "traceback": str(crashed.get("traceback", "")),
        }

    def _is_held_against_the_step(self, node: Node, crashed: Input) -> bool:
        """Not of a process that had stopped already. Of those that somebody kills while a recovery is under
        way only the first: a rack fails in pieces, and the kernel ends many for want of memory."""
        recovery = self.state.recovery
        if recovery is None:
            return True
        stopped = recovery.target is None and (node.name, int(crashed["slot"])) in recovery.statements
        return not stopped and not (recovery.killed and _was_killed(crashed))

    def _ban(self, node: Node) -> None:
        """Whatever runs on a node is nobody any more, even if it does not know."""
        if node.processes:
            node.banned |= {process.incarnation for process in node.processes.values()}
            node.processes.clear()
            self._tell(node.name, None, {"kind": "kill"})

    def _replace_processes(self, node: Node) -> None:
        """Those that are there are nobody any more; fresh ones are started."""
        self._ban(node)
        self._tell(node.name, None, {"kind": "spawn"})

    def _recover(self, how: str, *, killed: bool = False) -> None:
        """Begin, or begin again, with a new epoch."""
        state = self.state
        earlier = state.recovery
        state.last_epoch += 1
        recovery = Recovery(state.last_epoch, how, self.now, self.now, damage=self._damage())
        recovery.killed = killed or (earlier is not None and earlier.killed)
        if earlier is not None:
            recovery.started_at, recovery.restarts = earlier.started_at, earlier.restarts + 1
            recovery.waiting_since = earlier.waiting_since
            recovery.contested = self._still_contested(earlier)
            recovery.moving = set(earlier.moving)
            recovery.unsure = {*earlier.unsure, *earlier.lost, *earlier.dropped}
            recovery.damage = max(recovery.damage, earlier.damage)
            recovery.in_vain = earlier.in_vain + (recovery.damage == earlier.damage)
        if recovery.in_vain > RESTARTS_LIMIT:
            self._end("failed", 1, f"the recovery was disturbed {RESTARTS_LIMIT} times, last: {how}")
            return
        move, state.move = state.move, None
        if move is not None:
            recovery.contested |= {r: (p.joiner, p.ranks[r]) for r, p in move.ranks().items()}
            recovery.moving |= set(move.ranks())
            state.changed |= set(move.ranks())
            self._note("interrupted", epoch=move.epoch, reason=how)
        state.recovery = recovery
        state.accusations.clear()
        state.snapshot_in_work = state.checkpoint_in_work = None
        for place in (*state.seats.values(), *recovery.contested.values()):
            if state.process_at(place) is not None:
                recovery.asked.add(place)
        recovery.contested = {r: p for r, p in recovery.contested.items() if p in recovery.asked}
        lost = sorted(r for r, seat in state.seats.items() if seat not in recovery.asked)
        recovery.unsure |= {*lost, *recovery.contested, *recovery.moving}
        for rank in lost:
            state.done.pop(rank, None)
        self._note("recover", epoch=recovery.epoch, lost=lost, how=how, restarts=recovery.restarts)
        for place in sorted(recovery.asked):
            self._ask(recovery, place)
        self._choose_early(recovery)
        self._advance_recovery()

    def _still_contested(self, earlier: Recovery) -> dict[int, Place]:
        """Who may have taken a rank in a recovery that failed. A standby that was not told to take one has
        not: if it does not answer, nobody needs to wait for it."""
        if not earlier.settled:
            return dict(earlier.contested)
        size = self.state.plan.ranks_per_node
        told = earlier.target is not None
        return {
            rank: place
            for rank, place in earlier.places.items()
            if told or place[1] >= size or self.state.nodes[place[0]].connected
        }

    def _damage(self) -> int:
        """How much is lost: seats without a process, nodes without an agent. Of a rack that fails one node
        after the other is heard of; that is as many beginnings, and no reason to give up."""
        vacant = sum(self.state.process_at(seat) is None for seat in self.state.seats.values())
        return vacant + sum(not node.agent_up for node in self.state.nodes.values())

    def _ask(self, recovery: Recovery, place: tuple[str, int]) -> None:
        unsure = sorted({*recovery.unsure, *self.state.absent})
        self._tell(*place, {"kind": "interrupt", "epoch": recovery.epoch, "lost": unsure})

    def _choose_early(self, recovery: Recovery) -> None:
        """Seats that are certainly lost: let warm standbys build their roles while the survivors stop. It is
        only a hint: places are given when all have said where they are."""
        certain = {
            rank: seat[0]
            for rank, seat in self.state.seats.items()
            if seat not in recovery.asked and rank not in recovery.contested
        }
        hint = Recovery(recovery.epoch, recovery.how, self.now, lost=certain)
        for node, ranks in self._unplaced(hint):
            self._place_on_standby(hint, node, ranks)
        self._prepare_successors(hint)

    def _joiner_gone(self, name: str, reason: str) -> None:
        recovery, move = self.state.recovery, self.state.move
        if recovery is not None:
            if any(place[0] == name for place in {*recovery.places.values(), *recovery.contested.values()}):
                self._recover(reason)
        elif move is not None and move.phase == "switching" and name in move.joiners():
            self._recover(reason)
        else:
            super()._joiner_gone(name, reason)

    def _on_too_late(self, given: Input) -> None:
        """The vote has carried the epoch already. If the joiner is gone, that is a failure like any other."""
        super()._on_too_late(given)
        move = self._move_of(given)
        if move is not None and move.joiner_lost:
            self._recover(move.stop_reason)

    def _on_switch_expired(self, given: Input) -> None:
        """A joiner has not taken over in time: it is held for dead, the leaver still has the state."""
        move = self._move_of(given)
        if move is None:
            return
        late = sorted(set(move.ranks()) - set(move.resumed))
        slow = sorted({move.ranks()[rank].joiner for rank in late})
        for name in slow:
            self.state.nodes[name].failures += 1
            self._replace_processes(self.state.nodes[name])
        self._recover(f"ranks {late} did not resume on {', '.join(slow)} at epoch {move.epoch}")

    def _on_resumed(self, given: Input) -> None:
        recovery = self._recovery_of(given)
        if recovery is not None and int(given["rank"]) in recovery.places:
            self._successor_resumed(recovery, given)
        elif recovery is None:
            super()._on_resumed(given)

    # ---- links that broke ----

    def _on_broken(self, given: Input) -> None:
        """A rank's collective failed. Usually the cause is known already, or in a moment."""
        rank, lost = int(given["rank"]), given.get("lost")
        self._note("broken", rank=rank, lost=lost, why=given.get("why", ""))
        if "refused" in given:
            source, step = given["refused"]
            self._doubt(str(source), int(step), int(given["epoch"]))
        recovery = self.state.recovery
        stopping = recovery is not None and recovery.target is None  # it will say where it has stopped
        if not stopping and not self.state.finishing and self.state.started:
            # At an older epoch it knew another process by that rank, which may have left since; until all
            # have recovered, processes that build a role anew close links.
            current = recovery is None and int(given.get("epoch", self.state.epoch)) >= self.state.epoch
            known = lost is not None and int(lost) in self.state.seats and current
            accused = int(lost) if known else None  # type: ignore[arg-type]
            self.state.accusations.append(Accusation(rank, accused, str(given.get("why", "")), self.now))

    def _on_accusations_due(self, given: Input) -> None:
        """Nothing else has explained the broken links: the rank that most links to were called broken is held
        for dead; of two that accuse each other, the one that was accused more often before."""
        state = self.state
        accusations, state.accusations = state.accusations, []
        if state.recovery is not None or not accusations:
            return
        counts: dict[str, int] = {}
        for accusation in accusations:
            if accusation.lost is not None:
                node = state.seats[accusation.lost][0]
                counts[node] = counts.get(node, 0) + 1
        why = "; ".join(sorted({f"rank {a.rank}: {a.why}" for a in accusations}))[:500]
        if not counts:
            self._recover(f"collectives failed: {why}")
            return
        culprit = max(counts, key=lambda name: (counts[name], state.accused.get(name, 0), name))
        for name, count in counts.items():
            state.accused[name] = state.accused.get(name, 0) + count
        self._ranks_died(state.nodes[culprit], f"links to {culprit} are broken: {why}")

    def _on_step_stuck(self, given: Input) -> None:
        """The watchdog has found ranks that do not get on while all others wait for them. No ranks: nobody is
        to blame, and the time limit of the collective ends it."""
        if self.state.recovery is not None or self.state.finishing or not self.state.started:
            return
        self._note("stuck", ranks=given["ranks"], step=given["step"], how=given["how"])
        for rank in given["ranks"]:
            if int(rank) not in self.state.seats:
                continue  # absent; its adopter is named as well
            node = self.state.nodes[self.state.seats[int(rank)][0]]
            if not node.dead:
                self._ranks_died(node, f"rank {rank} on {node.name}: {given['how']}")

    # ---- all stop ----

    def _on_survivor(self, given: Input) -> None:
        recovery = self._recovery_of(given)
        place = (str(given["node"]), int(given["slot"]))
        if recovery is None or place not in recovery.asked or self._known(given) is None:
            return
        recovery.statements[place] = Statement(
            rank=int(given["rank"]),
            committed=int(given["committed"]),
            at_vote=bool(given["at_vote"]),
            begun=bool(given.get("begun", True)),
            torn=bool(given.get("torn", False)),
            wards={int(ward): list(steps) for ward, steps in given.get("wards", {}).items()},
            nearly={int(ward): list(steps) for ward, steps in given.get("nearly", {}).items()},
            adopted=[int(rank) for rank in given.get("adopted", [])],
            snapshots=list(given.get("snapshots", [])),
        )
        for ward, steps in recovery.statements[place].nearly.items():
            recovery.nearly.setdefault(ward, set()).update(steps)
        for ward, steps in recovery.statements[place].wards.items():
            recovery.wards.setdefault(ward, set()).update(steps)
        self._advance_recovery()

    def _on_not_joined(self, given: Input) -> None:
        """A process that was asked has no rank."""
        recovery = self._recovery_of(given)
        if recovery is not None and self._known(given) is not None:
            recovery.refusals.add((str(given["node"]), int(given["slot"])))
            self._advance_recovery()

    def _advance_recovery(self) -> None:
        """When all have stopped, settle who has which seat; when all successors are up, settle the step."""
        recovery = self.state.recovery
        if recovery is None or recovery.target is not None or self.state.ended:
            return
        if not recovery.settled:
            if len(recovery.statements) + len(recovery.refusals) < len(recovery.asked):
                return
            if not recovery.asked <= {*recovery.statements, *recovery.refusals}:
                return
            self._settle(recovery)
        if self._place_lost(recovery) and all(map(self._is_there, recovery.places.values())):
            self._agree(recovery)

    def _is_there(self, place: Place) -> bool:
        """Whether the process in a place is up, and hears what it is told."""
        return self.state.process_at(place) is not None and self.state.nodes[place[0]].connected

    def _settle(self, recovery: Recovery) -> None:
        """Who sits where, now that everybody has spoken."""
        state = self.state
        for joiner in sorted({place[0] for place in recovery.contested.values()}):
            self._settle_joiner(recovery, joiner)
        self._settle_those_left_behind(recovery)
        recovery.settled = True
        for rank, seat in state.seats.items():
            if seat not in recovery.statements:
                recovery.lost[rank] = seat[0]
                state.done.pop(rank, None)
        seated = set(state.seats.values())
        recovery.statements = {p: said for p, said in recovery.statements.items() if p in seated}

    def _settle_joiner(self, recovery: Recovery, joiner: str) -> None:
        """Either all ranks of a failed switch are on the joiner, or, if the leaver has them all, on the
        leaver."""
        state = self.state
        ranks = {rank: place for rank, place in recovery.contested.items() if place[0] == joiner}
        ranks = self._settle_absent(recovery, state.nodes[joiner], ranks)
        taken = {r for r, place in ranks.items() if place in recovery.statements}
        kept = {r for r in ranks if state.seats[r] in recovery.statements}
        if taken != set(ranks) and kept == set(ranks):
            if taken:  # those that have gone ahead are not needed
                self._replace_processes(state.nodes[joiner])
            return
        for rank in taken:
            leaver = state.nodes[state.seats[rank][0]]
            if leaver.name != joiner or state.seats[rank] != ranks[rank]:
                self._tell_rank(rank, {"kind": "retire"})
            state.seats[rank] = ranks[rank]
            state.nodes[joiner].standing = "active"
            if state.ranks_on(leaver.name):
                continue
            if leaver.dead:
                self._bury(leaver)
                continue
            leaver.standing = "leaving"
            if not leaver.processes:
                self._emptied(leaver)
        if taken:
            self._note("moved_in_recovery", epoch=recovery.epoch, ranks=sorted(taken), joiner=joiner)

    def _settle_those_left_behind(self, recovery: Recovery) -> None:
        """A leaver whose joiner took over, went ahead with all others and died then is no survivor: what it
        has is of the past."""
        state = self.state
        said = [recovery.statements[seat] for seat in state.seats.values() if seat in recovery.statements]
        target = max((statement.committed for statement in said), default=0)
        for rank in sorted(recovery.moving):
            statement = recovery.statements.get(state.seats[rank])
            if statement is None or statement.committed + statement.at_vote >= target:
                continue
            leaver = state.nodes[state.seats[rank][0]]
            self._note("left_behind", node=leaver.name, rank=rank, step=statement.committed)
            self._ban(leaver)
            leaver.dead = True
            for place in [place for place in recovery.statements if place[0] == leaver.name]:
                del recovery.statements[place]

    # ---- what takes too long ----

    def _on_ward_missing(self, given: Input) -> None:
        """The private state of a lost rank was promised and has not come: all are asked again."""
        recovery = self._recovery_of(given)
        if recovery is not None:
            ranks = ", ".join(map(str, given["ranks"]))
            self._recover(f"private states were not handed in at epoch {recovery.epoch}: of ranks {ranks}")

    def _on_refill_expired(self, given: Input) -> None:
        """Time is over for the policy `wait`; the next one has its turn."""
        self._advance_recovery()

    def _on_recovery_expired(self, given: Input) -> None:
        """Whoever has not stopped, or not resumed, in time is held for dead."""
        recovery = self._recovery_of(given)
        if recovery is None:
            return
        silent = set() if recovery.settled else recovery.asked - {*recovery.statements, *recovery.refusals}
        ranks = self._not_resumed(recovery)
        over = [rank for rank in ranks if self.now > self._resumes_by(recovery, rank)]
        late = {recovery.places[rank] for rank in over or ranks}
        late |= {self.state.seats[rank] for rank in recovery.confirming}
        if recovery.target is None:
            late = silent or {place for place in late if not self._is_there(place)}
        places = sorted(late)
        what = "stop" if silent else "start" if recovery.target is None else "resume"
        names = sorted({name for name, _ in places})
        how = f"ranks did not {what} in time at epoch {recovery.epoch} on {', '.join(names) or 'any node'}"
        self._note("late", nodes=names, how=how)
        for name in names:
            node = self.state.nodes[name]
            if self.state.ranks_on(name):
                self._ban(node)
                node.dead = True
            else:
                node.failures += 1
                self._replace_processes(node)
        self._recover(how)

    def _not_resumed(self, recovery: Recovery) -> list[int]:
        return sorted(set(recovery.places) - set(recovery.resumed))

    def _resumes_by(self, recovery: Recovery, rank: int) -> float:
        """When a successor is late: it has the time of a preparation until it has built its role, and then
        that of a switch, with what its state takes."""
        process = self.state.process_at(recovery.places[rank])
        if process is None or process.warm_for != rank:
            return recovery.agreed_at + self.state.plan.prepare_timeout_s
        size = self.state.state_bytes.get(rank, 0)
        return max(recovery.agreed_at, process.warm_at) + self.state.plan.transfer_timeout_s(size)

    def _repeat_recovery(self, node: Node) -> None:
        """The node's agent has connected again: what it was told meanwhile may be lost."""
        recovery = self.state.recovery
        if recovery is None:
            return
        involved = {name for name, _ in {*recovery.asked, *recovery.places.values()}}
        if node.name not in involved:
            return
        if recovery.target is not None:
            self._recover(f"node {node.name} was away for a moment")
            return
        for place in sorted(recovery.asked):
            if place[0] == node.name and place not in recovery.statements:
                self._ask(recovery, place)


def _was_killed(exited: Input) -> bool:
    """Whether somebody else has ended this process: nothing that it did itself ends so."""
    return exited.get("how") == "signal SIGKILL" and "Traceback" not in str(exited.get("tail", ""))
