"""Unplanned failures (TrainMover §7, design "The step, the vote"): the survivors stop, agree on a step
boundary, and the dead ranks' seats go to standbys, which take the state from replicas.

    a rank dies   all survivors are interrupted; each says how many steps it has committed, and whether it
                  stands at the vote of the next one
    the boundary  is the furthest that any survivor has committed. Whoever has committed it discards what it
                  did since and does that step again. Whoever stands at the vote before it applies: somebody
                  saw that vote succeed, so every rank, the dead one included, had finished its gradients
    resolve       survivors take over the new epoch; one of them serves the state to each successor
    resumed       the seats are the successors'; a node that is well itself comes back as a standby
"""

from __future__ import annotations

from typing import Any

from tm_slurm.coordinator.deciding import Input
from tm_slurm.coordinator.model import Node, Pair, Recovery
from tm_slurm.coordinator.moves import Moves, described

FAILURES_PER_STEP = 2
"""A step at which ranks have died so often is itself the cause: no more standbys are spent on it."""


class Recoveries(Moves):
    """The part of the decisions that is about ranks that died."""

    def _ranks_died(self, node: Node, how: str) -> None:
        """All ranks of a node are lost, for whatever reason."""
        if self.state.move is not None:
            if self.state.move.phase != "preparing":
                self._end("failed", 1, f"node {node.name} failed in the middle of a switch: {how}")
                return
            self._cancel_move(f"node {node.name} failed")
        if node.processes:
            self._tell(node.name, None, {"kind": "kill"})
            node.processes.clear()
        node.dead = True
        self._note("failed", node=node.name, ranks=sorted(self.state.ranks_on(node.name)), how=how)
        self._recover(how)

    def _recover(self, how: str) -> None:
        state = self.state
        earlier = state.recovery
        if earlier is not None:
            self._abandon(earlier)
        dead = [n for n in state.nodes.values() if n.dead and state.ranks_on(n.name)]
        joiners = self._standbys_by_preference()
        lost = {rank for node in dead for rank in state.ranks_on(node.name)}
        for rank in lost:
            state.done.pop(rank, None)
        if len(joiners) < len(dead):
            names = ", ".join(node.name for node in dead)
            verdict = "requeue" if state.plan.on_no_standby == "requeue" else "failed"
            self._end(verdict, 1, f"no standby is left for {names}: {how}")
            return
        if lost == set(state.seats):
            self._end("failed", 1, f"no rank has survived: {how}")
            return
        state.last_epoch += 1
        pairs = [Pair(n.name, j.name, state.ranks_on(n.name)) for n, j in zip(dead, joiners, strict=False)]
        began = earlier.started_at if earlier is not None else self.now
        state.recovery = Recovery(state.last_epoch, pairs, began, how, restarted=earlier is not None)
        self._note("recover", epoch=state.recovery.epoch, pairs=described(pairs), how=how)
        for rank in set(state.seats) - lost:
            self._tell_rank(rank, {"kind": "interrupt", "epoch": state.recovery.epoch})

    def _abandon(self, recovery: Recovery) -> None:
        """Something else has failed meanwhile: begin again, with a new epoch."""
        for pair in recovery.pairs:
            for slot in pair.ranks.values():
                if slot in self.state.nodes[pair.joiner].processes:
                    self._tell(pair.joiner, slot, {"kind": "cancel", "epoch": recovery.epoch})

    def _recovery_of(self, given: Input) -> Recovery | None:
        recovery = self.state.recovery
        return recovery if recovery is not None and recovery.epoch == given["epoch"] else None

    def _joiner_gone(self, name: str, reason: str) -> None:
        recovery = self.state.recovery
        if recovery is not None and any(pair.joiner == name for pair in recovery.pairs):
            self._recover(reason)
        else:
            super()._joiner_gone(name, reason)

    def _on_resumed(self, given: Input) -> None:
        recovery = self._recovery_of(given)
        if recovery is not None:
            self._successor_resumed(recovery, given)
        else:
            super()._on_resumed(given)

    def _on_broken(self, given: Input) -> None:
        """A rank's collective failed. Usually the cause is known already or in a moment."""
        self._note("broken", rank=given["rank"], lost=given.get("lost"), why=given.get("why", ""))

    def _on_survivor(self, given: Input) -> None:
        recovery = self._recovery_of(given)
        if recovery is None or recovery.target is not None:
            return
        recovery.committed[int(given["rank"])] = int(given["committed"])
        if given["at_vote"]:
            recovery.at_vote.add(int(given["rank"]))
        self._advance_recovery()

    def _advance_recovery(self) -> None:
        """When all survivors have stopped and all successors' processes are up, settle the boundary."""
        recovery = self.state.recovery
        if recovery is None or recovery.target is not None:
            return
        survivors = set(self.state.seats) - set(recovery.ranks())
        up = all(
            slot in self.state.nodes[pair.joiner].processes
            for pair in recovery.pairs
            for slot in pair.ranks.values()
        )
        if up and set(recovery.committed) == survivors:
            self._agree(recovery)

    def _agree(self, recovery: Recovery) -> None:
        target = max(recovery.committed.values())
        for rank, committed in recovery.committed.items():
            if committed != target and not (committed == target - 1 and rank in recovery.at_vote):
                where = f"rank {rank} has committed {committed} steps, another {target}"
                self._end("failed", 1, f"the survivors do not agree on a step: {where}")
                return
        failures = self.state.failures_at.get(target, 0) + 1
        self.state.failures_at[target] = failures
        if failures >= FAILURES_PER_STEP and not recovery.restarted:
            self._end("failed", 1, f"ranks died {failures} times at step {target}, last: {recovery.how}")
            return
        recovery.target = target
        recovery.agreed_at = self.now
        survivors = sorted(recovery.committed)
        serving: dict[int, list[int]] = {rank: [] for rank in survivors}
        for number, rank in enumerate(sorted(recovery.ranks())):
            serving[survivors[number % len(survivors)]].append(rank)
        changes = {str(r): p.peer() for r, p in self._successors(recovery).items()}
        for rank in survivors:
            resolve = {"kind": "resolve", "epoch": recovery.epoch, "target": target, "changes": changes}
            self._tell_rank(rank, {**resolve, "serve": serving[rank]})
        self._note("resolve", epoch=recovery.epoch, step=target)

    def _successors(self, recovery: Recovery) -> dict[int, Any]:
        return {
            rank: self.state.nodes[pair.joiner].processes[pair.ranks[rank]]
            for rank, pair in recovery.ranks().items()
        }

    def _on_source_ready(self, given: Input) -> None:
        """A survivor will serve the state of a dead rank: its successor can come for it."""
        recovery = self._recovery_of(given)
        if recovery is None or recovery.target is None:
            return
        rank = int(given["rank"])
        pair = recovery.ranks()[rank]
        changes = {str(r): p.peer() for r, p in self._successors(recovery).items()}
        replace = {
            "kind": "replace",
            "epoch": recovery.epoch,
            "rank": rank,
            "world_size": self.state.plan.world_size,
            "ranks_per_node": self.state.plan.ranks_per_node,
            "peers": {**self.state.peers(), **changes},
            "source": given["source"],
            "target": recovery.target,
        }
        self._tell(pair.joiner, pair.ranks[rank], replace)

    def _successor_resumed(self, recovery: Recovery, given: Input) -> None:
        report = {"bytes": given.get("bytes", 0), "state_s": given.get("state_s", 0.0)}
        recovery.resumed[int(given["rank"])] = report
        if set(recovery.resumed) != set(recovery.ranks()):
            return
        state = self.state
        state.recovery = None
        state.epoch = recovery.epoch
        state.recoveries_done += 1
        for pair in recovery.pairs:
            dead, joiner = state.nodes[pair.leaver], state.nodes[pair.joiner]
            joiner.standing = "active"
            for rank, slot in pair.ranks.items():
                state.seats[rank] = (pair.joiner, slot)
            dead.dead = False
            dead.failures += 1
            if dead.agent_up:
                dead.standing = "leaving"
                self._emptied(dead)
            else:
                self._lost(dead)
        self._note(
            "recovered",
            epoch=recovery.epoch,
            step=recovery.target,
            pairs=described(recovery.pairs),
            bytes=max(report["bytes"] for report in recovery.resumed.values()),
            state_s=max(report["state_s"] for report in recovery.resumed.values()),
            seconds=self.now - recovery.started_at,
        )

    def _on_recovery_expired(self, given: Input) -> None:
        recovery = self._recovery_of(given)
        if recovery is None:
            return
        silent = sorted(set(self.state.seats) - set(recovery.ranks()) - set(recovery.committed))
        if silent:
            names = sorted({self.state.seats[rank][0] for rank in silent})
            self._end(
                "failed", 1, f"ranks {silent} on {', '.join(names)} did not stop at epoch {recovery.epoch}"
            )
        else:
            late = sorted(set(recovery.ranks()) - set(recovery.resumed))
            self._end("failed", 1, f"ranks {late} did not resume at epoch {recovery.epoch}")
