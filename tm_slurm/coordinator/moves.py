"""The planned move (TrainMover §5): pair leavers with joiners, prepare, arm, commit, or give up.

preparing   joiner: warm for the leaver's role → join (links dialled and staged, state's layout exchanged)
            leaver: prepare_leave → says whom it has links to and where its state can be fetched
            linked stayers: prepare → stage the joiner's links beside those in use
armed       all joiners have joined: the trigger rank is told to carry the epoch into the next vote
switching   a vote carried it; stayers swap links and go on, state flows leaver → joiner
(committed) all joiners have resumed: the seats are theirs, the leavers retire
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from tm_slurm.coordinator import windows
from tm_slurm.coordinator.actions import Spread
from tm_slurm.coordinator.deciding import Input
from tm_slurm.coordinator.model import Move, Node, Pair
from tm_slurm.coordinator.roster import PeerTable, Place
from tm_slurm.coordinator.storing import Storing


class Moves(Storing):
    """The part of the decisions that is about standbys and moves."""

    # ---- standbys ----

    def _standbys_by_preference(self) -> list[Node]:
        """Standbys that could take ranks, the best first: those whose agent is connected; of these
        those in no window; then warm ones, those that have not failed; the batch host last, because a rank
        that sits there could be moved away again, but its node never given back."""
        free = [node for node in self.state.nodes.special() if node.free_to_join()]
        opens = {n.name: windows.opens_next(self.state, n.name, self.now) for n in free}
        later = {name: -(at if at is not None else math.inf) for name, at in opens.items()}
        free.sort(key=lambda n: (not self._is_warm(n), n.failures, n.batch_host, n.name))
        return sorted(free, key=lambda n: (not n.connected, opens[n.name] is not None, later[n.name]))

    def _is_warm(self, node: Node) -> bool:
        processes = node.processes.values()
        return len(processes) == self.state.plan.ranks_per_node and all(
            p.warm_for is not None for p in processes
        )

    def _warm_standby(self, node: Node) -> None:
        """Have a standby's processes warm up: for the ranks that it is to take, or for those of some active
        node."""
        self._introduce_mates(node)
        ranks = {slot: slot for slot in node.processes}
        ranks |= {slot: rank for rank, (name, slot) in self._places_to_take().items() if name == node.name}
        for slot, process in node.processes.items():
            if process.wanted_warm is None:
                to_take = (node.name, slot) in self._places_to_take().values()
                self._want_warm(node, slot, ranks[slot] % self.state.plan.world_size, for_any=not to_take)

    def _introduce_mates(self, node: Node) -> None:
        """Each of a standby's processes hears where all of them listen: what concerns nobody else is real
        while they warm up."""
        at = {str(p.slot): [p.host, p.port, p.incarnation] for p in node.processes.values()}
        for slot in node.processes if len(at) > 1 else ():
            self._tell(node.name, slot, {"kind": "mates", "at": at})

    def _places_to_take(self) -> dict[int, Place]:
        """rank → where it is about to go, by a recovery or a move."""
        if self.state.recovery is not None:
            return self.state.recovery.places
        move = self.state.move
        return {} if move is None else {r: (p.joiner, p.ranks[r]) for r, p in move.ranks().items()}

    def _want_warm(self, node: Node, slot: int, rank: int, *, for_any: bool = False) -> None:
        """`for_any`: it is not known yet whose rank it will take; another one of the same or another class
        will do, and the standby says which it has chosen."""
        process = node.processes[slot]
        process.wanted_warm, process.warm_for = rank, None
        message = {
            "kind": "warm",
            "rank": rank,
            "world_size": self.state.plan.world_size,
            "ranks_per_node": self.state.plan.ranks_per_node,
        }
        if for_any:
            standbys = sorted(n.name for n in self.state.nodes.special() if n.standing == "standby")
            message |= {"any": True, "place": standbys.index(node.name) if node.name in standbys else 0}
        self._tell(node.name, slot, message)

    # ---- phase 1 ----

    def _plan_moves(self) -> None:
        state = self.state
        if state.move is not None or state.recovery is not None or not state.started:
            return
        if state.finishing or state.ended:
            return
        if state.nodes.version == state.nobody_leaves_at and not state.seats.hosts():
            return
        parties = self._parties_to_move()
        if not parties:
            state.nobody_leaves_at = state.nodes.version
            return
        joiners = self._standbys_by_preference()
        pairs = []
        for leaver, ranks in parties:
            joiner = next((j for j in joiners if windows.outlasts(state, j, leaver, self.now)), None)
            if joiner is None:
                self._say_waiting(leaver)
                continue
            joiners.remove(joiner)
            pairs.append(Pair(leaver.name, joiner.name, self._slots_for(ranks)))
        if not pairs:
            return
        state.last_epoch += 1
        state.move = Move(state.last_epoch, pairs, self.now)
        self._note("prepare", epoch=state.move.epoch, pairs=described(pairs))
        self._repeat_move()

    def _parties_to_move(self) -> list[tuple[Node, list[int]]]:
        """Nodes and the ranks that should leave them, as many as a joiner can take: first from nodes that
        should be left, then the guests of others."""
        state, size = self.state, self.state.plan.ranks_per_node
        noticed = [n for n in state.nodes.special() if n.standing == "active" and n.notice is not None]
        noticed.sort(key=lambda n: (n.notice.at if n.notice else 0.0, n.name))
        leaving = [(node, state.ranks_on(node.name)) for node in noticed]
        hosts = [state.nodes[name] for name in sorted(state.seats.hosts(), key=state.nodes.place_of)]
        hosts = [node for node in hosts if node.standing == "active" and node.notice is None]
        leaving += [(node, state.guests_on(node.name)) for node in hosts]
        parties = []
        for node, ranks in leaving:
            by_slot = sorted(ranks, key=ranks.__getitem__)
            parties += [(node, by_slot[i : i + size]) for i in range(0, len(by_slot), size)]
        return parties

    def _slots_for(self, ranks: Iterable[int]) -> dict[int, int]:
        """rank → the slot to take on a fresh node: the one it has, unless it is a guest where it is."""
        slots = {rank: self.state.last_seat(rank)[1] for rank in ranks}
        one_each = len(set(slots.values())) == len(slots)
        if one_each and all(slot < self.state.plan.ranks_per_node for slot in slots.values()):
            return slots
        return {rank: slot for slot, rank in enumerate(sorted(slots))}

    def _say_waiting(self, leaver: Node) -> None:
        if leaver.notice is None or leaver.notice.said_waiting:
            return
        leaver.notice.said_waiting = True
        self._note("waiting", node=leaver.name, why="no standby is left")

    def _repeat_move(self) -> None:
        """Send what the current phase of the move needs; harmless when it was sent before."""
        move = self.state.move
        if move is None:
            return
        move.asked_to_join.clear()
        for pair in move.pairs:
            joiner = self.state.nodes[pair.joiner]
            for rank, slot in pair.ranks.items():
                self._tell_rank(rank, {"kind": "prepare_leave", "epoch": move.epoch})
                process = joiner.processes.get(slot)
                if process is not None and process.wanted_warm != rank:
                    self._want_warm(joiner, slot, rank)
        self._advance_move()
        if move.phase == "armed":
            kind = "stop" if move.stop_asked else "go"
            self._tell_rank(move.trigger(), {"kind": kind, "epoch": move.epoch})

    def _on_leaver_prepared(self, given: Input) -> None:
        move = self._move_of(given)
        if move is None:
            return
        rank = int(given["rank"])
        move.linked[rank] = [int(peer) for peer in given["linked"]]
        move.sources[rank] = given["source"]
        self._advance_move()

    def _advance_move(self) -> None:
        """As soon as a moving rank's two sides are ready, bring them and the linked stayers together."""
        move = self.state.move
        if move is None or move.phase != "preparing":
            return
        moving = move.ranks()
        if set(move.linked) != set(moving):
            return
        changes = self._changes(move)
        if changes is None:
            return
        if not move.asked_to_join:
            stayers = {peer for linked in move.linked.values() for peer in linked} - set(moving)
            for stayer in sorted(stayers):
                self._tell_rank(stayer, {"kind": "prepare", "epoch": move.epoch, "changes": changes})
        peers: PeerTable | None = None
        for rank, pair in moving.items():
            process = self.state.nodes[pair.joiner].processes[pair.ranks[rank]]
            if rank in move.asked_to_join or not process.warm_for == process.wanted_warm == rank:
                continue
            peers = peers if peers is not None else self.state.peers().with_changes(changes)
            move.asked_to_join.add(rank)
            message = {
                "kind": "join",
                "epoch": move.epoch,
                "rank": rank,
                "peers": peers,
                "dial": sorted(p for p in move.linked[rank] if p not in moving or p < rank),
                "sources": [move.sources[rank]],
            }
            self._tell(pair.joiner, process.slot, message)

    def _changes(self, move: Move) -> dict[str, list[Any]] | None:
        """rank → the joiner's address, for every moving rank; None while a joiner's process is not up."""
        changes = {}
        for rank, pair in move.ranks().items():
            process = self.state.nodes[pair.joiner].processes.get(pair.ranks[rank])
            if process is None:
                return None
            changes[str(rank)] = process.peer()
        return changes

    def _on_joined(self, given: Input) -> None:
        move = self._move_of(given)
        if move is None or move.phase != "preparing":
            return
        move.joined.add(int(given["rank"]))
        move.joined_after_s[int(given["rank"])] = self.now - move.started_at
        if move.joined == set(move.ranks()):
            move.phase = "armed"
            move.prepared_at = self.now
            self.state.prepared_s = max(self.state.prepared_s, self.now - move.started_at)
            after = {str(rank): seconds for rank, seconds in move.joined_after_s.items()}
            self._note("prepared", epoch=move.epoch, seconds=self.now - move.started_at, joined_after_s=after)
            self._tell_rank(move.trigger(), {"kind": "go", "epoch": move.epoch})

    def _on_join_failed(self, given: Input) -> None:
        undertaking = self.state.recovery or self.state.move
        place = self._places_to_take().get(int(given["rank"]))
        if undertaking is None or undertaking.epoch != given["epoch"] or place is None:
            return
        recovery = self.state.recovery
        if recovery is not None and recovery.target is not None:
            self._doubt(recovery.source, recovery.target, recovery.epoch)
        joiner = self.state.nodes[place[0]]
        joiner.failures += 1
        self._note("join_failed", node=joiner.name, rank=given["rank"], why=given["why"])
        self._joiner_gone(
            joiner.name, f"rank {given['rank']} could not join on {joiner.name}: {given['why']}"
        )

    # ---- giving up ----

    def _stop_move(self, reason: str) -> None:
        """Give the move up if its switch has not begun; when it is armed, the trigger rank has the last
        word."""
        move = self.state.move
        if move is None:
            return
        move.stop_reason = reason
        if move.phase == "preparing":
            self._cancel_move(reason)
        elif move.phase == "armed" and not move.stop_asked:
            move.stop_asked = True
            self._tell_rank(move.trigger(), {"kind": "stop", "epoch": move.epoch})

    def _on_stopped(self, given: Input) -> None:
        move = self._move_of(given)
        if move is not None:
            self._cancel_move(move.stop_reason)

    def _on_too_late(self, given: Input) -> None:
        move = self._move_of(given)
        if move is not None:
            self._note("too_late", epoch=move.epoch, reason=move.stop_reason)

    def _cancel_move(self, reason: str) -> None:
        move = self.state.move
        if move is None:
            return
        self.state.move = None
        self._note("cancelled", epoch=move.epoch, reason=reason)
        moving = move.ranks()
        linked = {peer for peers in move.linked.values() for peer in peers}
        for rank in sorted(linked | set(moving)):
            self._tell_rank(rank, {"kind": "cancel", "epoch": move.epoch})
        for rank, pair in moving.items():
            slot = pair.ranks[rank]
            if slot in self.state.nodes[pair.joiner].processes:
                self._tell(pair.joiner, slot, {"kind": "cancel", "epoch": move.epoch})
        for name in move.joiners():
            joiner = self.state.nodes[name]
            if joiner.standing == "standby" and joiner.notice is not None:
                self._standby_leaves(joiner)  # noticed when it could not leave

    def _joiner_gone(self, name: str, reason: str) -> None:
        move = self.state.move
        if move is not None and name in move.joiners():
            move.joiner_lost = True
            self._stop_move(reason)

    def _on_prepare_expired(self, given: Input) -> None:
        move = self._move_of(given)
        if move is None or move.phase != "preparing":
            return
        late = sorted(set(move.ranks()) - move.joined)
        slow = sorted({move.ranks()[rank].joiner for rank in late})
        for name in slow:
            self.state.nodes[name].failures += 1
        self._cancel_move(f"ranks {late} were not prepared in time on {', '.join(slow)}")

    # ---- phase 2 ----

    def _on_switching(self, given: Input) -> None:
        move = self._move_of(given)
        if move is not None and move.phase == "armed":
            move.phase = "switching"
            move.switching_at = self.now
            self._note("switching", epoch=move.epoch, step=given.get("step"))

    def _on_resumed(self, given: Input) -> None:
        move = self._move_of(given)
        if move is None:
            return
        move.resumed[int(given["rank"])] = {
            "bytes": given.get("bytes", 0),
            "state_s": given.get("state_s", 0.0),
            "told_after_s": self.now - move.switching_at,
        }
        if set(move.resumed) != set(move.ranks()):
            return
        state = self.state
        self._spread(move)
        state.move = None
        state.epoch = move.epoch
        state.changed |= set(move.ranks())
        state.moves_done += 1
        for pair in move.pairs:
            state.nodes[pair.joiner].standing = "active"
            for rank, slot in pair.ranks.items():
                self._tell_rank(rank, {"kind": "retire"})
                state.seats[rank] = (pair.joiner, slot)
        for name in move.leavers():
            if not state.ranks_on(name):
                state.nodes[name].standing = "leaving"
        self._note("moved", **self._moved_fields(move, given))
        self._assign_duties()
        self._repeat_stop()

    def _spread(self, move: Move) -> None:
        """Ranks without a link to a leaver took no part; they learn where the moved ranks are, for links to
        come."""
        changes = self._changes(move)
        self.actions.append(Spread({"kind": "peers", "epoch": move.epoch, "changes": changes}))

    def _moved_fields(self, move: Move, given: Input) -> dict[str, Any]:
        """`bytes`: what the joiner with most to receive got; `state_s`: the longest transfer."""
        received = [sum(move.resumed[rank]["bytes"] for rank in pair.ranks) for pair in move.pairs]
        return {
            "epoch": move.epoch,
            "step": given.get("step"),
            "pairs": described(move.pairs),
            "prepare_s": move.prepared_at - move.started_at,
            "bytes": max(received),
            "state_s": max(report["state_s"] for report in move.resumed.values()),
            "switched_at": move.switching_at,
            "resumed": {str(rank): report for rank, report in move.resumed.items()},
        }


def described(pairs: list[Pair]) -> list[dict[str, Any]]:
    """Pairs as the timeline shows them."""
    return [{"leaver": pair.leaver, "joiner": pair.joiner, "ranks": sorted(pair.ranks)} for pair in pairs]
