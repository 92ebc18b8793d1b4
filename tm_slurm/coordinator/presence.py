"""Who is there: when each agent was last heard, who is to be given up, and whether it is this leader itself
that is cut off. Pure: every method is told the time, in seconds of one clock."""

from __future__ import annotations

SETTLE_S = 0.3
"""How long a new leader lets agents come before their absence is evidence."""


class Presence:
    """`reconnect_s`: an agent that is silent, or away, for longer is lost.

    `sure`: this leader has been thought cut off before, and nobody else has led since: now it believes that
    the others are gone.
    """

    def __init__(self, own_node: str, reconnect_s: float, now: float, *, sure: bool = False) -> None:
        self._own_node = own_node
        self._reconnect_s = reconnect_s
        self._began = now
        self._sure = sure
        self._heard_at: dict[str, float] = {}
        self._away_since: dict[str, float] = {}
        self._awaited: set[str] = set()
        self._ended: set[str] = set()
        self._accused_at: dict[str, float] = {}
        self._somebody_came = False
        self._newest_at = now
        """when the last of those that an earlier leader knew came"""

    def expect(self, node: str, now: float) -> None:
        """An earlier leader knew this agent."""
        self._away_since[node] = now
        self._awaited.add(node)

    def came(self, node: str, now: float) -> None:
        """Its agent has connected."""
        self._away_since.pop(node, None)
        if node in self._awaited:
            self._awaited.discard(node)
            self._newest_at = now
        self._ended.discard(node)
        self._somebody_came |= node != self._own_node
        self.heard(node, now)

    def heard(self, node: str, now: float) -> None:
        """Its agent has said something: it is there, whatever others say."""
        self._heard_at[node] = now
        self._accused_at.pop(node, None)

    def went(self, node: str, now: float) -> None:
        """The connection to its agent was closed; it may come back."""
        self._heard_at.pop(node, None)
        self._away_since[node] = now

    def ended(self, node: str) -> None:
        """Its node says that the agent, which is not connected, is no more."""
        if node in self._away_since:
            self._ended.add(node)

    def forget(self, node: str) -> None:
        """It is lost, or has left for good."""
        for known in (self._heard_at, self._away_since, self._accused_at):
            known.pop(node, None)
        self._awaited.discard(node)
        self._ended.discard(node)

    def accuse(self, node: str, now: float) -> None:
        """A rank elsewhere says that its link to a rank there is broken, or root there that a task has
        ended."""
        self._accused_at[node] = now

    def acquit(self, node: str) -> None:
        """What was said against it has been explained."""
        self._accused_at.pop(node, None)

    def slept(self, seconds: float) -> None:
        """This leader has not got to listen for so long (the machine was starved, the disk slow): what was
        said meanwhile is still to be heard."""
        for known in (self._heard_at, self._away_since, self._accused_at):
            for node in known:
                known[node] += seconds
        self._newest_at += seconds

    def is_fresh(self, node: str, now: float, within_s: float) -> bool:
        """Whether its agent is connected and was heard within the last `within_s` seconds."""
        return node in self._heard_at and now - self._heard_at[node] <= within_s

    def may_return(self, node: str) -> bool:
        """Whether a lost node's agent may still be there: it was not heard to end."""
        return node not in self._away_since or node in self._awaited

    def _since(self, node: str, since: float) -> float:
        """Since when a node's agent is waited for. As long as others come to a new leader, so may it:
        thousands do not get through the door at once."""
        return max(since, self._newest_at) if node in self._awaited else since

    def lost(self, now: float) -> dict[str, str]:
        """node → why it is to be given up now."""
        reasons = {}
        for node, since in self._away_since.items():
            accused_at = self._accused_at.get(node)
            if node in self._ended:
                reasons[node] = "its agent has ended: nothing listens there any more"
            elif accused_at is not None and now - accused_at <= self._reconnect_s:
                if now - self._began >= SETTLE_S:
                    reasons[node] = "its agent is not connected, and its ranks are said to be lost"
            elif now - self._since(node, since) > self._reconnect_s:
                awaited = node in self._awaited
                reasons[node] = (
                    "its agent has not come to the new leader"
                    if awaited
                    else "its agent closed the connection"
                )
        for node, heard_at in self._heard_at.items():
            if now - heard_at > self._reconnect_s:
                reasons[node] = "its agent has fallen silent"
        return reasons

    def is_cut_off(self, now: float) -> bool:
        """Whether more than half of the other agents have fallen silent together, or none has come at all:
        then it is likelier that this leader's own node has lost its network. Whoever closed a connection was
        heard in that moment."""
        if self._sure:
            return False
        away = {node: since for node, since in self._away_since.items() if node not in self._awaited}
        last = {node: at for node, at in {**away, **self._heard_at}.items() if node != self._own_node}
        if any(now - self._heard_at[node] > self._reconnect_s for node in last if node in self._heard_at):
            heard = sum(now - at <= self._reconnect_s / 2 for at in last.values())
            return 2 * heard < len(last)
        overdue = any(
            now - self._away_since[node] > self._reconnect_s for node in self._awaited - {self._own_node}
        )
        return overdue and not self._somebody_came
