"""Events that root's programs on a node sign with the job's secret: the SPANK plugin, prolog, epilog, trigger
and health programs, all by `tm-notify` (spank/notify/message.c makes what is read here).

One frame, `{"kind": "signed_event", "payload": TEXT, "mac": HEX}`: the payload is a JSON object as text, the
mac is HMAC-SHA-256 over LABEL and that text with the job's secret. The payload names the leader's term, so it
is of no use to another leader; its nonce counts once; and it is believed for WINDOW_S around its own time.
"""

from __future__ import annotations

import hmac
import json
import math
from collections import Counter, deque
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any, Literal, get_args

from tm_slurm.events.event import Event, EventError
from tm_slurm.events.identity import Episodes, Seen

LABEL = b"tm_slurm event 1\0"
WINDOW_S = 300.0
"""How far the clocks of two nodes may be apart: as much as munge allows them."""

REASON_MAX = 400
_NAME_MAX = 255

Why = Literal["unsigned", "malformed", "forged", "stale", "replayed", "foreign", "unwanted"]
"""unsigned: no mac; malformed: not what a payload is; forged: the mac is not by this job's secret (another
user's, say); stale: of another leader's term, or from another time; replayed: the nonce was used before;
foreign: about another job, or a node that is none of this job; unwanted: the job is to hear of none
(policy.signed_events)."""

REFUSALS: tuple[Why, ...] = get_args(Why)

LASTING_KINDS = frozenset({"drain", "fail", "down", "reboot", "unhealthy"})
"""Facts that hold until they end: every report in between is of the same one."""

SINGLE_KINDS = frozenset({"task_exit", "step_end", "node_join", "node_leave", "node_stop"})
"""Facts of one moment, told apart by what the payload calls `fact` and by the start of the job."""

UNHEALTHY_AGAIN_S = 600.0
"""Nobody says that a node is well again: a failed check is the same fact for so long."""

SIGNED_SOURCES = frozenset({"spank", "prolog", "epilog", "strigger", "health"})

Message = dict[str, Any]


class EventRefused(ValueError):
    """A frame that is no event for this job; `why` is what it is counted as."""

    def __init__(self, why: Why, problem: str) -> None:
        super().__init__(f"{why}: {problem}")
        self.why = why


@dataclass(frozen=True)
class _Payload:
    job: int
    restart: int
    term: int
    at: float
    nonce: str
    node: str
    kind: str
    source: str
    fact: str
    reason: str

    @classmethod
    def read(cls, text: str) -> _Payload:
        """EventRefused when something is missing, or of the wrong type."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise EventRefused("malformed", f"the payload is no JSON: {error}") from None
        if not isinstance(found, dict) or found.get("v") != 1:
            raise EventRefused("malformed", "the payload is of another version: build tm-notify again")
        for name in ("job", "restart", "term"):
            if type(found.get(name)) is not int or not 0 <= found[name] < 2**63:
                raise EventRefused("malformed", f"expected a number in {name!r}, found {found.get(name)!r}")
        if type(found.get("at")) not in (int, float) or not math.isfinite(found["at"]):
            raise EventRefused("malformed", f"expected Unix seconds in 'at', found {found.get('at')!r}")
        for name in ("nonce", "node", "kind", "source", "fact", "reason"):
            limit = REASON_MAX if name == "reason" else _NAME_MAX
            if not isinstance(found.get(name), str) or len(found[name]) > limit:
                raise EventRefused("malformed", f"expected text in {name!r}, found {found.get(name)!r:.80}")
        return cls(**{name: found[name] for name in cls.__dataclass_fields__})


class SignedEvents:
    """Takes frames, gives each distinct fact once. `counts` says how many frames came of it: `accepted`,
    `duplicate`, or refused, by reason.

    `episodes` is shared with the poll of node states, `nodes` holds the names of the job's nodes, `handled`
    the events that earlier leaders have handled, `job_of` the standby job of a node that came with one. Pure:
    every method is told the time, Unix seconds."""

    def __init__(
        self,
        secret: bytes,
        *,
        job_id: int | None,
        term: int,
        nodes: Container[str],
        episodes: Episodes,
        handled: list[Event],
        job_of: Callable[[str], int | None] = lambda node: None,
        wanted: bool = True,
    ) -> None:
        self._wanted = wanted
        self._secret = secret
        self._job_id = job_id
        self._job_of = job_of
        self._term = term
        self._nodes = nodes
        self._episodes = episodes
        self._seen = Seen()
        for event in handled:
            self._seen.first_time(event)
        self._unhealthy_at: dict[str, float] = {}
        self._nonces: set[str] = set()
        self._nonces_in_order: deque[tuple[float, str]] = deque()
        self.counts: Counter[str] = Counter(dict.fromkeys(("accepted", "duplicate", *REFUSALS), 0))

    def take(self, frame: Message, now: float) -> Event | None:
        """The event of a frame, or None when the fact is known already. EventRefused otherwise: then nothing
        has changed but the count."""
        try:
            event = self._take(frame, now)
        except EventRefused as refused:
            self.counts[refused.why] += 1
            raise
        self.counts["duplicate" if event is None else "accepted"] += 1
        return event

    def _take(self, frame: Message, now: float) -> Event | None:
        payload = _Payload.read(self._proved(frame))
        if not self._wanted:
            raise EventRefused("unwanted", "the job is to hear of none: policy.signed_events")
        if payload.node not in self._nodes or payload.job != self._expected_job(payload.node):
            raise EventRefused("foreign", f"job {payload.job} node {payload.node} is not of this job")
        if payload.term != self._term:
            raise EventRefused("stale", f"meant for term {payload.term}, this is {self._term}")
        if abs(payload.at - now) > WINDOW_S:
            raise EventRefused(
                "stale", f"the clock of {payload.node} is {payload.at - now:+.0f} s from this one: set them"
            )
        if payload.source not in SIGNED_SOURCES:
            raise EventRefused("malformed", f"expected a source that signs, found {payload.source!r:.80}")
        if payload.kind not in LASTING_KINDS | SINGLE_KINDS:
            raise EventRefused("malformed", f"expected a kind that is signed, found {payload.kind!r:.80}")
        self._use(payload.nonce, now)
        return self._distinct(payload, now)

    def _expected_job(self, node: str) -> int:
        brought_by = self._job_of(node)
        return brought_by if brought_by is not None else self._job_id or 0

    def _proved(self, frame: Message) -> str:
        """The payload's text, once its mac has been found right."""
        text, mac = frame.get("payload"), frame.get("mac")
        if mac is None:
            raise EventRefused("unsigned", "there is no mac")
        if not isinstance(text, str) or not isinstance(mac, str):
            raise EventRefused("malformed", "expected text in 'payload' and 'mac'")
        signed = LABEL + text.encode(errors="surrogatepass")
        expected = hmac.new(self._secret, signed, "sha256").hexdigest()
        if not hmac.compare_digest(expected.encode(), mac.encode(errors="surrogatepass")):
            raise EventRefused("forged", "it is not signed with this job's secret")
        return text

    def _use(self, nonce: str, now: float) -> None:
        """A nonce counts once. Those of frames that are too old by now need not be known any more."""
        while self._nonces_in_order and now - self._nonces_in_order[0][0] > 2 * WINDOW_S:
            self._nonces.discard(self._nonces_in_order.popleft()[1])
        if nonce in self._nonces:
            raise EventRefused("replayed", "this frame has come before")
        self._nonces.add(nonce)
        self._nonces_in_order.append((now, nonce))

    def _distinct(self, payload: _Payload, now: float) -> Event | None:
        """The event, unless its fact is known: from whatever source."""
        kind: Any = payload.kind
        if kind in LASTING_KINDS:
            if kind == "unhealthy" and now - self._unhealthy_at.get(payload.node, now) > UNHEALTHY_AGAIN_S:
                self._episodes.end(kind, payload.node)
            if kind in self._episodes.holding(payload.node):
                return None
            if kind == "unhealthy":
                self._unhealthy_at[payload.node] = now
            identity = self._episodes.begin(kind, payload.node, payload.at)
        else:
            start = payload.restart if self._job_of(payload.node) is None else f"{payload.job}"
            identity = f"{kind}/{payload.node}/{start}/{payload.fact}"
        told = {"id": identity, "kind": kind, "node": payload.node, "source": payload.source}
        try:
            event = Event.from_json({**told, "reason": payload.reason, "at": payload.at})
        except EventError as error:
            raise EventRefused("malformed", str(error)) from None
        return event if self._seen.first_time(event) else None


def signed_frame(secret: bytes, payload: Message) -> Message:
    """What `tm-notify` sends for a payload."""
    text = json.dumps(payload, separators=(",", ":"))
    return {
        "kind": "signed_event",
        "payload": text,
        "mac": hmac.new(secret, LABEL + text.encode(), "sha256").hexdigest(),
    }
