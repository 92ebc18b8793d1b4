"""The watchdog on the vote: a step that hangs is found, with the rank to blame, and no step is that is merely
long."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tm_slurm.coordinator.watchdog import ANSWER_S, LEARNED_STEPS, UNSETTLED_STEPS, Blame, Hang, Watchdog

TICK_S = 0.1
BEAT_S = 0.5


class Job:
    """A job whose ranks commit together, watched once a tick; heartbeats come every `BEAT_S`."""

    def __init__(self, ranks: int = 4, *, floor_s: float = 60.0, factor: float = 10.0) -> None:
        self.watchdog = Watchdog(ranks, floor_s=floor_s, factor=factor)
        self.ranks = range(ranks)
        self.now = 1000.0
        self.step = 0
        self.found: list[Hang | Blame] = []

    def steps(self, count: int, seconds: float) -> None:
        for _ in range(count):
            self.do_step(seconds)

    def do_step(self, seconds: float) -> None:
        self.wait(seconds)
        for rank in self.ranks:
            self.watchdog.committed(rank, self.step, seconds, self.now)
        self.step += 1

    def wait(self, seconds: float, *, calm: bool = True, tick_s: float | None = None) -> list[Hang | Blame]:
        """Let time pass without a commit. Returns what was found meanwhile."""
        tick = tick_s if tick_s is not None else max(TICK_S, seconds / 20)
        until, before = self.now + seconds, len(self.found)
        while self.now < until:
            self.now = min(until, self.now + tick)
            found = self.watchdog.look(self.now, calm=calm)
            if found is not None:
                self.found.append(found)
        return self.found[before:]

    def answer(self, **waiting_s: float | None) -> Blame:
        """The ranks (r0, r1, …) answer: None: at work; else for how long they have waited. What follows."""
        for name, since_s in waiting_s.items():
            rank = int(name.removeprefix("r"))
            self.watchdog.whereabouts(rank, waiting=since_s is not None, since_s=since_s or 0.0)
        found = self.wait(ANSWER_S + 2 * TICK_S, tick_s=TICK_S)
        assert len(found) == 1 and isinstance(found[0], Blame), found
        return found[0]

    def until_found(self, limit_s: float) -> Hang | Blame:
        """The next finding, within `limit_s`."""
        until = self.now + limit_s
        while self.now < until:
            for found in self.wait(TICK_S):
                return found
        raise AssertionError(f"nothing found within {limit_s} s")


def hanging(ranks: int = 4) -> Job:
    """A job of which a step has just been found to hang, after 60 s."""
    job = Job(ranks)
    job.steps(40, 1.0)
    found = job.until_found(61.0)
    assert isinstance(found, Hang) and found.step == 40
    return job


def test_a_step_that_takes_much_longer_than_all_others_hangs() -> None:
    job = Job(floor_s=1.0)
    job.steps(40, 1.0)
    assert job.wait(9.9) == []
    (hang,) = job.wait(0.3)
    assert isinstance(hang, Hang)
    assert hang.step == 40 and 10.0 < hang.seconds < 10.4 and hang.limit_s == pytest.approx(10.0)


def test_the_question_is_asked_once() -> None:
    job = hanging()
    assert job.wait(ANSWER_S / 2) == []


def test_no_step_is_judged_before_the_floor() -> None:
    job = Job(floor_s=60.0)
    job.steps(40, 0.01)
    assert job.wait(59.0) == []
    assert job.wait(2.0) != []


def test_the_rank_that_does_not_wait_while_all_others_do_is_to_blame() -> None:
    blame = hanging().answer(r0=59.0, r1=59.1, r2=None, r3=58.0)
    assert blame.ranks == (2,) and blame.step == 40
    assert "ranks 2 are in no collective" in blame.how


def test_several_may_be_to_blame_but_not_most() -> None:
    assert hanging().answer(r0=59.0, r1=None, r2=None, r3=58.0).ranks == (1, 2)
    blame = hanging().answer(r0=None, r1=None, r2=None, r3=58.0)
    assert blame.ranks == () and "long one" in blame.how


def test_a_rank_that_cannot_even_answer_does_not_wait() -> None:
    blame = hanging().answer(r0=59.0, r1=59.1, r3=58.0)
    assert blame.ranks == (2,) and "did not even answer" in blame.how


def test_if_all_wait_nobody_is_known() -> None:
    blame = hanging().answer(r0=59.0, r1=59.1, r2=59.0, r3=58.0)
    assert blame.ranks == () and "nobody knows" in blame.how


def test_a_long_step_in_which_collectives_come_to_an_end_is_no_failure() -> None:
    blame = hanging().answer(r0=0.4, r1=0.4, r2=None, r3=0.3)
    assert blame.ranks == () and "slowly" in blame.how


def test_nobody_is_to_blame_in_a_world_of_one() -> None:
    assert hanging(1).answer(r0=None).ranks == ()


def test_a_question_that_blamed_nobody_is_asked_again() -> None:
    job = hanging()
    job.answer(r0=0.4, r1=0.4, r2=None, r3=0.3)
    assert job.wait(25.0, tick_s=TICK_S) == []
    again = job.until_found(7.0)
    assert isinstance(again, Hang) and again.step == 40 and again.seconds > 90.0
    assert job.answer(r0=31.0, r1=31.0, r2=None, r3=31.0).ranks == (2,)


def test_answers_of_an_earlier_question_count_for_nothing() -> None:
    job = hanging()
    for rank in (0, 1, 3):
        job.watchdog.whereabouts(rank, waiting=True, since_s=59.0)
    job.do_step(0.1)  # it went on after all
    job.watchdog.whereabouts(2, waiting=False, since_s=0.0)
    assert job.wait(50.0) == []


def test_a_step_that_is_committed_in_the_meantime_ends_the_question() -> None:
    job = hanging()
    job.do_step(0.1)
    assert job.wait(ANSWER_S * 2) == []


def test_one_rank_that_commits_is_enough() -> None:
    job = Job(floor_s=5.0)
    job.steps(40, 0.1)
    for _ in range(10):
        job.wait(4.0)
        job.watchdog.committed(1, job.step, 4.0, job.now)
        job.step += 1
    assert job.found == []
    assert job.watchdog.last_committed(1) == (49, job.now)
    assert job.watchdog.last_committed(0) == (39, job.now - 40.0)


def test_a_step_of_a_minute_that_is_normal_for_this_job_is_no_failure() -> None:
    job = Job(floor_s=60.0)
    job.steps(5, 60.0)
    job.steps(40, 61.0)
    assert job.wait(9 * 61.0) == [] and job.wait(2 * 61.0) != []


def test_what_has_come_twice_is_normal_and_what_came_once_is_not() -> None:
    job = Job(floor_s=20.0)
    job.steps(40, 0.5)
    job.do_step(19.0)
    assert job.watchdog.limit_s() == pytest.approx(20.0)
    job.steps(100, 0.5)
    job.do_step(19.0)
    assert job.watchdog.limit_s() == pytest.approx(190.0)
    assert job.found == []


def test_the_first_steps_compile_and_are_not_judged_by_what_others_take() -> None:
    job = Job(floor_s=60.0)
    job.steps(1, 500.0)
    job.steps(LEARNED_STEPS, 0.1)
    assert job.wait(500.0) == []


def test_what_the_first_steps_take_is_not_learned() -> None:
    job = Job(floor_s=1.0)
    job.steps(1 + UNSETTLED_STEPS, 9.0)
    job.steps(LEARNED_STEPS, 0.2)
    assert job.watchdog.limit_s() == pytest.approx(2.0)


@pytest.mark.parametrize("pause_s", [0.2, 300.0])
def test_a_recovery_is_neither_judged_nor_learned(pause_s: float) -> None:
    job = Job(floor_s=20.0)
    job.steps(40, 0.5)
    job.wait(pause_s, calm=False)
    job.do_step(100.0)  # the successor compiles
    job.steps(UNSETTLED_STEPS, 10.0)
    job.steps(5, 0.5)
    assert job.found == []
    assert job.watchdog.limit_s() == pytest.approx(20.0)
    assert job.wait(21.0) != [], "and then it is watched as before"


def test_a_question_is_forgotten_in_a_recovery() -> None:
    job = hanging()
    job.wait(0.2, calm=False)
    assert job.wait(59.0) == []


def test_steps_that_are_told_in_heaps_are_learned_once() -> None:
    watchdog = Watchdog(2, floor_s=1.0, factor=10.0)
    for rank in (0, 1):
        for step in range(30):
            watchdog.committed(rank, step, 9.0 if step == 10 else 0.5, 10.0)
    assert watchdog.limit_s() == pytest.approx(5.0), "9 s have come once, not twice"


def test_steps_that_are_done_again_after_a_roll_back_are_movement() -> None:
    job = Job(floor_s=60.0)
    job.steps(200, 1.0)
    job.wait(5.0, calm=False)
    job.step = 100
    job.steps(90, 1.0)
    assert job.found == []
    found = job.until_found(61.0)
    assert isinstance(found, Hang) and found.step == 190


@given(
    seed=st.integers(0, 2**32),
    base=st.floats(0.001, 30.0),
    spread=st.floats(1.0, 8.0),
    ranks=st.integers(1, 5),
)
@settings(max_examples=60, deadline=None)
def test_no_false_alarm_in_a_thousand_noisy_steps(seed: int, base: float, spread: float, ranks: int) -> None:
    """Whatever the noise, as long as no step takes ten times as long as others; heartbeats come late."""
    noise = random.Random(seed)
    watchdog = Watchdog(ranks, floor_s=max(2 * BEAT_S, base * spread / 10 + BEAT_S), factor=10.0)
    at = heard_at = noise.uniform(0.0, 1e6)
    for step in range(1000):
        seconds = base * spread ** noise.random()
        at += seconds
        heard_at = max(heard_at, at + noise.uniform(0.0, BEAT_S))
        assert watchdog.look(heard_at, calm=True) is None  # the silence is longest just before it ends
        for rank in range(ranks):
            watchdog.committed(rank, step, seconds, heard_at)


@given(seed=st.integers(0, 2**32), long_s=st.floats(11.0, 60.0), period=st.integers(3, 200))
@settings(max_examples=40, deadline=None)
def test_no_false_alarm_by_a_long_step_that_comes_regularly(seed: int, long_s: float, period: int) -> None:
    noise = random.Random(seed)
    job = Job(2, floor_s=60.0)
    for step in range(1000):
        job.do_step(long_s * noise.uniform(0.7, 1.0) if step % period == period - 1 else noise.random())
    assert job.found == []


@given(step_s=st.floats(0.01, 20.0), culprit=st.integers(0, 3), steps=st.integers(15, 100))
@settings(max_examples=40, deadline=None)
def test_a_real_hang_is_always_found(step_s: float, culprit: int, steps: int) -> None:
    job = Job(floor_s=5.0)
    job.steps(steps, step_s)
    limit = max(5.0, 10 * step_s)
    assert job.wait(limit * 0.99, tick_s=limit / 50) == []
    hang = job.until_found(limit * 0.05)
    assert isinstance(hang, Hang) and hang.step == steps
    waits = {f"r{rank}": None if rank == culprit else hang.seconds for rank in range(4)}
    assert job.answer(**waits).ranks == (culprit,)
