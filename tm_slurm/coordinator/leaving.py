"""What becomes of a node without ranks: back to the administrator, back to the pool, or kept because Slurm
cannot take it."""

from __future__ import annotations

from tm_slurm.coordinator.actions import Release, Resign
from tm_slurm.coordinator.deciding import Deciding, Input
from tm_slurm.coordinator.model import JobState, Node


class Leaving(Deciding):
    """`leader_node` is where the leader itself runs: it can only be given back after it has handed over."""

    def __init__(self, state: JobState, leader_node: str) -> None:
        super().__init__(state)
        self.leader_node = leader_node

    def _spare_before_start(self, missing: Node) -> Node | None:
        """Who could take the seats of a node before training begins: nothing has to be moved. A standby that
        has not come yet may still come."""
        spare = [n for n in self.state.nodes.special() if n.standing == "standby" and n.notice is None]
        return min((n for n in spare if n is not missing), key=lambda n: (n.batch_host, n.name), default=None)

    def _substitute(self, missing: Node, spare: Node) -> None:
        for rank, slot in self.state.ranks_on(missing.name).items():
            self.state.seats[rank] = (spare.name, slot)
        missing.standing, spare.standing = "standby", "expected"
        self._note("substituted", node=missing.name, by=spare.name)

    def _standby_leaves(self, node: Node) -> None:
        node.standing = "leaving"
        self._joiner_gone(node.name, f"standby {node.name} is leaving")
        self._note("standby_leaves", node=node.name)
        self._leave(node)

    def _lost(self, node: Node) -> None:
        """Its agent is gone and no rank is on it. If it was to be given back, that needs no agent; else it
        may come back for a while."""
        node.standing, node.lost_at = "lost", self.now
        if node.notice is not None and node.notice.gives_back and not node.batch_host:
            self.actions.append(Release(node.name))

    def _on_lost_for_good(self, given: Input) -> None:
        """A lost node has not come back. It is cut out of the job before it can be up again: a node that was
        off and reports without the job's step would make Slurm end the step on all nodes."""
        node = self.state.nodes[given["node"]]
        if node.standing == "lost" and node.lost_at is not None:
            node.lost_at = None
            self.actions.append(Release(node.name))

    def _joiner_gone(self, name: str, reason: str) -> None:
        """A node that was to take ranks cannot; decided by those who plan such things."""

    def _leave(self, node: Node) -> None:
        if node.processes:
            for slot in node.processes:
                self._tell(node.name, slot, {"kind": "retire"})
        else:
            self._emptied(node)

    def _emptied(self, node: Node) -> None:
        """The last rank process of a leaving node has ended: back to the administrator, or back to the
        pool."""
        if self.state.finishing:
            return
        if node.notice is None or not node.notice.gives_back:
            node.notice, node.standing = None, "standby"
            self._tell(node.name, None, {"kind": "spawn"})
        elif node.batch_host:
            self._keep(node, "it is the batch host, which Slurm cannot take out of a running job")
        elif not self.state.plan.release:
            self._keep(node, "the config says policy.release: false")
        elif node.name == self.leader_node:
            successor = self._successor()
            if successor is None:
                self._keep(node, "the coordinator runs here and no other agent is connected")
            else:
                self._note("resigned", to=successor)
                self.actions.append(Resign(successor))
        else:
            self._tell(node.name, None, {"kind": "retire"})

    def _successor(self) -> str | None:
        there = [n for n in self.state.nodes.values() if n.agent_up and not n.away]
        candidates = [n for n in there if n.name != self.leader_node]
        candidates = [
            n for n in candidates if n.notice is None and n.standing in ("active", "standby", "kept")
        ]
        candidates.sort(key=lambda n: (not n.batch_host, n.standing != "standby", n.name))
        return candidates[0].name if candidates else None

    def _keep(self, node: Node, why: str) -> None:
        node.standing, node.kept_because = "kept", why
        self._note("kept", node=node.name, why=why)
