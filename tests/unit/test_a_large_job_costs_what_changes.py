"""In a job of thousands of nodes an input costs what it is about: nodes and seats are found without looking
at all of them, a move tells those that it touches, and tables that everybody needs are written once."""

from __future__ import annotations

import gc
import json
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from decisions_world import World

from tm_slurm.config.model import PolicyConfig
from tm_slurm.coordinator import long_lived
from tm_slurm.coordinator.actions import Tell
from tm_slurm.coordinator.agents import Agents
from tm_slurm.coordinator.election import Candidate, LeaderWatch
from tm_slurm.coordinator.journal import Journal, create, replay
from tm_slurm.coordinator.model import Node, Notice
from tm_slurm.coordinator.news import KEPT, News
from tm_slurm.coordinator.peer_tables import CHANGES_FROM, KEPT_FILES, PeerTables, as_sent
from tm_slurm.coordinator.presence import Presence
from tm_slurm.coordinator.roster import SHARED_FROM, Nodes, PeerTable, Seats
from tm_slurm.coordinator.slurm_side import pause_s
from tm_slurm.observe.record import ALL_LOOKED_AT, LEAST_STEPS, Record


def messages_of_a_drain(nodes: int) -> list[Tell]:
    """What a drain of a linked rank's node leads to, but for what concerns snapshots."""
    world = World(nodes=nodes, active=nodes - 2)
    world.start()
    before = len(world.actions)
    world.event("drain", f"n{nodes // 2}")
    assert world.state.moves_done == 1
    return [action for action in world.actions[before:] if isinstance(action, Tell)]


def test_a_move_tells_no_more_nodes_in_a_larger_job() -> None:
    few, many = messages_of_a_drain(8), messages_of_a_drain(200)
    assert sorted(tell.message["kind"] for tell in few) == sorted(tell.message["kind"] for tell in many)


def test_failures_make_no_new_table_of_peers() -> None:
    """The one that was written at the start serves, with those that have changed."""
    world = World(nodes=12, active=8, ranks_per_node=2)
    world.key_of = lambda rank: f"shard {rank % 4}"
    world.start()
    base = world.state.first_peers
    for node in ("n3", "n4"):
        world.give({"kind": "node_lost", "node": node, "reason": "test"})
    world.event("drain", "n5")
    told = [tell.message["peers"] for tell in world.told("replace") + world.told("join")]
    assert len(told) >= 6 and world.state.recoveries_done >= 2
    assert all(isinstance(table, PeerTable) and table.base is base for table in told)
    last = {str(rank): world.state.process(rank).peer() for rank in world.state.seats}
    assert world.state.peers() == told[-1] == last and world.state.peers() is world.state.peers()


def test_survivors_of_a_lost_rank_hear_of_that_rank_alone() -> None:
    world = World(nodes=6, active=4)
    world.start()
    world.dies("n3")
    assert [tell.message for tell in world.told("resolve")]
    assert all(
        "peers" not in tell.message and len(tell.message["changes"]) == 1 for tell in world.told("resolve")
    )


def test_seats_know_who_is_on_a_node() -> None:
    """Against looking at all of them, for any history."""
    chance = random.Random(7)
    seats = Seats({rank: (f"n{rank // 2}", rank % 2) for rank in range(8)}, own_slots=2)
    for _ in range(300):
        rank = chance.randrange(8)
        if rank in seats and chance.random() < 0.3:
            seats.take_out(rank)
        else:
            seats[rank] = (f"n{chance.randrange(5)}", chance.randrange(4))
        for node in (f"n{number}" for number in range(5)):
            assert seats.on(node) == {r: slot for r, (name, slot) in sorted(seats.items()) if name == node}
        assert set(seats.hosts()) == {name for name, slot in seats.values() if slot >= 2}


def test_nodes_know_who_is_special_and_what_has_changed() -> None:
    nodes = Nodes({name: Node(name, False, "active") for name in ("n1", "n2", "n3")})
    assert nodes.special() == [] and nodes.touched == {"n1", "n2", "n3"}
    nodes.touched.clear()
    nodes["n3"].notice = Notice("id", "drain", "disk", 0.0, "poll", True)
    nodes["n1"].standing = "standby"
    nodes["n2"].failures = 1
    assert [node.name for node in nodes.special()] == ["n1", "n3"] and nodes.touched == {"n1", "n3"}
    nodes["n3"].standing = "released"
    nodes["n1"] = Node("n1", False, "active")
    assert nodes.special() == [] and nodes.ring == ["n1", "n2", "n3"]


@pytest.mark.parametrize("seed", range(6))
def test_duties_of_those_concerned_are_the_duties_of_all(seed: int) -> None:
    """Whatever happens: who was not looked at would have been told what it was told before."""
    chance = random.Random(seed)
    world = World(nodes=9, active=5, ranks_per_node=2)
    world.key_of = lambda rank: f"shard {rank % 3}"
    for number in range(1, 10):
        world.give({"kind": "node_joined", "node": f"n{number}"})
        world.give({"kind": "vault", "node": f"n{number}", "host": f"n{number}", "port": 5})
        world.spawn(f"n{number}")
    for _ in range(12):
        node = f"n{chance.randrange(1, 10)}"
        what = chance.choice(["drain", "resume", "lost", "dies", "vault"])
        if what == "vault":
            world.give({"kind": "vault", "node": node, "host": node, "port": chance.randrange(9)})
        elif what == "lost":
            world.give({"kind": "node_lost", "node": node, "reason": "test"})
        elif what == "dies" and world.state.nodes[node].processes:
            world.dies(node)
        else:
            world.event("drain" if what == "drain" else "resume", node)
        if world.state.ended:
            break
        world.decisions._assign_duties()  # since a notice alone assigns none
        told = dict(world.state.duties)
        world.state.duties_from_anew = True
        world.decisions._assign_duties()
        assert world.state.duties == told


def test_an_agent_hears_all_news_that_came_while_it_was_away() -> None:
    news = News()
    for number in range(3):
        news.add({"number": number})
    assert news.count == 3 and news.after(3) == []
    assert news.after(1) == [(2, {"number": 1}), (3, {"number": 2})]
    for number in range(KEPT):
        news.add({"number": number})
    assert [number for number, _ in news.after(0)] == list(range(4, KEPT + 4))


def test_a_large_table_of_peers_is_written_once(tmp_path: Path) -> None:
    base = {str(rank): ["h", rank, rank] for rank in range(SHARED_FROM)}
    tables = PeerTables(tmp_path, attempt=0, term=3)
    orders: list[dict[str, Any]] = [
        {"kind": "assign", "peers": PeerTable(base, {})},
        {"kind": "join", "peers": PeerTable(base, {"7": ["other", 1, 2]})},
    ]
    sent = [json.loads(json.dumps(tables.to_send(order))) for order in orders]
    assert len(list(tmp_path.iterdir())) == 1 and len(json.dumps(sent)) < 300
    assert [as_sent(order, tmp_path) for order in sent] == orders
    small = {"kind": "assign", "peers": PeerTable({"0": ["h", 1, 1]}, {})}
    assert tables.to_send(small) is small and as_sent(small, tmp_path) is small


def test_many_changes_are_written_once_for_all_survivors(tmp_path: Path) -> None:
    """And the files of failures that are long over are not kept."""
    tables = PeerTables(tmp_path, attempt=0, term=3)
    for failure in range(2 * KEPT_FILES):
        changes = {str(rank): ["h", rank, failure] for rank in range(CHANGES_FROM)}
        order = {"kind": "resolve", "changes": changes, "serve": []}
        sent = [tables.to_send({**order, "serve": [rank]}) for rank in range(3)]
        assert len(json.dumps(sent)) < 400
        assert [as_sent(each, tmp_path) for each in sent] == [{**order, "serve": [rank]} for rank in range(3)]
    for _ in range(2 * KEPT_FILES):  # the same again, put together anew for each who comes back
        tables.to_send({"kind": "changed", "changes": json.loads(json.dumps(changes))})
    assert as_sent(sent[0], tmp_path) == {**order, "serve": [0]}
    assert len(list(tmp_path.iterdir())) == KEPT_FILES
    few = {"kind": "resolve", "changes": {"7": ["h", 1, 2]}}
    assert tables.to_send(few) is few and as_sent(few, tmp_path) is few


def test_what_comes_in_one_moment_is_written_together(tmp_path: Path) -> None:
    assert create(tmp_path, 0, 1)
    journal = Journal(tmp_path, 0, 1, {})
    journal.append({"kind": "a"}, {"kind": "b"})
    journal.append({"kind": "c"})
    journal.close()
    assert [given["kind"] for given in replay(tmp_path, 0)] == ["a", "b", "c"]


def test_a_new_leader_waits_as_long_as_agents_come() -> None:
    presence = Presence("n1", reconnect_s=2.0, now=0.0)
    for number in range(1, 6):
        presence.expect(f"n{number}", 0.0)
    for number in range(1, 5):
        assert not {"n4", "n5"} & set(presence.lost(1.9 * number))
        presence.came(f"n{number}", 1.9 * number)
    assert "n5" not in presence.lost(9.5)
    assert "has not come" in presence.lost(9.7)["n5"]


def test_the_last_interruption_of_a_large_job_has_its_downtime(tmp_path: Path) -> None:
    """Though it is not looked for with every heartbeat there."""
    size = ALL_LOOKED_AT + 1
    record = Record(tmp_path, size)
    for step in range(12):
        for rank in range(size):
            record.beat(
                "n1", {"rank": rank, "epoch": 0, "step": step, "steps": [[step, float(step), 1.0, None]]}
            )
        if step == 10:
            record.moved({"step": 11, "pairs": [], "seconds": 1.0})
    record._beats += 1  # so that it is not the last one's turn
    record.close()
    lines = [json.loads(line) for line in next(tmp_path.glob("timeline*.jsonl")).read_text().splitlines()]
    assert [line["downtime_s"] for line in lines if line.get("what") == "downtime"] == [0.0]


def test_the_moves_of_a_rack_are_accounted_for_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them by itself held a leader of 16,384 nodes up for longer than its move took."""
    size, counted = ALL_LOOKED_AT + 1, []
    committed = Record._committed

    def noted(self: Record, step: int, *, after: float) -> dict[int, float] | None:
        counted.append((step, after))
        return committed(self, step, after=after)

    monkeypatch.setattr(Record, "_committed", noted)
    record = Record(tmp_path, size)
    for step in range(13):
        for rank in range(size):
            record.beat(
                "n1", {"rank": rank, "epoch": 0, "step": step, "steps": [[step, float(step), 1.0, None]]}
            )
        for number in range(64 if step == 10 else 0):
            record.moved({"step": 11, "pairs": [], "seconds": 1.0, "epoch": number})
    record.close()
    assert counted == [(11, 0.0)]
    lines = [json.loads(line) for line in next(tmp_path.glob("timeline*.jsonl")).read_text().splitlines()]
    assert [line["epoch"] for line in lines if line.get("what") == "downtime"] == list(range(64))


@pytest.mark.parametrize(("nodes", "seconds"), [(4, 0.5), (5000, 0.5), (6000, 0.6), (16384, 0.8)])
def test_heartbeats_leave_the_leader_of_a_large_job_time(nodes: int, seconds: float) -> None:
    assert PolicyConfig().heartbeat_of(nodes) == pytest.approx(seconds)
    assert PolicyConfig(heartbeat_s=1.5).heartbeat_of(nodes) == 1.5
    patient = PolicyConfig(keepalive_s=60.0, lease_s=60.0)
    assert patient.heartbeat_of(nodes) == pytest.approx(max(0.5, nodes / 10_000))
    assert PolicyConfig(keepalive_s=60.0).heartbeat_of(nodes) <= 0.8, "the lease is kept up by them, too"
    assert PolicyConfig(lease_s=0.7).heartbeat_of(nodes) == 0.5


def test_what_stays_for_long_is_searched_for_garbage_once(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = gc.get_freeze_count()
    monkeypatch.setattr(long_lived, "LONG_S", -1.0)
    with long_lived.left_out():
        gc.collect(0)
        assert gc.get_freeze_count() == frozen
        gc.collect()
        assert gc.get_freeze_count() > frozen
    assert gc.get_freeze_count() == 0
    monkeypatch.setattr(long_lived, "LONG_S", 60.0)
    with long_lived.left_out():
        gc.collect()
        assert gc.get_freeze_count() == 0
    assert not [callback for callback in gc.callbacks if callback.__module__ == long_lived.__name__]


def test_whose_turn_it_is_does_not_depend_on_who_goes() -> None:
    """Signs of life are sent in turns: nobody's may pass unused because others have gone meanwhile."""
    turns, nodes, heard = 8, [f"n{number}" for number in range(400)], Counter[str]()
    agents = Agents.__new__(Agents)
    agents._leadership = SimpleNamespace(renewal=1, term=1, job_clock=SimpleNamespace(now=lambda: 0.0))  # type: ignore[assignment]
    agents._news, agents._in_order, agents._told = News(), nodes, dict.fromkeys(nodes, 0)
    agents._channels = {
        node: SimpleNamespace(send_encoded=lambda frame, node=node: heard.update([node]))  # type: ignore[misc]
        for node in nodes
    }
    for turn in range(turns):
        for number in range(turn * 10, turn * 10 + 10):
            agents._channels.pop(f"n{number}")
        agents.say_alive(turn, turns)
    assert {node: heard[node] for node in nodes[80:]} == dict.fromkeys(nodes[80:], 1)


def test_the_lease_is_kept_while_thousands_are_told(tmp_path: Path) -> None:
    now = [0.0]
    watch = LeaderWatch(tmp_path, 0, 2.0, clock=lambda: now[0])
    leadership = Candidate(watch, node="n1", host="h").claim()
    assert leadership is not None and leadership.renew(1)
    renewal = leadership.renewal
    for _ in range(100):
        now[0] += 0.1
        leadership.keep()
        assert leadership.holds()
    assert renewal < leadership.renewal < renewal + 100


def test_a_disk_that_refuses_is_not_asked_for_the_lease_all_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, asked = [0.0], []
    watch = LeaderWatch(tmp_path, 0, 2.0, clock=lambda: now[0])
    leadership = Candidate(watch, node="n1", host="h").claim()
    assert leadership is not None and leadership.renew(1)
    monkeypatch.setattr(leadership, "renew", lambda: asked.append(now[0]))
    for _ in range(4000):
        now[0] += 0.001
        leadership.keep()
    assert 2 <= len(asked) <= 4, "and not at all when the lease is over"


def test_slurm_is_asked_for_no_more_nodes_in_a_second() -> None:
    assert pause_s(1.0, 6) == pause_s(1.0, 1000) == 1.0 and pause_s(0.2, 100) == 0.2
    assert pause_s(1.0, 16384) == pause_s(0.2, 16384) == pytest.approx(16.384)


def test_commit_times_of_a_large_job_take_no_more_memory(tmp_path: Path) -> None:
    record = Record(tmp_path, 100_000)
    for step in range(3 * LEAST_STEPS):
        told = [[step, float(step), 1.0, None]]
        record.beat("n1", {"rank": 0, "epoch": 0, "step": step, "steps": told})
    assert len(record.commits[0]) == LEAST_STEPS
    record.close()
