"""Who is given up, how soon, and when a leader holds itself to be the one without a network."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tm_slurm.agent.main import Agent
from tm_slurm.agent.surroundings import Surroundings
from tm_slurm.config import loads
from tm_slurm.control import ChannelClosed, connect
from tm_slurm.coordinator.election import LeaderFile
from tm_slurm.coordinator.presence import SETTLE_S, Presence
from tm_slurm.observe.follow import JobFiles

RECONNECT_S = 2.0
OTHERS = ["n2", "n3", "n4", "n5"]


class Job:
    """A leader on n1 that hears the agents of `names` every half second, on a clock that the test moves."""

    def __init__(self, names: list[str], *, sure: bool = False) -> None:
        self.now = 100.0
        self.presence = Presence("n1", RECONNECT_S, self.now, sure=sure)
        for name in ("n1", *names):
            self.presence.came(name, self.now)

    def pass_time(self, seconds: float, hearing: list[str]) -> None:
        """In steps of 0.1 s, until somebody is lost or the leader thinks itself cut off."""
        end = self.now + seconds
        while self.now < end and not self.presence.is_cut_off(self.now) and not self.lost():
            self.now += 0.1
            for place, name in enumerate(["n1", *hearing]):
                if int(self.now * 10) % 5 == place % 5:
                    self.presence.heard(name, self.now)

    def lost(self) -> dict[str, str]:
        return self.presence.lost(self.now)

    def cut_off(self) -> bool:
        return self.presence.is_cut_off(self.now)


def test_nobody_is_given_up_who_is_heard() -> None:
    job = Job(OTHERS)
    job.pass_time(20.0, OTHERS)
    assert not job.lost() and not job.cut_off()


@pytest.mark.parametrize("silent", [["n2"], ["n2", "n3"]])
def test_some_that_fall_silent_are_lost(silent: list[str]) -> None:
    job = Job(OTHERS)
    job.pass_time(2.0, OTHERS)
    silent_since = job.now
    job.pass_time(10.0, [name for name in OTHERS if name not in silent])
    assert (
        not job.cut_off() and set(job.lost()) <= set(silent) and "silent" in next(iter(job.lost().values()))
    )
    assert job.now - silent_since <= RECONNECT_S + 0.2


@pytest.mark.parametrize("heard", [[], ["n2"]])
def test_when_most_fall_silent_it_is_this_node(heard: list[str]) -> None:
    job = Job(OTHERS)
    job.pass_time(2.0, OTHERS)
    silent_since = job.now
    job.pass_time(10.0, heard)
    assert job.cut_off() and job.now - silent_since <= RECONNECT_S + 0.2


def test_the_only_other_one_that_falls_silent_may_as_well_be_there() -> None:
    job = Job(["n2"])
    job.pass_time(10.0, [])
    assert job.cut_off()


def test_whoever_closes_the_connection_is_heard_in_that_moment() -> None:
    job = Job(OTHERS)
    for name in OTHERS[1:]:
        job.presence.went(name, job.now)
    job.pass_time(RECONNECT_S - 0.2, ["n2"])
    assert not job.cut_off() and not job.lost()
    job.pass_time(1.0, ["n2"])
    assert not job.cut_off() and set(job.lost()) == {"n3", "n4", "n5"}
    assert "closed" in job.lost()["n3"]


def test_silences_one_after_the_other_are_losses() -> None:
    job = Job(OTHERS)
    heard = list(OTHERS)
    for name in OTHERS[:3]:
        heard.remove(name)
        job.pass_time(5.0, heard)
        assert not job.cut_off() and list(job.lost()) == [name]
        job.presence.forget(name)


def test_a_leader_that_has_slept_itself_blames_nobody() -> None:
    job = Job(OTHERS)
    job.now += 10 * RECONNECT_S
    assert job.cut_off()
    job.presence.slept(10 * RECONNECT_S)
    assert not job.cut_off() and not job.lost()
    job.pass_time(10.0, OTHERS[:3])
    assert list(job.lost()) == ["n5"]


def test_a_new_leader_to_whom_nobody_comes_is_cut_off() -> None:
    job = Job([])
    for name in OTHERS:
        job.presence.expect(name, job.now)
    job.pass_time(10.0, [])
    assert job.cut_off()


def test_a_new_leader_gives_up_those_that_do_not_come_while_others_do() -> None:
    job = Job([])
    for name in OTHERS:
        job.presence.expect(name, job.now)
    job.presence.came("n2", job.now)
    job.pass_time(RECONNECT_S - 0.2, ["n2"])
    assert not job.lost()
    job.pass_time(0.5, ["n2"])
    assert not job.cut_off() and set(job.lost()) == {"n3", "n4", "n5"}
    assert "not come" in job.lost()["n3"]


def test_one_that_is_sure_believes_that_the_others_are_gone() -> None:
    job = Job([], sure=True)
    for name in OTHERS:
        job.presence.expect(name, job.now)
    job.pass_time(10.0, [])
    assert not job.cut_off() and set(job.lost()) == set(OTHERS)


@pytest.mark.parametrize("accused_first", [True, False])
def test_a_closed_connection_and_a_broken_link_together_are_enough(accused_first: bool) -> None:
    job = Job(OTHERS)
    job.pass_time(1.0, OTHERS)
    if accused_first:
        job.presence.accuse("n3", job.now)
        assert not job.lost()
    job.presence.went("n3", job.now)
    if not accused_first:
        assert not job.lost()
        job.presence.accuse("n3", job.now)
    assert list(job.lost()) == ["n3"] and "lost" in job.lost()["n3"]


def test_a_new_leader_lets_agents_come_before_it_believes_a_broken_link() -> None:
    job = Job(["n2"])
    job.presence.expect("n3", job.now)
    job.presence.accuse("n3", job.now)
    assert not job.lost()
    job.now += SETTLE_S + 0.01
    assert list(job.lost()) == ["n3"]


def test_an_agent_that_speaks_refutes_what_is_said_of_its_node() -> None:
    job = Job(OTHERS)
    job.presence.accuse("n3", job.now)
    job.presence.heard("n3", job.now)
    job.presence.went("n3", job.now)
    job.now += SETTLE_S + 0.1
    assert not job.lost()
    job.presence.came("n3", job.now)
    assert not job.lost()


def test_it_leads_again_when_nobody_else_does_and_then_believes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agents of a job of two nodes: one real, and one that has connected and says nothing."""
    monkeypatch.setattr("tm_slurm.agent.leading.ASIDE_S", 0.1)
    (tmp_path / "waits.py").write_text("import time\ntime.sleep(60)\n")
    policy = {"lease_s": 0.5, "heartbeat_s": 0.1, "keepalive_s": 0.5}
    train = {"script": str(tmp_path / "waits.py")}
    config = loads(json.dumps({"train": train, "job": {"standbys": 1}, "policy": policy}), name="test")
    (tmp_path / "logs").mkdir()
    (tmp_path / "secret").write_bytes(b"s" * 32)
    (tmp_path / "secret").chmod(0o600)
    files = JobFiles(tmp_path)

    async def said(what: str, **fields: object) -> None:
        for _ in range(500):
            if any(fields.items() <= entry.items() for entry in files.notes(what)):
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"never said: {what} {fields}; {files.timeline()}")

    async def run() -> None:
        agent = Agent(tmp_path, config, Surroundings("n1", None, ("n1", "n2"), 0), None)
        running = asyncio.create_task(agent.run())
        await said("leads", term=1)
        known = LeaderFile.read(tmp_path)
        assert known is not None
        identity = {"role": "agent", "node": "n2"}
        other = await connect(known.host, known.port, b"s" * 32, identity, timeout_s=5.0)
        await said("cut_off", term=1)
        with pytest.raises(ChannelClosed):
            while True:
                await asyncio.wait_for(other.receive(), 5.0)
        assert not files.notes("node_lost")
        await said("leads", term=2)
        await said("node_lost", node="n2")
        agent.terminated()
        await asyncio.wait_for(running, 15.0)

    asyncio.run(asyncio.wait_for(run(), 40.0))
    assert [entry["node"] for entry in files.notes("node_lost")] == ["n2"]
    assert len(files.notes("cut_off")) == 1
