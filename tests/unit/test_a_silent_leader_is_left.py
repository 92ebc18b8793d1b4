"""What an agent does about its leader: a silent one is left, an old one refused, and what it has obeyed it
does not obey twice."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tm_slurm.agent.following import DIAL_APART_S, Following, Silence
from tm_slurm.control import Channel, ChannelClosed, HandshakeRefused, accept
from tm_slurm.coordinator.clock import elapsed_s
from tm_slurm.coordinator.election import LeaderFile, LeaderWatch

SECRET = b"s" * 32
HEARTBEAT_S = 0.05
KEEPALIVE_S = 0.4
LEASE_S = 30.0


class Follower:
    """An agent's following, and what it was told."""

    def __init__(self, job_dir: Path, number: int = 0) -> None:
        self.obeyed: list[Any] = []
        self.greeted = 0
        self.watch = LeaderWatch(job_dir, 0, LEASE_S)
        self.following = Following(
            self.watch,
            SECRET,
            {"node": "n2"},
            Silence(heartbeat_s=HEARTBEAT_S, keepalive_s=KEEPALIVE_S),
            led=self._led,
            obey=self._obey,
            number=number,
        )

    def _led(self) -> None:
        self.greeted += 1

    async def _obey(self, frame: dict[str, Any]) -> None:
        self.obeyed.append(frame["message"])

    async def follow(self) -> None:
        """Until it leaves the leader that the file names."""
        known = self.watch.look()
        assert known is not None
        await asyncio.wait_for(self.following.follow(known), 10.0)


def led_by(
    job_dir: Path, lead: Callable[[Channel], Awaitable[None]], act: Callable[[Follower], Awaitable[None]]
) -> Follower:
    """An agent with a leader that does with each connection what `lead` does."""

    async def main() -> Follower:
        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(HandshakeRefused, ChannelClosed, OSError):
                channel = await accept(reader, writer, SECRET, timeout_s=5.0)
                await lead(channel)

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        port = int(server.sockets[0].getsockname()[1])
        LeaderFile("n1", "127.0.0.1", port, 5, 0, 1, 0.0).write(job_dir)
        follower = Follower(job_dir)
        await act(follower)
        server.close()
        return follower

    return asyncio.run(main())


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tm_slurm.agent.following.LOOK_S", 0.01)


async def follow(follower: Follower) -> None:
    await follower.follow()


def order(number: int, place: tuple[int, int] | None, term: int = 5) -> dict[str, Any]:
    return {"slot": None, "message": number, "place": place, "term": term}


@pytest.mark.parametrize("greets", [True, False])
def test_one_that_says_nothing_is_left(tmp_path: Path, greets: bool) -> None:
    async def lead(channel: Channel) -> None:
        if greets:
            channel.send({"kind": "led", "term": 5})
        await asyncio.sleep(30.0)

    async def act(follower: Follower) -> None:
        began = elapsed_s()
        await follower.follow()
        assert KEEPALIVE_S <= elapsed_s() - began < KEEPALIVE_S + 2.0

    assert led_by(tmp_path, lead, act).greeted == greets


def test_one_that_is_alive_is_followed_and_its_lease_runs_on(tmp_path: Path) -> None:
    async def lead(channel: Channel) -> None:
        channel.send({"kind": "led", "term": 5})
        for renewal in range(2, 42):
            channel.send({"kind": "alive", "term": 5, "renewal": renewal, "at": 7.0})
            await asyncio.sleep(KEEPALIVE_S / 20)
        channel.abort()

    async def act(follower: Follower) -> None:
        began = elapsed_s()
        await follower.follow()
        assert elapsed_s() - began > 1.9 * KEEPALIVE_S
        assert follower.watch.known is not None and follower.watch.known.renewal == 41
        assert follower.following.alone_for_s() < KEEPALIVE_S

    led_by(tmp_path, lead, act)


def test_a_silent_one_is_left_at_once_when_another_leads(tmp_path: Path) -> None:
    async def lead(channel: Channel) -> None:
        channel.send({"kind": "led", "term": 5})
        await asyncio.sleep(2 * HEARTBEAT_S)
        LeaderFile("n3", "127.0.0.1", 1, 6, 0, 1, 0.0).write(tmp_path)
        await asyncio.sleep(30.0)

    async def act(follower: Follower) -> None:
        began = elapsed_s()
        await follower.follow()
        assert elapsed_s() - began < KEEPALIVE_S

    led_by(tmp_path, lead, act)


def test_the_leader_of_an_older_term_is_refused_whatever_it_says(tmp_path: Path) -> None:
    old: list[dict[str, Any]] = [
        {"kind": "led", "term": 4},
        {"kind": "alive", "term": 4, "renewal": 9, "at": 0.0},
        order(1, (4, 1), term=4),
        order(1, None, term=4),
    ]

    async def lead(channel: Channel) -> None:
        channel.send(old.pop())
        await asyncio.sleep(30.0)

    async def act(follower: Follower) -> None:
        follower.following.term = 5
        for _ in range(4):
            began = elapsed_s()
            await follower.follow()
            assert elapsed_s() - began < KEEPALIVE_S / 2
        assert not old

    follower = led_by(tmp_path, lead, act)
    assert not follower.obeyed and not follower.greeted and follower.following.term == 5


def test_an_older_leader_file_is_not_even_asked(tmp_path: Path) -> None:
    async def lead(channel: Channel) -> None:
        raise AssertionError("it was asked")

    async def act(follower: Follower) -> None:
        follower.following.term = 6
        await follower.follow()

    led_by(tmp_path, lead, act)


def test_what_was_obeyed_is_not_obeyed_again_and_what_was_not_is(tmp_path: Path) -> None:
    connections: list[Any] = []

    async def lead(channel: Channel) -> None:
        connections.append(channel.identity["place"])
        channel.send({"kind": "led", "term": 5})
        for number, place in enumerate([(4, 1), (4, 2), (5, 1)] + [(5, 2)] * (len(connections) - 1)):
            channel.send(order(number, place))
        channel.send(order(99, None))
        await channel.close()

    async def act(follower: Follower) -> None:
        await follower.follow()
        await follower.follow()

    follower = led_by(tmp_path, lead, act)
    assert follower.obeyed == [0, 1, 2, 99, 3, 99]
    assert connections == [[0, 0], [5, 1]] and follower.following.place == (5, 2)


def test_nothing_waits_for_a_machine_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*args: object, **options: object) -> Channel:
        await asyncio.sleep(30.0)
        raise AssertionError

    monkeypatch.setattr("tm_slurm.agent.following.connect", never)

    async def act(follower: Follower) -> None:
        began = elapsed_s()
        following = asyncio.create_task(follower.follow())
        await asyncio.sleep(3 * HEARTBEAT_S)
        LeaderFile("n3", "127.0.0.1", 1, 6, 0, 1, 0.0).write(tmp_path)
        await following
        assert elapsed_s() - began < KEEPALIVE_S

    led_by(tmp_path, lambda channel: asyncio.sleep(0), act)


def test_the_last_of_thousands_waits_its_turn_once(tmp_path: Path) -> None:
    """However late that is, and however often it must dial then: its turn comes after the file was looked
    at, so the file is looked at again before it dials."""
    tries: list[float] = []

    async def lead(channel: Channel) -> None:
        tries.append(elapsed_s())
        if len(tries) == 1:
            channel.abort()
            return
        channel.send({"term": 5, "kind": "led", "news": 0})
        await channel.drain(1.0)
        await channel.close()

    async def act(_: Follower) -> None:
        late = Follower(tmp_path, number=1000)
        began = elapsed_s()
        await late.follow()
        assert not tries and elapsed_s() - began >= 1000 * DIAL_APART_S
        for _ in range(2):
            again = elapsed_s()
            await late.follow()
            assert elapsed_s() - again < 1000 * DIAL_APART_S
        assert late.greeted == 1

    led_by(tmp_path, lead, act)
