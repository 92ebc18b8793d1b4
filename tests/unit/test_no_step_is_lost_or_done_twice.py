"""Whatever dies, and whenever: every step is applied once, in order, with every rank's own private state, and
the job finishes or says who is missing (the_step_rule.md). The decisions are the real ones; ranks, agents and
the leader's shell are simulated, point by point and message by message.

TM_SLURM_EXAMPLES=5000 looks for longer: so many examples, and fifty times as many walks, from another start
each time (TM_SLURM_FIRST_WALK repeats one).
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from simulated_job import REPLICA_KINDS, Shape, SimulatedJob
from simulated_rank import Violation

EXAMPLES = int(os.environ.get("TM_SLURM_EXAMPLES", "0"))
FIRST_WALK = int(os.environ.get("TM_SLURM_FIRST_WALK", "0"))

POLICIES = (
    ("fail",),
    ("wait", "fail"),
    ("double-up", "fail"),
    ("wait", "double-up", "fail"),
    ("shrink", "fail"),
    ("shrink", "double-up", "fail"),
    ("wait", "shrink", "fail"),
    ("requeue",),
)
EVENTS = ("drain", "drain", "request", "reservation", "resume", "resume", "time_limit")
FAULTS = (
    "a process dies",
    "a process dies",
    "a process dies",
    "a node is powered off",
    "a node is unplugged",
    "a node is unplugged",
    "a connection breaks",
    "a connection breaks",
    "a link breaks",
    "a joiner fails",
    "a rank is found stuck",
    "the leader dies",
    "the leader dies over its next decision",
)
FAULTS_OF_NODES = (*FAULTS, "a node is powered off", *["a node is unplugged"] * 8)
LONGEST = 1 << 16

SHAPES = st.builds(
    lambda spare, active, **others: Shape(nodes=active + spare, active=active, **others),
    spare=st.integers(0, 2),
    active=st.integers(2, 4),
    ranks_per_node=st.sampled_from([1, 1, 2]),
    replicas=st.sampled_from(REPLICA_KINDS),
    batch_host=st.booleans(),
    steps=st.sampled_from([6, 9, 12]),
    on_no_standby=st.sampled_from(POLICIES),
    failures_per_step=st.sampled_from([1000, 1000, 2]),
    exchange_every=st.sampled_from([1, 2, 4]),
    snapshot_every=st.sampled_from([1, 2, 3]),
    checkpoint_every=st.sampled_from([0, 0, 3]),
    late_collectives=st.sampled_from([False, False, False, True]),
    shares=st.sampled_from([True, True, True, False]),
    restored=st.sampled_from([0, 0, 0, 2]),
)
CHOICE = st.integers(0, LONGEST)


class AJobInTrouble(RuleBasedStateMachine):
    """Rules are what happens by itself, what Slurm says, and faults; the end of an example is the end of
    trouble."""

    @initialize(
        shape=SHAPES,
        budget=st.sampled_from([1, 2, 3, 5, 8]),
        heals=st.booleans(),
        seed=CHOICE,
        moves=st.sampled_from([0, 60, 100, 140]),
    )
    def begin(self, shape: Shape, budget: int, heals: bool, seed: int, moves: int) -> None:
        """Most jobs have started when the trouble begins."""
        self.job = SimulatedJob(shape)
        self.budget = budget
        self.heals = heals
        self._go_on(seed, moves)

    def _go_on(self, seed: int, moves: int) -> None:
        chance = random.Random(seed)
        for _ in range(moves):
            self.job.move(chance.randrange(LONGEST))

    @rule(choices=st.lists(CHOICE, min_size=1, max_size=40))
    def some_things_happen(self, choices: list[int]) -> None:
        for choice in choices:
            self.job.move(choice)

    @rule(seed=CHOICE, moves=st.integers(1, 60))
    def many_things_happen(self, seed: int, moves: int) -> None:
        self._go_on(seed, moves)

    @rule(seed=CHOICE, further=st.integers(0, 30))
    def things_happen_until_a_switch_or_a_recovery(self, seed: int, further: int) -> None:
        chance = random.Random(seed)
        for _ in range(100):
            if is_delicate(self.job):
                break
            self.job.move(chance.randrange(LONGEST))
        self._go_on(seed, further)

    @rule(nodes=st.sets(st.integers(1, 6), max_size=3))
    def nothing_happens_on(self, nodes: set[int]) -> None:
        self.job.slow = tuple(f"n{number}" for number in sorted(nodes))

    @rule(kind=st.sampled_from(EVENTS[:-1]), choice=CHOICE)
    def slurm_says(self, kind: str, choice: int) -> None:
        self.job.event(kind, choice)

    @precondition(lambda self: self.job.faults > 1)
    @rule()
    def time_is_over(self) -> None:
        self.job.event("time_limit", 0)

    @rule(seconds=st.sampled_from([0.5, 61.0, 130.0]))
    def time_passes(self, seconds: float) -> None:
        self.job.pass_time(seconds)

    @rule(choice=CHOICE)
    def a_node_is_given_up(self, choice: int) -> None:
        self.job.lose(choice)

    @rule(choice=CHOICE)
    def a_node_is_plugged_in_again(self, choice: int) -> None:
        self.job.heal(choice)

    @rule(choice=CHOICE)
    def another_leads(self, choice: int) -> None:
        self.job.elect(choice)

    def _may_fail(self) -> bool:
        return self.job.faults < self.budget

    @precondition(_may_fail)
    @rule(choice=CHOICE, seed=CHOICE, moves=st.integers(0, 60))
    def a_process_dies(self, choice: int, seed: int, moves: int) -> None:
        self._go_on(seed, moves)
        self.job.kill(choice)

    @precondition(_may_fail)
    @rule(choice=CHOICE, seed=CHOICE, moves=st.integers(0, 60))
    def a_node_is_unplugged(self, choice: int, seed: int, moves: int) -> None:
        self._go_on(seed, moves)
        self.job.cut(choice)

    @precondition(_may_fail)
    @rule(kind=st.sampled_from(FAULTS), choice=CHOICE, seed=CHOICE, moves=st.integers(0, 60))
    def something_fails(self, kind: str, choice: int, seed: int, moves: int) -> None:
        self._go_on(seed, moves)
        fault(self.job, kind, choice)

    def teardown(self) -> None:
        if hasattr(self, "job"):
            settle(self.job, random.Random(1), heals=self.heals)


def settle(job: SimulatedJob, chance: random.Random, *, heals: bool) -> None:
    """The trouble is over."""
    job.slow = ()
    while heals and job.cut_off:
        job.heal(0)
    job.settle(lambda: chance.randrange(LONGEST))


# ---- by chance ----


def shape_of(chance: random.Random) -> Shape:
    active = chance.choice([2, 3, 3, 4])
    return Shape(
        nodes=active + chance.choice([0, 1, 2, 2]),
        active=active,
        ranks_per_node=chance.choice([1, 1, 2]),
        replicas=chance.choice(REPLICA_KINDS),
        batch_host=chance.random() < 0.5,
        steps=chance.choice([4, 6, 8]),
        on_no_standby=chance.choice(POLICIES),
        failures_per_step=chance.choice([1000, 1000, 2]),
        exchange_every=chance.choice([1, 2, 4]),
        snapshot_every=chance.choice([1, 2, 3]),
        checkpoint_every=chance.choice([0, 0, 3]),
        late_collectives=chance.random() < 0.15,
        shares=chance.random() < 0.9,
        restored=chance.choice([0, 0, 0, 2]),
    )


def shape_that_shrinks(chance: random.Random) -> Shape:
    """Of a job that goes on with fewer when nodes are lost, and grows back when they are there again."""
    shape = shape_of(chance)
    shrinks = [policies for policies in POLICIES if "shrink" in policies]
    return replace(
        shape,
        nodes=shape.active + chance.choice([0, 0, 0, 1]),
        replicas="replicas",
        steps=chance.choice([12, 20, 40]),
        on_no_standby=chance.choice(shrinks),
        failures_per_step=1000,
        late_collectives=False,
        shares=True,
    )


def fault(job: SimulatedJob, kind: str, choice: int) -> None:
    if kind == "a link breaks":
        job.break_link(choice // 2, blames=bool(choice % 2))
    elif kind == "the leader dies over its next decision":
        job.dies_after = choice % 4
    else:
        faults: dict[str, Callable[[int], object]] = {
            "a process dies": job.kill,
            "a node is powered off": job.power_off,
            "a node is unplugged": job.cut,
            "a connection breaks": job.reset,
            "a joiner fails": job.fail_to_join,
            "a rank is found stuck": job.accuse,
            "the leader dies": lambda _: job.leader_dies(),
        }
        faults[kind](choice)


def trouble(job: SimulatedJob, chance: random.Random, budget: int, faults: Sequence[str]) -> None:
    kind = chance.random()
    choice = chance.randrange(LONGEST)
    if kind < 0.25:
        job.event("time_limit" if chance.random() < 0.02 else chance.choice(EVENTS[:-1]), choice)
    elif kind < 0.4:
        job.heal(choice)
    elif kind < 0.5:
        job.lose(choice)
    elif kind < 0.6:
        job.elect(choice)
    elif kind < 0.65:
        job.pass_time(chance.choice([0.5, 61.0, 130.0]))
    elif job.faults < budget:
        fault(job, chance.choice(faults), choice)


def is_delicate(job: SimulatedJob) -> bool:
    """Whether a switch or a recovery is on its way, or the job goes on with fewer ranks."""
    move = job.state.move
    if job.state.absent:
        return True
    return job.state.recovery is not None or (move is not None and move.phase != "preparing")


def walk(
    seed: int, shape_of: Callable[[random.Random], Shape] = shape_of, faults: Sequence[str] = FAULTS
) -> SimulatedJob:
    """Whatever happens by chance."""
    chance = random.Random(seed)
    job = SimulatedJob(shape_of(chance))
    budget = chance.choice([0, 1, 2, 3, 5, 8])
    rate = chance.choice([0.005, 0.02, 0.05])
    more_when_delicate = chance.choice([1, 1, 5])
    names = job.plan.order
    try:
        for _ in range(chance.choice([200, 400, 800])):
            if job.ended is not None:
                break
            if chance.random() < rate * (more_when_delicate if is_delicate(job) else 1):
                trouble(job, chance, budget, faults)
                continue
            if job.state.absent and chance.random() < 0.05:
                job.heal(chance.randrange(LONGEST))
            if chance.random() < 0.03:
                job.slow = tuple(n for n in names if chance.random() < 0.3) if chance.random() < 0.6 else ()
            if not job.move(chance.randrange(LONGEST)) and not job.lose(0) and not job.elect(0):
                job.pass_time(0.5)
        settle(job, chance, heals=chance.random() < 0.7)
    except Exception as error:
        raise Violation("\n".join([*job.log, f"walk {seed}: {error!r}"])) from error
    return job


def test_no_fault_at_any_point_loses_a_step_or_does_it_twice() -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        AJobInTrouble,
        settings=settings(
            max_examples=EXAMPLES or 250,
            stateful_step_count=40,
            deadline=None,
            derandomize=not EXAMPLES,
            database=None,
            suppress_health_check=list(HealthCheck),
            print_blob=False,
        ),
    )


def test_no_walk_with_fewer_ranks_loses_a_step_or_does_it_twice() -> None:
    first, number = FIRST_WALK, 50 * EXAMPLES or 400
    jobs = [walk(seed, shape_that_shrinks, FAULTS_OF_NODES) for seed in range(first, first + number)]
    assert sum(job.shrunk for job in jobs) > number / 10, "many go on with fewer"
    assert sum(job.grown for job in jobs) > number / 25, "many of those grow back"


def test_no_walk_by_chance_loses_a_step_or_does_it_twice() -> None:
    ends = [walk(seed).ended for seed in range(FIRST_WALK, FIRST_WALK + (50 * EXAMPLES or 600))]
    completed = sum(end is not None and end.state == "completed" for end in ends)
    assert completed > len(ends) / 2, "most jobs have standbys enough"
