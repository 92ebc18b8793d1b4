"""What is kept in case that a rank is lost without a replica: snapshots in the memory of another node's
agent, and checkpoints on disk.

duties      each rank is told where its snapshots go, and whether it writes checkpoints for its replicas
*_stored    a rank's part has arrived; when all have, the whole can be gone back to, and the next may begin
"""

from __future__ import annotations

from tm_slurm.coordinator.deciding import Input
from tm_slurm.coordinator.leaving import Leaving
from tm_slurm.coordinator.model import Node, Stored

REFUSALS = 2
"""So often is tried to go back to a state before it is given up for an older one."""

AFTER_THE_FIRST = 1 << 62
"""As a step: when everything has been stepped that ever will be."""


class Storing(Leaving):
    """The part of the decisions that is about states to go back to."""

    def _on_vault(self, given: Input) -> None:
        """An agent keeps snapshots from now on."""
        node, vault = self.state.nodes[given["node"]], [str(given["host"]), int(given["port"])]
        if node.vault != vault:  # else it is told again, to a new leader
            node.vault = vault
            self._assign_duties()

    def _on_replica_key(self, given: Input) -> None:
        """Told before the first step, and after it, when optimizers have their state."""
        state = self.state
        rank, step, key = int(given["rank"]), int(given["step"]), str(given["key"])
        keys = state.replica_keys.setdefault(rank, {})
        before = keys.get(step)
        if before != key:
            if before is not None:
                state.replicas[step, before].discard(rank)
            keys[step] = key
            state.replicas.setdefault((step, key), set()).add(rank)
            state.duties_from_anew = True
        if "unshared" in given:
            state.unshared[rank] = str(given["unshared"])
        state.state_bytes[rank] = int(given.get("bytes", 0))
        if before != key and state.knows_replicas():
            self._assign_duties()

    def _replicas_of(self, rank: int, step: int) -> set[int]:
        """The other ranks with the same parameters and optimizer state as this one has after `step` steps.
        Whoever is the same before the first step need not be after it, when optimizers have their state."""
        return self._like(rank, step) - {rank}

    def _like(self, rank: int, step: int) -> set[int]:
        """A rank and its replicas, not to be changed; empty when it has not told."""
        mark = self._mark_of(rank, step)
        return self.state.replicas[mark] if mark is not None else set()

    def _mark_of(self, rank: int, step: int) -> tuple[int, str] | None:
        """What all replicas of a rank have told."""
        own = self.state.replica_keys.get(rank)
        if not own:
            return None
        telling = min(step, min(own) + 1)
        return (telling, own[telling]) if telling in own else None

    def same_work(self, rank: int) -> set[int]:
        """A rank and its replicas, not to be changed; empty while that is not known."""
        return self._like(rank, AFTER_THE_FIRST)

    def _knows_replicas(self) -> bool:
        """Whether every rank has told both its keys."""
        return self.state.knows_replicas()

    def _needs_snapshots(self) -> bool:
        """Whether the loss of some node would lose parameters that no other node has."""
        state = self.state
        if not self._knows_replicas() or state.absent:  # then all are replicas, and some have no process
            return False
        if state.duties_from_anew:
            marks = dict.fromkeys(self._mark_of(rank, AFTER_THE_FIRST) for rank in state.seats)
            state.replica_groups = [state.replicas[m] if m is not None else set() for m in marks]
        return any(self._is_on_one_node(group) for group in state.replica_groups)

    def _is_on_one_node(self, ranks: set[int]) -> bool:
        nodes = (self.state.seats[rank][0] for rank in ranks)
        first = next(nodes, None)
        return all(node == first for node in nodes)

    def _assign_duties(self) -> None:
        """Tell the ranks whose vault has changed, and processes that have not heard it; all of them when it
        is first known who has replicas."""
        state = self.state
        if not state.started or state.finishing:
            return
        wanted = self._needs_snapshots()
        from_anew = state.duties_from_anew or wanted != state.snapshots_wanted
        concerned = set(state.seats) if from_anew else self._concerned()
        state.snapshots_wanted, state.duties_from_anew = wanted, False
        state.nodes.touched.clear()
        state.seats.moved.clear()
        owners: dict[tuple[int, str] | None, int] = {}
        for rank in sorted(concerned):
            keeper = self._keeper_for(state.seats[rank][0])
            mark = self._mark_of(rank, AFTER_THE_FIRST)
            if mark not in owners:
                owners[mark] = min(self._like(rank, AFTER_THE_FIRST), default=state.plan.world_size)
            duties = {
                "kind": "duties",
                "vault": keeper.vault if keeper is not None else None,
                "keeper": keeper.name if keeper is not None else None,
                "owner": min(rank, owners[mark]),
                "snapshots": wanted,
            }
            process = state.process(rank)
            told = repr((duties, state.seats[rank], process.incarnation if process is not None else None))
            if state.duties.get(rank) != told:
                state.duties[rank] = told
                self._tell_rank(rank, duties)
        self._have_standbys_reserve()

    def _concerned(self) -> set[int]:
        """The ranks whose duties may be others than when they were last assigned: those that have moved,
        those on nodes that have changed, and those for which such a node may be, or have been, the next
        one."""
        nodes, seats = self.state.nodes, self.state.seats
        names = set(nodes.touched)
        for name in nodes.touched:
            at = nodes.place_of(name)
            for back in range(1, len(nodes.ring)):
                before = nodes.ring[at - back]
                names.add(before)
                if self._keeps(nodes[before]):
                    break
        found = {rank for name in names for rank in seats.on(name)}
        return found | {rank for rank in seats.moved if rank in seats}

    def _have_standbys_reserve(self) -> None:
        """Those that are warm: they may have to fetch a snapshot, and memory takes longer than the bytes."""
        state = self.state
        for node in state.nodes.special() if state.snapshots_wanted else ():
            for slot, process in node.processes.items():
                new = process.warm_for is not None and process.incarnation not in state.reserving
                if node.standing == "standby" and new:
                    state.reserving.add(process.incarnation)
                    self._tell(node.name, slot, {"kind": "reserve"})

    @staticmethod
    def _can_keep(node: Node) -> bool:
        return node.agent_up and node.vault is not None and node.notice is None and not node.dead

    def _keeps(self, node: Node) -> bool:
        """Whether the ranks before it around the ring, up to the next one that does, are told to keep what
        they have there."""
        return node.standing in ("active", "standby") and self._can_keep(node)

    def _keeper_for(self, name: str) -> Node | None:
        """The next node of the job, around the ring, that can keep what a rank on `name` has."""
        nodes = self.state.nodes
        at, last = nodes.place_of(name), None
        for ahead in range(1, len(nodes.ring)):
            node = nodes[nodes.ring[(at + ahead) % len(nodes.ring)]]
            if self._keeps(node):
                return node
            if last is None and self._can_keep(node):
                last = node
        return last

    # ---- parts arrive ----

    def _on_snapshot_stored(self, given: Input) -> None:
        state = self.state
        done = self._arrived(state.snapshot_in_work, state.snapshot, given)
        if done is None:
            return
        state.snapshot_in_work = done
        if self._is_whole(done):
            state.snapshot, state.snapshot_in_work = done, None
            for rank in state.seats:
                self._tell_rank(rank, {"kind": "snapshot_complete", "step": done.step})
            self._tell_keepers(done)

    def _tell_keepers(self, snapshot: Stored) -> None:
        """Every agent with a vault: which ranks' part of it stays there. What it has of others, who are kept
        elsewhere now, it lets go."""
        kept: dict[str, list[int]] = {node.name: [] for node in self._vaults()}
        for rank, name in sorted(snapshot.where.items()):
            kept.setdefault(name, []).append(rank)
        for name in sorted(kept):
            keep = {"kind": "keep", "step": snapshot.step, "epoch": snapshot.epoch, "ranks": kept[name]}
            self._tell(name, None, keep)

    def _tell_vaults_the_epoch(self) -> None:
        """What comes from ranks that were replaced is refused from now on."""
        for node in self._vaults():
            self._tell(node.name, None, {"kind": "epoch", "epoch": self.state.epoch})

    def _vaults(self) -> list[Node]:
        return [node for node in self.state.nodes.values() if node.agent_up and node.vault is not None]

    def _on_checkpoint_written(self, given: Input) -> None:
        state = self.state
        state.checkpoint_s = max(state.checkpoint_s, float(given.get("seconds", 0.0)))
        done = self._arrived(state.checkpoint_in_work, state.checkpoint, given)
        if done is None:
            return
        state.checkpoint_in_work = done
        if self._is_whole(done):
            publish = {"kind": "publish", "step": done.step, "epoch": done.epoch}
            self._tell_rank(self.state.pacer(), {**publish, "world_size": state.plan.world_size})

    def _arrived(self, in_work: Stored | None, newest: Stored | None, given: Input) -> Stored | None:
        """The state in work with this part in it; None when the part is of no use any more."""
        step, epoch = int(given["step"]), int(given["epoch"])
        recovery = self.state.recovery
        if epoch < (self.state.epoch if recovery is None else recovery.epoch):
            return None  # a newer one: others go on already while the news of it is on its way here
        if newest is not None and step <= newest.step:
            return None
        if in_work is None or (in_work.epoch, in_work.step) < (epoch, step):
            in_work = Stored(step, epoch)
        if (in_work.epoch, in_work.step) == (epoch, step):
            in_work.where[int(given["rank"])] = str(given.get("keeper", ""))
        return in_work

    def _is_whole(self, stored: Stored) -> bool:
        size = self.state.plan.world_size
        return len(stored.where) == size and set(stored.where) == set(range(size))

    def _doubt(self, source: str, step: int, epoch: int) -> None:
        """A rank could not go back to it: it is tried again, but not too often, there may be another."""
        state = self.state
        stored = {"snapshot": state.snapshot, "checkpoint": state.checkpoint}.get(source)
        if stored is None or stored.step != step or epoch <= state.refused_in:
            return
        count = state.refused[2] + 1 if state.refused[:2] == (source, step) else 1
        state.refused, state.refused_in = (source, step, count), epoch
        if count < REFUSALS:
            return
        self._note(f"{source}_given_up", step=step, path=stored.path)
        if source == "snapshot":
            state.snapshot = None
        else:
            state.checkpoints_given_up.add(stored.path)
            state.checkpoint = state.older_checkpoints.pop(0) if state.older_checkpoints else None

    def _newest_checkpoint(self, given: Input) -> None:
        """A checkpoint is there; `older` are the others that have not been removed."""
        state = self.state
        state.checkpoint = Stored(int(given["step"]), state.epoch, path=str(given["path"]))
        state.checkpoints_given_up.discard(state.checkpoint.path)
        state.older_checkpoints = [
            Stored(int(step), state.epoch, path=str(path))
            for step, path in given.get("older", ())
            if path not in state.checkpoints_given_up
        ]

    def _repeat_stop(self) -> None:
        """Rank 0 may be another process now: the job is still to be stopped."""
        if self.state.stopping:
            self._tell_rank(self.state.pacer(), {"kind": "checkpoint"})

    def _on_checkpoint_found(self, given: Input) -> None:
        """An earlier start of this job has left one: training goes on from there."""
        self._newest_checkpoint(given)
        self._note("checkpoint_found", step=given["step"], path=given["path"])

    def _on_checkpoint_published(self, given: Input) -> None:
        state = self.state
        self._newest_checkpoint(given)
        state.checkpoint_in_work = None
        self._note("checkpoint", step=given["step"], path=given["path"])
        self._tell_rank(self.state.pacer(), {"kind": "checkpoint_complete", "step": int(given["step"])})
        if state.stopping:
            self._end("requeue", 1, f"{state.stopping}; checkpoint at step {given['step']}")

    def _on_checkpoint_failed(self, given: Input) -> None:
        """Training goes on; what was written before stays the newest."""
        self.state.checkpoint_in_work = None
        self._note("checkpoint_failed", step=given.get("step"), why=given["why"])
        self._tell_rank(self.state.pacer(), {"kind": "checkpoint_complete", "step": -1})
        if self.state.stopping and not self._stays_without_checkpoint():
            self._end("requeue", 1, f"{self.state.stopping}; the last checkpoint failed: {given['why']}")

    # ---- what decisions on the whole job do ----

    def _stays_without_checkpoint(self) -> bool:
        raise NotImplementedError
