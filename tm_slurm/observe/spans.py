"""Each interruption as spans by node and rank, made from what the coordinator notes.

detect      from the fact (Slurm's own time of a drain, to the second; of a failure the last step that anybody
            had committed before it, so at most that) until the coordinator had heard of it
decide      until it was clear who takes whose ranks: of a drain with no standby free, the wait for one
prepare     the joiner builds its role and its links; in a planned move training goes on meanwhile
switch      links are changed over
transfer    the joiner's state comes in
redo        steps that had been committed before and are done again
resume      the first new step

A span is written when it ends, so a writer that is killed loses only those that were open. `SpanBook` needs
nothing but the notes: a new leader gives it the earlier ones, and goes on.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

Entry = dict[str, Any]

SLURM_MARK_LIMIT_S = 3600.0
"""A drain that is older when it is seen was set before the job began, or by another clock."""

UNPLANNED = frozenset(
    {"process_death", "node_lost", "hang", "broken_links", "unresponsive", "collective_failed"}
)
"""Kinds of interruptions that are failures; the others are named for the event that they follow."""


@dataclass
class _Open:
    """An interruption in work."""

    number: int
    kind: str
    epoch: int
    began: float
    """the instant from which its first phase counts"""
    pairs: list[Entry] = field(default_factory=list)
    lost: dict[int, str] = field(default_factory=dict)
    prepare_at: float | None = None
    switching_at: float | None = None
    warm: dict[tuple[str, int], float] = field(default_factory=dict)
    recovery: bool = False
    over_at: float = 0.0


class SpanBook:
    """`take` each note in order; it returns the spans that end there, as entries of the timeline."""

    def __init__(self) -> None:
        self.count = 0
        self._notices: dict[str, Entry] = {}
        self._causes: dict[str, str] = {}
        self._dead: dict[int, str] = {}
        self._open: _Open | None = None
        self._costs: dict[int, _Open] = {}

    def take(self, note: Entry) -> list[Entry]:
        """One note of the timeline: {at, what, …}. Those of kind "span" only set the count."""
        what = str(note["what"])
        if what == "span":
            self.count = max(self.count, int(note["interruption"]))
            return []
        if what.startswith("event_") and note.get("node"):
            self._notices[note["node"]] = note
            if what == "event_resume":
                del self._notices[note["node"]]
            return []
        handler = getattr(self, f"_take_{what}", None)
        try:
            return handler(note) if handler is not None else []
        except (KeyError, TypeError, ValueError):  # told by another version: no record may end a leader
            return []

    def _begin(self, kind: str, note: Entry, began: float) -> _Open:
        self.count += 1
        self._open = _Open(self.count, kind, int(note["epoch"]), began)
        return self._open

    # ---- planned moves ----

    def _take_prepare(self, note: Entry) -> list[Entry]:
        at = float(note["at"])
        notices = [self._notices[p["leaver"]] for p in note["pairs"] if p["leaver"] in self._notices]
        facts = [began_at(notice) for notice in notices]
        kind = str(notices[0]["what"]).removeprefix("event_") if notices else "move"
        work = self._begin(kind, note, min([at, *facts]))
        work.pairs, work.prepare_at = note["pairs"], at
        spans = []
        for pair in note["pairs"]:
            notice = self._notices.get(pair["leaver"])
            if notice is None:
                continue
            seen = float(notice["at"])
            spans.append(_span(work, "detect", (began_at(notice), seen), (pair["leaver"], None)))
            spans += [_span(work, "decide", (seen, at), (pair["leaver"], rank)) for rank in pair["ranks"]]
        return spans

    def _take_prepared(self, note: Entry) -> list[Entry]:
        work = self._at(note)
        if work is None or work.prepare_at is None:
            return []
        after = note.get("joined_after_s", {})
        ends = {
            rank: work.prepare_at + float(after.get(str(rank), note["seconds"]))
            for pair in work.pairs
            for rank in pair["ranks"]
        }
        return [
            _span(work, "prepare", (work.prepare_at, ends[rank]), (pair["joiner"], rank))
            for pair in work.pairs
            for rank in pair["ranks"]
        ]

    def _take_switching(self, note: Entry) -> list[Entry]:
        work = self._at(note)
        if work is not None:
            work.switching_at = float(note["at"])
        return []

    def _take_moved(self, note: Entry) -> list[Entry]:
        work = self._at(note)
        if work is None:
            return []
        self._is_over(work, note)
        spans = []
        for pair in note["pairs"]:
            for rank in pair["ranks"]:
                told = note.get("resumed", {}).get(str(rank), {})
                began = work.switching_at
                ready = float(note["at"])
                if began is not None and "told_after_s" in told:
                    ready = min(ready, began + float(told["told_after_s"]))
                state_at = ready - float(told.get("state_s", note.get("state_s", 0.0)))
                if began is not None:
                    state_at = max(state_at, began)
                    spans.append(_span(work, "switch", (began, state_at), (pair["joiner"], rank)))
                size = {"bytes": told["bytes"]} if "bytes" in told else {}
                spans.append(_span(work, "transfer", (state_at, ready), (pair["joiner"], rank), **size))
        return spans

    def _take_cancelled(self, note: Entry) -> list[Entry]:
        work = self._at(note)
        if work is None:
            return []
        self._open = None
        end = float(note["at"])
        return [_root(work, end, outcome="cancelled", reason=note["reason"])]

    # ---- failures ----

    def _take_node_lost(self, note: Entry) -> list[Entry]:
        self._causes[note["node"]] = "node_lost"
        return []

    def _take_stuck(self, note: Entry) -> list[Entry]:
        self._causes[""] = "hang"
        return []

    def _take_failed(self, note: Entry) -> list[Entry]:
        node, how = note["node"], str(note["how"])
        hung = self._causes.pop("", None)
        if "log" in note:
            self._causes[node] = "process_death"
        else:
            silent = "broken_links" if how.startswith("links to ") else "unresponsive"
            self._causes.setdefault(node, hung or silent)
        self._dead |= {int(rank): note["node"] for rank in note["ranks"]}
        return []

    def _take_interrupted(self, note: Entry) -> list[Entry]:
        """A failure has ended a move: the recovery that follows is an interruption of its own."""
        work, self._open = self._at(note), None
        if work is None:
            return []
        return [_root(work, float(note["at"]), outcome="failed", reason=note["reason"])]

    def _take_recover(self, note: Entry) -> list[Entry]:
        work = self._open if self._open is not None and self._open.recovery else None
        if work is None:
            causes = [self._causes[node] for node in self._dead.values() if node in self._causes]
            work = self._begin(causes[0] if causes else "collective_failed", note, float(note["at"]))
            work.recovery = True
        work.epoch = int(note["epoch"])
        work.lost |= {int(rank): self._dead.get(int(rank), "") for rank in note["lost"]}
        self._causes, self._dead = {}, {}
        return []

    def _take_warm(self, note: Entry) -> list[Entry]:
        if self._open is not None:
            self._open.warm[note["node"], int(note["rank"])] = float(note["at"])
        return []

    def _take_resolve(self, note: Entry) -> list[Entry]:
        work = self._at(note)
        if work is None:
            return []
        at = float(note["at"])
        seats = work.lost.items() if work.lost else [(None, "")]
        return [_span(work, "decide", (work.began, at), (node, rank)) for rank, node in seats]

    def _take_recovered(self, note: Entry) -> list[Entry]:
        work = self._at(note)
        if work is None:
            return []
        self._is_over(work, note)
        agreed = float(note["agreed_at"])
        spans = []
        for pair in note["pairs"]:
            for rank in pair["ranks"]:
                told = note["resumed"].get(str(rank), {})
                ready = agreed + float(told.get("told_after_s", 0.0))
                state_at = max(agreed, ready - float(told.get("state_s", 0.0)))
                warm_at = work.warm.get((pair["joiner"], rank))
                switch_at = agreed
                if warm_at is not None:
                    spans.append(_span(work, "prepare", (work.began, warm_at), (pair["joiner"], rank)))
                    switch_at = min(max(agreed, warm_at), state_at)
                spans.append(_span(work, "switch", (switch_at, state_at), (pair["joiner"], rank)))
                size = {"bytes": told["bytes"]} if "bytes" in told else {}
                spans.append(_span(work, "transfer", (state_at, ready), (pair["joiner"], rank), **size))
        return spans

    def _take_ended(self, note: Entry) -> list[Entry]:
        work, self._open = self._open, None
        if work is None:
            return []
        return [_root(work, float(note["at"]), outcome="job_ended", reason=note["reason"])]

    # ---- what it cost ----

    def _is_over(self, work: _Open, note: Entry) -> None:
        """All ranks go on; what it cost is known when they have done a step."""
        self._open, self._costs[work.epoch] = None, work
        work.pairs, work.over_at = note["pairs"], float(note["at"])

    def _take_leads(self, note: Entry) -> list[Entry]:
        """Of what was over just before, only the leader before knew the steps that its cost follows from."""
        unknown, self._costs = self._costs, {}
        return [
            _root(work, work.over_at, outcome="recovered" if work.recovery else "moved")
            for work in unknown.values()
        ]

    def _take_downtime(self, note: Entry) -> list[Entry]:
        work = self._costs.pop(int(note["epoch"]), None)
        if work is None:
            return []
        end, spans = float(note["at"]), []
        if work.recovery:
            started = float(note["started_at"])
            last = end - float(note["downtime_s"]) - float(note["steady_step_s"])
            for rank, node in work.lost.items() or [(None, "")]:
                spans.append(_span(work, "detect", (min(last, started), started), (node, rank), at_most=True))
            work.began = min(last, started)
        for told in note.get("went_on", ()):
            going = float(told["from"])
            if told.get("redone_at") is not None:
                spans.append(_span(work, "redo", (going, told["redone_at"]), (told["node"], told["rank"])))
                going = float(told["redone_at"])
            spans.append(_span(work, "resume", (going, told["at"]), (told["node"], told["rank"])))
        outcome = "recovered" if work.recovery else "moved"
        cost = {"downtime_s": note["downtime_s"], "step": note["step"]}
        return [*spans, _root(work, end, outcome=outcome, **cost)]

    def _at(self, note: Entry) -> _Open | None:
        """The interruption in work, if the note is about its epoch."""
        return self._open if self._open is not None and self._open.epoch == note["epoch"] else None


def began_at(notice: Entry) -> float:
    """When what a notice tells of began: Slurm's own time in its id (kind/node/seconds) if that can be, else
    when it was seen. Unix seconds."""
    at = float(notice["at"])
    found = re.fullmatch(r"[a-z_]+/[^/]+/(\d+)(#\d+)?", str(notice.get("id", "")))
    mark = float(found[1]) if found else at
    return mark if 0.0 <= at - mark <= SLURM_MARK_LIMIT_S else at


def _span(
    work: _Open, name: str, time: tuple[float, float], place: tuple[str, int | None], **more: Any
) -> Entry:
    """`time`: begin and end, Unix seconds. `place`: node ("" when no one) and rank."""
    begin, (node, rank) = time[0], place
    end = max(time)  # the clocks of two machines may differ by more than a short phase takes
    about = {"interruption": work.number, "kind": work.kind, "epoch": work.epoch}
    return {"at": end, "name": name, **about, "node": node or None, "rank": rank, "begin": begin, **more}


def _root(work: _Open, end: float, **more: Any) -> Entry:
    """The interruption as a whole."""
    return _span(work, "interruption", (work.began, end), ("", None), pairs=work.pairs, **more)
