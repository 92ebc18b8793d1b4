"""At which step all go on, and where the lost ranks' state comes from.

The boundary is the furthest that any survivor has committed. Whoever has committed it discards what it did
since and does that step again. Whoever stands at the vote before it applies: somebody saw that vote succeed,
so every rank, the lost ones included, had finished its gradients.

State comes from, in this order:

replicas    a survivor with the same parameters and optimizer state serves them; the rank's private state
            comes from its buddy
snapshot    everybody goes back to the newest complete one
checkpoint  everybody goes back to it; to an older one if it is damaged
anew        nobody has committed anything yet: everybody builds again
"""

from __future__ import annotations

import itertools
from typing import Any

from tm_slurm.coordinator.deciding import Input
from tm_slurm.coordinator.model import Node, Recovery, Statement
from tm_slurm.coordinator.roster import PeerTable
from tm_slurm.coordinator.shrinking import Shrinking

STRIPED_FROM_BYTES = 64 << 20
"""From this size on a lost rank's state comes from several replicas at once."""

STRIPED_OVER = 4

CRASH = "Fatal Python error: "
"""What faulthandler writes of a crash in native code begins so."""

FAILURE_FIELDS = ("rank", "node", "step", "position", "how", "traceback", "log")
"""What a verdict says of the rank that failed first."""

REDONE_LIMIT = 5
"""How often a step is done again for failures in which no rank was lost."""


def where_it_crashed(traceback: str) -> str:
    """Of what faulthandler has written: the innermost Python frame of the thread that crashed, or what it is,
    if that thread runs no Python; empty for any other traceback."""
    lines = [line.strip() for line in traceback.splitlines()]
    if not lines or not lines[0].startswith(CRASH):
        return ""
    in_order = itertools.dropwhile(lambda line: not line.startswith("Current thread "), lines)
    return next((line for line in in_order if line.startswith("File ")), lines[0])


class Resolving(Shrinking):
    """The part of the decisions from "all have stopped" to "all go on"."""

    def _agree(self, recovery: Recovery) -> None:
        survivors = recovery.survivors()
        target = max((said.committed for said in survivors.values()), default=0)
        if self._follows_the_step(recovery, target):
            return
        problem = self._why_not_at(target, survivors) or self._why_no_replica(recovery, survivors, target)
        unsettled = "" if problem else self._why_unsettled(recovery, target)
        back_to: dict[str, Any] | None = None
        if problem or unsettled:
            back_to = self._to_go_back_to(recovery, survivors, target)
            if back_to is None and problem:
                again = "requeue" in self.state.plan.on_no_standby or self.state.stopping
                verdict = "requeue" if again else "failed"
                why = f"{problem}, and there is no snapshot or checkpoint: {recovery.how}"
                self._end_by_crash(verdict, why)
                return
        if back_to is not None:
            problem = problem or unsettled
            target = int(back_to["step"])
            self._rolled_back(target)
            if back_to.get("again"):
                self.state.built_at = target
        recovery.source = "replicas" if back_to is None else str(back_to["source"])
        recovery.target = target
        recovery.agreed_at = self.now
        self._share_out(recovery, survivors)
        self._note("resolve", epoch=recovery.epoch, step=target, source=recovery.source, why=problem)
        self._tell_survivors(recovery, survivors, target, back_to)
        if back_to is not None:
            for rank in recovery.places:
                self._tell_successor(recovery, rank, None, self._part_for(rank, back_to))
        self._finish_recovery(recovery)

    def _why_unsettled(self, recovery: Recovery, target: int) -> str:
        """Until they have begun their third step, ranks that built together have something to agree on: a
        DistributedDataParallel makes its buckets anew in the second. Some may have, and a standby has."""
        fewer = recovery.dropped or recovery.adopters or self.state.absent
        if target > self.state.built_at + 1 or fewer:
            return ""
        return "the ranks have not done two steps yet"

    def _to_go_back_to(
        self, recovery: Recovery, survivors: dict[int, Statement], target: int
    ) -> dict[str, Any] | None:
        state = self.state
        snapshot, checkpoint = state.snapshot, state.checkpoint
        base = checkpoint.step if checkpoint is not None else 0
        unbuilt = any(not said.begun for said in survivors.values())  # no state that could go back in place
        again = unbuilt or target <= base + 1 or not self._knows_replicas()  # or little is lost
        lost_all = checkpoint is None and state.checkpoints_given_up  # then it would be all that is lost
        if survivors and again and not lost_all:
            source = "checkpoint" if checkpoint is not None else "anew"
            path = {"path": checkpoint.path} if checkpoint is not None else {}
            return {"source": source, "step": base, "again": True, **path}
        newer = checkpoint is None or (snapshot is not None and snapshot.step >= checkpoint.step)
        if snapshot is not None and newer and self._snapshot_is_whole(recovery, survivors):
            return {"source": "snapshot", "step": snapshot.step}
        if checkpoint is not None:
            return {"source": "checkpoint", "step": checkpoint.step, "path": checkpoint.path}
        return None

    def _snapshot_is_whole(self, recovery: Recovery, survivors: dict[int, Statement]) -> bool:
        snapshot = self.state.snapshot
        assert snapshot is not None
        for rank in self.state.seats:
            if rank in survivors and snapshot.step in survivors[rank].snapshots:
                continue
            keeper = self.state.nodes.get(snapshot.where.get(rank, ""))
            if keeper is None or not keeper.agent_up or keeper.vault is None:
                return False
        return True

    def _rolled_back(self, step: int) -> None:
        """Steps from here on will be done again."""
        self.state.snapshot_in_work = self.state.checkpoint_in_work = None
        if self.state.snapshot is not None and self.state.snapshot.step > step:
            self.state.snapshot = None  # else none of those that come now would be newer
        for done in [rank for rank, told in self.state.done.items() if told["step"] > step]:
            del self.state.done[done]

    def _part_for(self, rank: int, back_to: dict[str, Any]) -> dict[str, Any]:
        snapshot = self.state.snapshot
        if back_to["source"] != "snapshot" or snapshot is None:
            return back_to
        keeper = self.state.nodes[snapshot.where[rank]]
        return {**back_to, "vault": keeper.vault if keeper.agent_up else None}

    # ---- all go on ----

    def _tell_survivors(
        self,
        recovery: Recovery,
        survivors: dict[int, Statement],
        target: int,
        back_to: dict[str, Any] | None,
    ) -> None:
        serving: dict[int, list[int]] = {rank: [] for rank in survivors}
        shares: dict[int, dict[str, list[int]]] = {rank: {} for rank in survivors}
        for rank in sorted(recovery.lost) if back_to is None else ():
            sources = self._sources_for(rank, self._replicas_of(rank, target) & set(survivors), serving)
            for number, source in enumerate(sources):
                serving[source].append(rank)
                shares[source][str(rank)] = [number, len(sources)]
        changes = self._changed_peers(recovery)
        peers = {} if back_to is None else {"peers": self._peers_after(recovery)}  # for who builds again
        for rank in sorted(survivors):
            resolve = {
                "kind": "resolve",
                "epoch": recovery.epoch,
                "target": target,
                "changes": changes,
                **peers,
                "absent": sorted(recovery.adopters),
                **self._shares_of(recovery, rank, survivors[rank]),
                "serve": serving[rank],
                "shares": shares[rank],
            }
            if back_to is not None:
                resolve["back_to"] = self._part_for(rank, back_to)
            self._tell_rank(rank, resolve)

    def _sources_for(self, rank: int, replicas: set[int], serving: dict[int, list[int]]) -> list[int]:
        """Which replicas serve a lost rank's state: the one that has least to do; together with others, on
        other nodes, where the state is so large that this is faster."""
        by_load = sorted(replicas, key=lambda r: (len(serving[r]), r))
        count = 1 if self.state.state_bytes.get(rank, 0) < STRIPED_FROM_BYTES else STRIPED_OVER
        chosen: list[int] = []
        for candidate in by_load:
            taken = {self.state.seats[r][0] for r in chosen}
            if len(chosen) < count and self.state.seats[candidate][0] not in taken:
                chosen.append(candidate)
        return chosen

    def _changed_peers(self, recovery: Recovery) -> dict[str, list[Any]]:
        """rank → the address of every rank that some survivor may know at another one. Who has heard of a
        switch or a recovery before is not known: whoever stood in its last vote, or was interrupted before
        its order came, has not."""
        self.state.changed |= set(recovery.places)
        changes = {}
        for rank in sorted(self.state.changed - set(recovery.adopters)):
            process = self.state.process_at(recovery.places.get(rank) or self.state.seats[rank])
            if process is not None:
                changes[str(rank)] = process.peer()
        return changes

    def _peers_after(self, recovery: Recovery) -> dict[str, list[Any]]:
        state, changes = self.state, self._changed_peers(recovery)
        if state.first_peers and not recovery.adopters and len(changes) == len(state.changed):
            return PeerTable(state.first_peers, changes)  # the lost ranks are in it where they go on
        peers = state.peers().with_changes(changes)
        if not recovery.adopters:
            return peers
        return {rank: peer for rank, peer in peers.items() if int(rank) not in recovery.adopters}

    def _on_source_ready(self, given: Input) -> None:
        """A survivor will serve the state of a lost rank: its successor can come for it."""
        recovery, rank = self._recovery_of(given), int(given["rank"])
        if recovery is None or recovery.target is None or rank not in recovery.places:
            return
        number, count = given.get("share", (0, 1))
        ready = recovery.ready.setdefault(rank, {})
        ready[int(number)] = given["source"]
        if len(ready) == int(count):
            self._tell_successor(recovery, rank, [ready[n] for n in sorted(ready)], None)

    def _tell_successor(
        self, recovery: Recovery, rank: int, sources: list[Any] | None, back_to: dict[str, Any] | None
    ) -> None:
        node, slot = recovery.places[rank]
        replace = {
            "kind": "replace",
            "epoch": recovery.epoch,
            "rank": rank,
            "world_size": self.state.plan.world_size,
            "ranks_per_node": self.state.plan.ranks_per_node,
            "peers": self._peers_after(recovery),
            "target": recovery.target,
            "absent": sorted(recovery.adopters),
        }
        if sources is not None:
            replace["sources"] = sources
        if back_to is not None:
            replace["back_to"] = back_to
        self._tell(node, slot, replace)

    def _successor_resumed(self, recovery: Recovery, given: Input) -> None:
        rank = int(given["rank"])
        times = {key: float(given[key]) for key in given if key.endswith("_s")}
        recovery.resumed[rank] = {
            "bytes": given.get("bytes", 0),
            **times,
            "told_after_s": self.now - recovery.agreed_at,
        }
        self._finish_recovery(recovery)

    def _finish_recovery(self, recovery: Recovery) -> None:
        """When every lost rank goes on somewhere, the recovery is over."""
        if set(recovery.resumed) != set(recovery.places) or recovery.confirming:
            return
        state = self.state
        state.recovery = None
        state.epoch = recovery.epoch
        state.recoveries_done += 1
        pairs = self._described(recovery)
        for rank, place in recovery.places.items():
            state.seats[rank] = place
            state.nodes[place[0]].standing = "active"
        self._take_out_absent(recovery)
        self._note(
            "recovered",
            epoch=recovery.epoch,
            step=recovery.target,
            source=recovery.source,
            pairs=pairs,
            bytes=max((report["bytes"] for report in recovery.resumed.values()), default=0),
            state_s=max((report.get("state_s", 0.0) for report in recovery.resumed.values()), default=0.0),
            started_at=recovery.started_at,
            agreed_at=recovery.agreed_at,
            resumed={str(rank): report for rank, report in recovery.resumed.items()},
            seconds=self.now - recovery.started_at,
        )
        for node in list(state.nodes.values()):
            if node.dead:
                self._bury(node)
            elif node.standing == "active" and not state.ranks_on(node.name):
                self._returns_to_the_pool(node)
            self._retire_guests_without_a_seat(node)
        self._tell_vaults_the_epoch()
        self._assign_duties()
        self._repeat_stop()
        self._finish_if_done()

    def _returns_to_the_pool(self, node: Node) -> None:
        """A process that was to take its rank there has died, and a standby has it now."""
        if not node.agent_up:
            self._lost(node)
            return
        node.standing = "leaving"
        self._leave(node)

    def _retire_guests_without_a_seat(self, node: Node) -> None:
        """Processes that were to take a rank in an attempt that failed."""
        for slot in sorted(node.processes):
            if slot >= self.state.plan.ranks_per_node and (node.name, slot) not in self.state.seats.values():
                self._tell(node.name, slot, {"kind": "retire"})

    def _described(self, recovery: Recovery) -> list[dict[str, Any]]:
        """Who took whose ranks, as the timeline shows it."""
        pairs: dict[tuple[str, str], list[int]] = {}
        for rank, (joiner, _) in sorted(recovery.places.items()):
            pairs.setdefault((recovery.lost[rank], joiner), []).append(rank)
        return [
            {"leaver": leaver, "joiner": joiner, "ranks": ranks} for (leaver, joiner), ranks in pairs.items()
        ]

    # ---- whose fault it was, and what becomes of them ----

    def _follows_the_step(self, recovery: Recovery, target: int) -> bool:
        """The same step has killed ranks twice: a bug, bad data, out of memory. That must not eat the
        standbys."""
        if self._fails_without_a_loss(recovery, target):
            return True
        crashed = [node.name for node in self.state.nodes.values() if node.crashed]
        if not crashed:
            return False
        for name in crashed:
            self.state.nodes[name].crashed = False  # counted once, however often the recovery begins again
        step = target if recovery.statements else self._step_of_the_crash(crashed, target)
        count = self.state.failures_at.get(step, 0) + 1
        self.state.failures_at = {step: count}
        if count == 1:
            self.state.crashes = [crash for crash in self.state.crashes if crash["node"] in crashed]
        if count < self.state.plan.failures_per_step:
            return False
        self._end_by_crash("failed", f"ranks died {count} times at step {step}")
        return True

    def _end_by_crash(self, verdict: str, why: str) -> None:
        """With what is known of the rank that failed first, if any did."""
        if self.state.crashes:
            first = self.state.crashes[0]
            failure = {key: first[key] for key in FAILURE_FIELDS if key in first}
            self._end(verdict, 1, f"{why}; {self._first_crash()}", failure)
        else:
            self._end(verdict, 1, why)

    def _step_of_the_crash(self, crashed: list[str], otherwise: int) -> int:
        """Nobody is left to say where all were: as far as the dead had told."""
        steps = {crash["node"]: crash["step"] for crash in self.state.crashes if crash["node"] in crashed}
        return max((int(step) for step in steps.values() if step is not None), default=otherwise)

    def _fails_without_a_loss(self, recovery: Recovery, target: int) -> bool:
        """Collectives that fail in the same step again and again although nobody is lost will go on to."""
        if recovery.lost or recovery.dropped:
            return False
        redone = self.state.redone.get(target, 0) + 1
        self.state.redone = {target: redone}
        if redone <= REDONE_LIMIT:
            return False
        self._end(
            "failed", 1, f"step {target} failed {redone} times although no rank was lost: {recovery.how}"
        )
        return True

    def _first_crash(self) -> str:
        """The rank that failed first, and the last line that it wrote; of a crash in native code, where that
        was."""
        first = self.state.crashes[0]
        words = [line.strip() for line in first["last_words"].splitlines() if line.strip()]
        if crash := where_it_crashed(first["traceback"]):
            words = [crash]
        last = f": {words[-1][:300]}" if words else ""
        ranks = first["rank"] if first.get("rank") is not None else ", ".join(map(str, first["ranks"]))
        step = f" in step {first['step']}" if first.get("step") is not None else ""
        position = ", ".join(f"{key} at {said}" for key, said in first.get("position", {}).items())
        where = f"{step}, {position}" if position else step
        return f"first rank {ranks} on {first['node']}{where} ({first['how']}){last}"

    def _bury(self, dead: Node) -> None:
        """The ranks of a dead node are elsewhere now: what becomes of the node itself."""
        dead.dead = dead.crashed = False
        dead.failures += 1
        if self.state.ranks_on(dead.name):
            return  # they were started again where they were
        if dead.agent_up:
            dead.standing = "leaving"
            self._emptied(dead)
        else:
            self._lost(dead)

    # ---- what the other parts do ----

    def _recovery_of(self, given: Input) -> Recovery | None:
        recovery = self.state.recovery
        return recovery if recovery is not None and recovery.epoch == given["epoch"] else None

    def _finish_if_done(self) -> None:
        raise NotImplementedError
