"""Where lost ranks go on: on a standby; where they were, if their node is well itself; else by the policies
for want of standbys, in the order of the config.

wait        survivors stay stopped until a node comes, for a limited time
shrink      the lost ranks are dropped, survivors do their share as well (shrinking.py)
double-up   a surviving node hosts the lost ranks as well: slower, the same bits; moved out when a node comes
requeue     the job goes back into the queue, and goes on from its newest checkpoint
fail        the job ends
"""

from __future__ import annotations

from tm_slurm.coordinator.model import Node, Recovery
from tm_slurm.coordinator.moves import Moves


class Placing(Moves):
    """The part of the decisions that finds places for ranks without a process."""

    def _place_lost(self, recovery: Recovery) -> bool:
        """Give every lost rank a place. False when it cannot be done now: it is waited, or the job ends."""
        self._place_on_their_seats(recovery)
        self._pass_over_the_unheard(recovery)
        self._look_after_absent(recovery)
        for node, ranks in self._unplaced(recovery):
            self._place_on_standby(recovery, node, ranks)
        self._fill_absent(recovery)
        for noticed in (False, True):  # a node that should be left is better than none
            for node, ranks in self._unplaced(recovery):
                self._place_where_they_were(recovery, node, ranks, noticed=noticed)
        for choice in self.state.plan.on_no_standby:
            if not self._unplaced(recovery):
                break
            if choice == "wait" and not self.state.stopping and self._waits(recovery):
                return False
            if choice == "shrink":
                self._shrink(recovery)
            elif choice == "double-up":
                self._double_up(recovery)
            elif choice in ("requeue", "fail"):
                self._give_up(recovery, choice)
                return False
        if self._unplaced(recovery):
            self._give_up(recovery, "fail")
            return False
        self._prepare_successors(recovery)
        return True

    def _unplaced(self, recovery: Recovery) -> list[tuple[str, list[int]]]:
        """By node: the lost ranks without a place, as many as a node has slots."""
        by_node: dict[tuple[str, bool], list[int]] = {}
        for rank, node in sorted(recovery.lost.items()):
            if rank not in recovery.places:
                by_node.setdefault((node, rank in self.state.absent), []).append(rank)
        size = self.state.plan.ranks_per_node
        return [(n, r[i : i + size]) for (n, _), r in by_node.items() for i in range(0, len(r), size)]

    def _place_on_their_seats(self, recovery: Recovery) -> None:
        """A process that had not got its rank yet when it was interrupted is well: it gets it now."""
        for rank, name in recovery.lost.items():
            if rank in self.state.absent:
                continue  # where it was, others may be now
            seat = self.state.seats[rank]
            free = rank not in recovery.places and self.state.nodes[name].notice is None
            if free and seat in recovery.refusals and self.state.process_at(seat) is not None:
                recovery.places[rank] = seat

    def _pass_over_the_unheard(self, recovery: Recovery) -> None:
        """A standby whose agent has not come is not waited for while there is another."""
        taken = {name for name, _ in recovery.places.values()}
        for name in sorted(taken):
            node = self.state.nodes[name]
            free = self._standbys_but(taken)
            if node.standing == "standby" and not node.connected and free and free[0].connected:
                taken.add(free[0].name)
                recovery.places = {rank: place for rank, place in recovery.places.items() if place[0] != name}

    def _standbys_but(self, taken: set[str]) -> list[Node]:
        """Those that could take ranks in a recovery, the best first."""
        return [n for n in self._standbys_by_preference() if n.name not in taken and not n.dead]

    def _place_on_standby(self, recovery: Recovery, node: str, ranks: list[int]) -> None:
        taken = {name for name, _ in recovery.places.values()}
        free = self._standbys_but(taken)
        candidates = {place[0] for rank, place in recovery.contested.items() if rank in ranks}
        free.sort(key=lambda n: (not n.connected, n.name not in candidates, not self._warms_for(n, ranks)))
        if free:
            for rank, slot in self._slots_for(ranks).items():
                recovery.places[rank] = (free[0].name, slot)

    def _warms_for(self, node: Node, ranks: list[int]) -> bool:
        return all(
            (process := node.processes.get(slot)) is not None and process.wanted_warm == rank
            for rank, slot in self._slots_for(ranks).items()
        )

    def _place_where_they_were(
        self, recovery: Recovery, name: str, ranks: list[int], *, noticed: bool
    ) -> None:
        """The node has lost its rank processes and is well itself: they are started there again."""
        node = self.state.nodes[name]
        if not node.well() or (node.notice is not None) != noticed:
            return
        if any(rank in self.state.absent for rank in ranks):
            return  # where they were, others may be now
        for rank in ranks:
            recovery.places[rank] = self.state.seats[rank]
        self._note("restart", node=name, ranks=ranks)
        self._spawn_for(recovery, name, ranks)

    def _double_up(self, recovery: Recovery) -> None:
        for _, ranks in self._unplaced(recovery):
            hosts = [
                n for n in self.state.nodes.values() if n.standing == "active" and n.well() and not n.dead
            ]
            if not hosts:
                return
            load = {n.name: len(self.state.ranks_on(n.name)) for n in hosts}
            for place in recovery.places.values():
                if place[0] in load:
                    load[place[0]] += 1
            host = min(hosts, key=lambda n: (n.notice is not None, load[n.name], n.name))
            for rank in ranks:
                recovery.places[rank] = (host.name, self._guest_slot(recovery, host, rank))
            self._note("double_up", node=host.name, ranks=ranks)
            self._spawn_for(recovery, host.name, ranks)

    def _guest_slot(self, recovery: Recovery, host: Node, rank: int) -> int:
        """Where it was to go before the recovery began again, or a slot that nobody has had."""
        name, slot = recovery.contested.get(rank, ("", 0))
        places = {*self.state.seats.values(), *recovery.places.values()}
        if name == host.name and slot >= self.state.plan.ranks_per_node and (name, slot) not in places:
            return slot
        used = [slot for name, slot in places if name == host.name]
        return max([self.state.plan.ranks_per_node - 1, *used, *host.processes]) + 1

    def _spawn_for(self, recovery: Recovery, name: str, ranks: list[int]) -> None:
        self._tell(name, None, {"kind": "spawn", "slots": [recovery.places[rank][1] for rank in ranks]})

    def _waits(self, recovery: Recovery) -> bool:
        """Whether there is still time for a node to come."""
        if recovery.waiting_since is None:
            recovery.waiting_since = self.now
            nodes = ", ".join(node for node, _ in self._unplaced(recovery))
            limit = self.state.plan.refill_wait_s
            self._note("waiting", node=nodes, why=f"no standby is left; waiting {limit:g} s for one")
        return self.now - recovery.waiting_since < self.state.plan.refill_wait_s

    def _give_up(self, recovery: Recovery, choice: str) -> None:
        """The job ends, unless a node is on its way back to the pool."""
        coming = [n for n in self.state.nodes.special() if n.standing == "leaving" and n.notice is None]
        if any(n.well() for n in coming) and self._waits(recovery):
            return
        nodes = ", ".join(sorted({node for node, _ in self._unplaced(recovery)}))
        verdict = "requeue" if choice == "requeue" or self.state.stopping else "failed"
        self._end(verdict, 1, f"no standby is left for {nodes}: {recovery.how}")

    # ---- what shrinking does ----

    def _look_after_absent(self, recovery: Recovery) -> None:
        raise NotImplementedError

    def _fill_absent(self, recovery: Recovery) -> None:
        raise NotImplementedError

    def _shrink(self, recovery: Recovery) -> None:
        raise NotImplementedError

    def _prepare_successors(self, recovery: Recovery) -> None:
        """Have those that are up build the role that they will need, while the survivors are still
        stopping."""
        for rank, place in recovery.places.items():
            process = self.state.process_at(place)
            if process is not None and process.wanted_warm != rank:
                self._want_warm(self.state.nodes[place[0]], place[1], rank)
