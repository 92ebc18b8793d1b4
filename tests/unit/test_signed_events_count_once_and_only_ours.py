"""Events that root signs: a fact is taken once, whoever tells it, and what is not this job's changes
nothing."""

from __future__ import annotations

import asyncio
import hmac
import itertools
import json
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_the_leader_over_loopback import LIMITS, SECRET, agent, ask, lead, ready, told

from tm_slurm.control.frames import decode, encode
from tm_slurm.coordinator.election import LeaderFile
from tm_slurm.coordinator.leader import Leader
from tm_slurm.events import Episodes, Event, NodeWatch
from tm_slurm.events.signed import REFUSALS, WINDOW_S, EventRefused, SignedEvents, signed_frame
from tm_slurm.observe.follow import JobFiles

NOW = 1_800_000_000.0
JOB, TERM = 7, 3


NONCES = itertools.count()


def payload(**changed: Any) -> dict[str, Any]:
    """What tm-notify signs, with a nonce of its own."""
    usual = {"v": 1, "job": JOB, "restart": 0, "term": TERM, "at": NOW, "node": "n1", "kind": "task_exit"}
    told = {"source": "spank", "fact": "0.1", "reason": "killed", "nonce": f"{next(NONCES):032x}"}
    return {**usual, **told, **changed}


def judge(episodes: Episodes | None = None, handled: list[Event] | None = None) -> SignedEvents:
    return SignedEvents(
        SECRET,
        job_id=JOB,
        term=TERM,
        nodes={"n1", "n2"},
        episodes=episodes or Episodes(),
        handled=handled or [],
    )


def signed(**changed: Any) -> dict[str, Any]:
    return signed_frame(SECRET, payload(**changed))


def refusal(events: SignedEvents, frame: dict[str, Any], now: float = NOW) -> str:
    with pytest.raises(EventRefused) as refused:
        events.take(frame, now)
    return refused.value.why


def test_a_fact_is_one_event_whichever_sources_tell_it() -> None:
    events = judge()
    first = events.take(signed(), NOW)
    assert first is not None and first.id == "task_exit/n1/0/0.1"
    assert events.take(signed(source="epilog"), NOW) is None
    assert events.take(signed(fact="0.2"), NOW) is not None
    assert events.take(signed(restart=1), NOW) is not None, "the next start of the job has tasks of its own"
    assert events.take(signed(node="n2"), NOW) is not None
    assert events.counts == Counter(accepted=4, duplicate=1, **dict.fromkeys(REFUSALS, 0))


def test_a_trigger_and_the_poll_agree_on_a_fact() -> None:
    from test_events_come_from_node_states import node

    watch = NodeWatch(Episodes())
    events = judge(watch.episodes)
    trigger = signed(kind="down", source="strigger", fact="")
    assert len(watch.observe(node("DOWN", name="n1"), NOW)) == 1
    assert events.take(trigger, NOW) is None, "the poll was first"
    down = node("DOWN", name="n2")
    assert events.take(signed(kind="down", source="strigger", fact="", node="n2"), NOW) is not None
    assert watch.observe(down, NOW) == [], "the trigger was first"


def test_a_later_leader_knows_what_an_earlier_one_has_handled() -> None:
    told = judge().take(signed(), NOW)
    assert told is not None
    assert judge(handled=[told]).take(signed(), NOW) is None


def test_a_failed_check_is_told_again_after_a_while() -> None:
    events = judge()
    unwell = {"kind": "unhealthy", "source": "health", "fact": ""}
    assert events.take(signed(**unwell), NOW) is not None
    assert events.take(signed(**unwell, at=NOW + 60), NOW + 60) is None
    assert events.take(signed(**unwell, at=NOW + 700), NOW + 700) is not None


def test_a_replayed_frame_counts_for_nothing() -> None:
    events = judge()
    frame = signed(kind="down", source="strigger")
    assert events.take(frame, NOW) is not None
    for later in (0.0, 1.0, WINDOW_S - 1, WINDOW_S + 1, 10 * WINDOW_S):
        assert refusal(events, frame, NOW + later) in ("replayed", "stale")
    assert events.counts["accepted"] == 1


@pytest.mark.parametrize("late", [-WINDOW_S - 1, WINDOW_S + 1])
def test_a_frame_of_another_time_is_stale(late: float) -> None:
    assert refusal(judge(), signed(at=NOW + late)) == "stale"


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"term": TERM - 1}, "stale"),
        ({"job": JOB + 1}, "foreign"),
        ({"node": "n9"}, "foreign"),
        ({"kind": "resume"}, "malformed"),
        ({"kind": "request"}, "malformed"),
        ({"source": "user"}, "malformed"),
        ({"v": 2}, "malformed"),
        ({"at": float("nan")}, "malformed"),
        ({"at": "now"}, "malformed"),
        ({"job": True}, "malformed"),
        ({"term": -1}, "malformed"),
        ({"nonce": 5}, "malformed"),
        ({"node": "n" * 300}, "malformed"),
        ({"reason": None}, "malformed"),
    ],
)
def test_what_is_signed_and_says_something_else_is_refused(changed: dict[str, Any], why: str) -> None:
    events = judge()
    assert refusal(events, signed(**changed)) == why
    assert events.counts[why] == 1 and events.counts["accepted"] == 0


def test_what_is_not_signed_with_the_jobs_secret_is_refused() -> None:
    events = judge()
    good = signed()
    assert refusal(events, signed_frame(b"x" * 32, payload())) == "forged"
    assert refusal(events, {**good, "mac": good["mac"][:-1]}) == "forged"
    assert refusal(events, {**good, "mac": "\ud800é"}) == "forged"
    assert refusal(events, {**good, "payload": good["payload"].replace("killed", "Killed")}) == "forged"
    assert refusal(events, {"kind": "signed_event", "payload": good["payload"]}) == "unsigned"
    assert refusal(events, {"kind": "event", "event": {}}) == "unsigned"
    assert refusal(events, {**good, "payload": 5}) == "malformed"
    for text in ("", "{", "[]", "[" * 100_000):
        mac = hmac.new(SECRET, b"tm_slurm event 1\0" + text.encode(), "sha256").hexdigest()
        assert refusal(events, {"payload": text, "mac": mac}) == "malformed"
    assert events.take(good, NOW) is not None, "nothing of it has changed anything"


def test_a_job_that_wants_no_events_takes_none() -> None:
    unwanting = SignedEvents(
        SECRET, job_id=JOB, term=TERM, nodes={"n1"}, episodes=Episodes(), handled=[], wanted=False
    )
    assert refusal(unwanting, signed()) == "unwanted"
    assert refusal(unwanting, signed_frame(b"x" * 32, payload())) == "forged"
    assert unwanting.counts == Counter(unwanted=1, forged=1)


async def send(port: int, *frames: bytes) -> list[dict[str, Any]]:
    """Send frames over one connection; the answers."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answers = []
    for frame in frames:
        writer.write(frame)
        size = int.from_bytes(await asyncio.wait_for(reader.readexactly(4), 5.0), "big")
        answers.append(decode(await reader.readexactly(size)))
    writer.close()
    return answers


def with_leader(job_dir: Path, act: Callable[[LeaderFile, Leader], Any]) -> Leader:
    async def wait_and_act(leader: Leader) -> None:
        known = LeaderFile.read(job_dir)
        while known is None or not known.port:
            await asyncio.sleep(0.005)
            known = LeaderFile.read(job_dir)
        await act(known, leader)

    return lead(job_dir, wait_and_act)


def test_the_leader_takes_signed_events_and_counts_the_others(tmp_path: Path) -> None:
    async def act(known: LeaderFile, leader: Leader) -> None:
        told = {"job": 0, "term": known.term, "at": time.time()}
        good = encode(signed(**told, kind="node_join", fact=""))
        forged = encode(signed_frame(b"x" * 32, payload(**told, kind="drain", fact="")))
        answers = await send(known.port, forged, good, good, encode({"kind": "event", "event": {}}))
        assert answers == [
            {"refused": "forged"},
            {"ok": True},
            {"refused": "replayed"},
            {"refused": "unsigned"},
        ]
        status = await ask(tmp_path, {"kind": "status"})
        said = {what: count for what, count in status["signed_events"].items() if count}
        assert said == {"accepted": 1, "forged": 1, "replayed": 1, "unsigned": 1}
        assert all(node["notice"] is None for node in status["nodes"])

    with_leader(tmp_path, act)
    timeline = [json.loads(line) for line in (tmp_path / "timeline.jsonl").read_text().splitlines()]
    assert [line["what"] for line in timeline if line["what"].startswith("event_")] == ["event_node_join"]


def test_an_ended_task_is_evidence_against_a_node_whose_agent_is_away(tmp_path: Path) -> None:
    """Then its node need not be given time to come back: within a tick, not after `reconnect_s`."""

    async def act(leader: Leader) -> None:
        witness, lost, _ = [await agent(tmp_path, node) for node in ("n1", "n2", "n3")]
        for incarnation, channel in enumerate((witness, lost)):
            channel.send(ready(incarnation))
        await told(witness, "assign")
        known = LeaderFile.read(tmp_path)
        assert known is not None
        ended = {"job": 0, "term": known.term, "at": time.time(), "node": "n2"}
        assert await send(known.port, encode(signed(**ended))) == [{"ok": True}]
        await asyncio.sleep(2 * LIMITS.reconnect_s)
        assert leader.state.nodes["n2"].standing == "active"  # alone it is no evidence
        lost.abort()
        assert await send(known.port, encode(signed(**ended, fact="0.2"))) == [{"ok": True}]
        await told(witness, "interrupt")

    lead(tmp_path, act, nodes=3)
    (entry,) = JobFiles(tmp_path).notes("node_lost")
    assert (entry["node"], entry["reason"]) == (
        "n2",
        "its agent is not connected, and its ranks are said to be lost",
    )


def test_a_thousand_events_at_once_lose_no_distinct_fact(tmp_path: Path) -> None:
    async def act(known: LeaderFile, leader: Leader) -> None:
        told = {"job": 0, "term": known.term, "at": time.time()}
        frames = [encode(signed(**told, fact=f"0.{number // 2}")) for number in range(1000)]
        await asyncio.gather(*(send(known.port, *frames[start::50]) for start in range(50)))
        assert leader.status()["signed_events"]["accepted"] == 500
        assert leader.status()["signed_events"]["duplicate"] == 500

    with_leader(tmp_path, act)
    ids = {json.loads(line).get("id") for line in (tmp_path / "timeline.jsonl").read_text().splitlines()}
    assert {f"task_exit/n1/0/0.{number}" for number in range(500)} <= ids


def test_policies_that_the_plugin_lets_pass_are_those_of_the_configuration() -> None:
    from tm_slurm.config.model import NO_STANDBY_CHOICES

    root = Path(__file__).parents[2]
    rule = subprocess.run(
        ["make", "-s", "-C", str(root / "spank"), "policies"],
        capture_output=True,
        text=True,
        check=True,
        timeout=20,
    )
    assert tuple(rule.stdout.split()) == NO_STANDBY_CHOICES
