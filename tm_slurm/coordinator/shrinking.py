"""The policy `shrink`, where no standby is left for lost ranks: they are absent, and survivors do their share
of every step beside their own, until a standby comes.

    can be       all ranks are replicas of each other; every script takes its work from tm_slurm.shares(); no
                 step but the next has to be done again; somebody knows the lost ranks' private state there
    absent       a rank without a seat. An adopter among the survivors has its private state, and tells it
                 to its own buddy with its own. A lost adopter's ranks go to other survivors
    grown back   a standby that is warm for an absent rank takes it in an ordinary recovery: the parameters
                 from a replica, the private state from the adopter

When all have to go back to a snapshot, a checkpoint or the start, absent ranks are lost like any others.
While ranks are absent nothing is moved: a standby fills their seats first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tm_slurm.coordinator.deciding import Input
from tm_slurm.coordinator.model import Absent, JobState, Node, Recovery, Statement
from tm_slurm.coordinator.placing import Placing
from tm_slurm.coordinator.roster import Place
from tm_slurm.coordinator.storing import AFTER_THE_FIRST


class Shrinking(Placing):
    """The part of the decisions that is about absent ranks."""

    # ---- what a recovery can go on from ----

    def _why_not_at(self, target: int, survivors: dict[int, Statement]) -> str:
        for rank, said in survivors.items():
            if not said.begun:
                return f"rank {rank} had not begun"
            if said.torn:
                return f"rank {rank} failed while it applied step {said.committed}"
            if said.committed != target and not (said.committed == target - 1 and said.at_vote):
                return f"rank {rank} has committed {said.committed} steps, another {target}"
        return "" if survivors else "no rank has survived"

    def _why_no_replica(self, recovery: Recovery, survivors: dict[int, Statement], target: int) -> str:
        for rank in recovery.lost:
            if not self._replicas_of(rank, target) & set(survivors):
                return f"no replica of rank {rank} has survived"
            if not any(step <= target for step in recovery.wards.get(rank, ())):
                return f"nobody keeps the private state of rank {rank}"
        return ""

    # ---- going on with fewer ----

    def _shrink(self, recovery: Recovery) -> None:
        """Drop the lost ranks that have no place, if it can be."""
        ranks = [rank for _, ranks in self._unplaced(recovery) for rank in ranks]
        why = self._why_not_shrink(recovery, ranks)
        if why:
            if why != recovery.cannot_shrink:
                recovery.cannot_shrink = why
                self._note("cannot_shrink", ranks=ranks, why=why)
            return
        for rank in ranks:
            recovery.dropped[rank] = recovery.lost.pop(rank)

    def _why_not_shrink(self, recovery: Recovery, ranks: list[int]) -> str:
        state, survivors, target = self.state, recovery.survivors(), _furthest(recovery)
        problem = self._why_not_at(target, survivors) or self._why_no_replica(recovery, survivors, target)
        if problem:
            return f"all have to go back: {problem}"
        everybody = set(range(state.plan.world_size))
        some = min(survivors)
        strangers = everybody - {some, *self._replicas_of(some, AFTER_THE_FIRST)}
        if strangers:
            return f"ranks {some} and {min(strangers)} are not known to be replicas of each other"
        for rank in sorted(survivors):
            if state.unshared.get(rank) != "":
                return f"rank {rank}: {state.unshared.get(rank, 'it has not done a step yet')}"
        for rank in ranks:
            if not self._adoptable(recovery, rank, target):
                return f"nobody knows the private state of rank {rank} at step {target}"
        return ""

    def _adoptable(self, recovery: Recovery, rank: int, target: int) -> bool:
        return target in recovery.wards.get(rank, ()) or target in recovery.nearly.get(rank, ())

    def _look_after_absent(self, recovery: Recovery) -> None:
        """When it is known who is lost: absent ranks that cannot stay so are lost as well."""
        survivors, target = recovery.survivors(), _furthest(recovery)
        absent = [rank for rank in self.state.absent if rank not in recovery.lost]
        must = self._why_not_at(target, survivors) or self._why_no_replica(recovery, survivors, target)
        if must or not all(self._adoptable(recovery, rank, target) for rank in absent):
            for rank in absent:
                recovery.lost[rank] = self.state.absent[rank].seat[0]

    def _share_out(self, recovery: Recovery, survivors: dict[int, Statement]) -> None:
        """Who does the share of whom: whoever did already, else whoever has the fewest."""
        ranks = sorted({*recovery.dropped, *(set(self.state.absent) - set(recovery.lost))})
        load = dict.fromkeys(sorted(survivors), 0)
        for rank in ranks:
            holder = next((other for other, said in survivors.items() if rank in said.adopted), None)
            if holder is not None:
                recovery.adopters[rank] = holder
                load[holder] += 1
        for rank in ranks:
            if rank not in recovery.adopters:
                adopter = min(load, key=lambda other: (load[other], other))
                recovery.adopters[rank] = adopter
                load[adopter] += 1

    def _shares_of(self, recovery: Recovery, rank: int, said: Statement) -> dict[str, Any]:
        """`keep`: absent ranks whose share a survivor goes on to do; `adopt`: those that are new to it, which
        come with their private state."""
        ranks = sorted(other for other, adopter in recovery.adopters.items() if adopter == rank)
        keep = [other for other in ranks if other in said.adopted]
        if keep != ranks:
            recovery.confirming.add(rank)
        return {"keep": keep, "adopt": {str(other): None for other in ranks if other not in keep}}

    def _take_out_absent(self, recovery: Recovery) -> None:
        """The recovery is over: these have no seats now."""
        state = self.state
        before, state.absent = state.absent, {}
        for rank, adopter in recovery.adopters.items():
            seat = state.seats.take_out(rank) if rank in state.seats else before[rank].seat
            state.absent[rank] = Absent(adopter, seat)
            state.done.pop(rank, None)
        fields = {"epoch": recovery.epoch, "step": recovery.target}
        if recovery.dropped:
            nodes = sorted(set(recovery.dropped.values()))
            adopters = {str(rank): recovery.adopters[rank] for rank in sorted(recovery.dropped)}
            self._note("shrunk", **fields, ranks=sorted(recovery.dropped), nodes=nodes, adopters=adopters)
        back = sorted(set(before) & set(recovery.places))
        if back:
            nodes = sorted({recovery.places[rank][0] for rank in back})
            self._note("grown", **fields, ranks=back, nodes=nodes)

    def _on_adopted(self, given: Input) -> None:
        """A survivor has the private states of those whose share is new to it."""
        recovery = self._recovery_of(given)
        if recovery is not None and recovery.target is not None:
            recovery.confirming.discard(int(given["rank"]))
            self._finish_recovery(recovery)

    # ---- what recoveries do ----

    def _recover(self, how: str) -> None:
        raise NotImplementedError

    def _recovery_of(self, given: Input) -> Recovery | None:
        raise NotImplementedError

    def _finish_recovery(self, recovery: Recovery) -> None:
        raise NotImplementedError

    # ---- growing back ----

    def _plan_moves(self) -> None:
        if not self.state.absent:
            super()._plan_moves()
            return
        state = self.state
        if state.recovery is not None or state.finishing or state.ended or state.stopping:
            return
        for leaver, _ in self._parties_to_move():
            self._say_waiting(leaver)
        places = self._places_to_take()
        for rank, (name, slot) in places.items():
            process = state.nodes[name].processes.get(slot)
            if process is not None and process.wanted_warm != rank:
                self._want_warm(state.nodes[name], slot, rank)
        ready = {rank: name for rank, (name, _) in places.items() if self._is_ready_for(rank, places)}
        if ready:
            taken = ", ".join(f"{name} takes rank {rank} back" for rank, name in ready.items())
            self._recover(f"a node has come: {taken}")

    def _places_to_take(self) -> dict[int, Place]:
        """Without a recovery or a move: where absent ranks could be."""
        state = self.state
        if not state.absent or state.recovery is not None or state.move is not None:
            return super()._places_to_take()
        return self._places_for_absent(set())

    def _places_for_absent(self, taken: set[str]) -> dict[int, Place]:
        places: dict[int, Place] = {}
        free = self._standbys_but(taken)
        for ranks in self._absent_parties():
            free.sort(key=lambda node: not self._warms_for(node, ranks))
            if free:
                node = free.pop(0)
                places |= {rank: (node.name, slot) for rank, slot in self._slots_for(ranks).items()}
        return places

    def _absent_parties(self) -> list[list[int]]:
        """As many ranks as a node takes, those together that were together."""
        by_node: dict[str, list[int]] = {}
        for rank, absent in sorted(self.state.absent.items()):
            by_node.setdefault(absent.seat[0], []).append(rank)
        size = self.state.plan.ranks_per_node
        return [ranks[i : i + size] for ranks in by_node.values() for i in range(0, len(ranks), size)]

    def _is_ready_for(self, rank: int, places: dict[int, Place]) -> bool:
        """Whether all of the node that is to take this rank is warm for what it is to take."""
        name = places[rank][0]
        for other, place in places.items():
            process = self.state.process_at(place)
            if place[0] == name and (process is None or not process.warm_for == process.wanted_warm == other):
                return False
        return True

    def _fill_absent(self, recovery: Recovery) -> None:
        """Standbys that are warm for absent ranks take them."""
        survivors, target = recovery.survivors(), _furthest(recovery)
        if not self.state.absent or not survivors or self.state.stopping:
            return
        places = self._places_for_absent({name for name, _ in recovery.places.values()})
        for rank, place in places.items():
            known = any(step <= target for step in recovery.wards.get(rank, ()))
            known = known and bool(self._replicas_of(rank, target) & set(survivors))
            if rank not in recovery.lost and known and self._is_ready_for(rank, places):
                recovery.lost[rank] = self.state.absent[rank].seat[0]
                recovery.places[rank] = place

    def _settle_absent(self, recovery: Recovery, joiner: Node, ranks: dict[int, Place]) -> dict[int, Place]:
        """Of a joiner's ranks those that had seats before. If it has got an absent one, all of those are its
        own: what it has not got is lost there."""
        state = self.state
        absent = {rank: place for rank, place in ranks.items() if rank in state.absent}
        said = {rank: recovery.statements.get(place) for rank, place in absent.items()}
        if any(statement is not None and statement.rank == rank for rank, statement in said.items()):
            joiner.standing = "active"
            for rank, place in absent.items():
                state.seats[rank] = place
                del state.absent[rank]
            state.changed |= set(absent)
            self._note("moved_in_recovery", epoch=recovery.epoch, ranks=sorted(absent), joiner=joiner.name)
        return {rank: place for rank, place in ranks.items() if rank not in absent}


def _furthest(recovery: Recovery) -> int:
    """The boundary at which all go on unless they go back."""
    return max((said.committed for said in recovery.survivors().values()), default=0)


def reports_of_all(state: JobState, report: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A rank's heartbeat or answer, and the same of each absent rank whose share it does."""
    yield report
    for rank, absent in state.absent.items():
        if absent.adopter == int(report["rank"]):
            yield {**report, "rank": rank}
