"""What will go wrong in a run, drawn from a seed before anything runs: the same seed, the same faults in the
same order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

RANKS = 3
STANDBYS = 5
RESERVE = 1
"""Standbys that no plan uses up."""

FIRST_STEPS = (90, 140)
"""Between which steps the first fault comes: after the first checkpoint, from which a run can go on when a
rank and the rank that keeps its private state are lost at once."""

CHECKPOINT_EVERY = 40
GAP_STEPS = (60, 120)
"""Steps between two faults that do not belong together."""

TAIL_STEPS = 110
"""Steps after the last fault: what is to be mended is mended before the end."""

START_GATE = 5
"""All ranks wait at this step until the driver begins."""


@dataclass(frozen=True)
class Kind:
    """One thing that can go wrong with a node or its rank.

    `costs`: nodes that the job may lose by it for good. `targets`: what it can befall. `leads_to`: entries of
    the timeline that follow when ranks are on the node, at which another fault may come. `mends_after`:
    between how many steps later it is undone; None: with the cluster. `spares_batch_host`: Slurm itself ends
    a job whose batch host is treated so (slurm-facts.md).
    """

    name: str
    costs: int
    targets: tuple[str, ...]
    leads_to: tuple[str, ...]
    mends_after: tuple[int, int] | None = None
    spares_batch_host: bool = False


_RECOVERY = ("failed", "recover", "resolve", "recovered")
_MOVE = ("prepare", "prepared", "switching", "moved")
_ANY = ("rank", "rank", "standby")

KINDS = {
    kind.name: kind
    for kind in (
        Kind("rank_killed", 0, ("rank",), _RECOVERY),
        Kind("rank_stopped", 0, ("rank",), _RECOVERY),
        Kind("agent_killed", 1, _ANY, _RECOVERY),
        Kind("agent_stopped", 1, _ANY, _RECOVERY, mends_after=(20, 80)),
        Kind("powered_off", 1, _ANY, _RECOVERY),
        Kind("powered_off_and_on", 1, _ANY, _RECOVERY, mends_after=(10, 60), spares_batch_host=True),
        Kind("silently_off", 1, _ANY, _RECOVERY),
        Kind("unplugged", 1, _ANY, _RECOVERY, mends_after=(10, 80)),
        Kind("frozen", 1, _ANY, _RECOVERY, mends_after=(10, 80)),
        Kind("slurmd_killed", 1, _ANY, (), mends_after=(20, 100), spares_batch_host=True),
        Kind("drained", 1, _ANY, _MOVE),
        Kind("drained_and_resumed", 1, ("rank",), ("prepare", "cancelled"), mends_after=(1, 40)),
        Kind("set_down", 1, _ANY, _RECOVERY, spares_batch_host=True),
        Kind("leader_killed", 1, ("leader",), ("leads",)),
        Kind("leader_stopped", 1, ("leader",), ("leads",), mends_after=(20, 80)),
        Kind("leader_off", 1, ("leader",), ("leads",)),
    )
}


@dataclass(frozen=True)
class Fault:
    """One fault. `target`: `rank R` (the node that it is on then), `standby N` (the Nth by name), `leader`,
    or `joiner` (whoever is to take ranks over just then). `when`: `step +N` after the one before, `at once`
    with it, or `on ENTRY` of the timeline after it. `mends_after`: steps until it is undone."""

    kind: str
    target: str
    when: str
    mends_after: int | None

    def __str__(self) -> str:
        mended = "" if self.mends_after is None else f", mended after {self.mends_after} steps"
        return f"{self.when:>14}: {self.kind} {self.target}{mended}"


@dataclass(frozen=True)
class Plan:
    """`all_warm`: whether it begins only when all standbys are warm. `snapshots`: the job's policy."""

    seed: int
    all_warm: bool
    snapshots: str
    faults: list[Fault] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """How long the training is: enough for any plan with so many faults."""
        return START_GATE + FIRST_STEPS[1] + GAP_STEPS[1] * (len(self.faults) - 1) + TAIL_STEPS

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        warm = "all standbys warm" if self.all_warm else "standbys as they come"
        head = f"seed {self.seed}: {self.steps} steps, {warm}, snapshots {self.snapshots}"
        return "\n".join([head, *(f"  {n} {fault}" for n, fault in enumerate(self.faults))])


def draw(seed: int, count: int, names: Sequence[str] = tuple(KINDS)) -> Plan:
    """A plan of `count` faults of these kinds, such that the job never runs out of nodes."""
    dice = random.Random(seed)
    plan = Plan(seed, dice.random() < 0.7, dice.choice(("auto", "always")))
    left = STANDBYS - RESERVE
    attached = True
    for _ in range(count):
        kind = KINDS[dice.choice([name for name in names if KINDS[name].costs <= left])]
        left -= kind.costs
        before = plan.faults[-1] if plan.faults else None
        attached = not attached and dice.random() < 0.45
        target = _target(dice, kind, before, attached)
        low, high = GAP_STEPS if plan.faults else FIRST_STEPS
        when = f"step +{dice.randint(low, high)}"
        if attached and before is not None:
            when = dice.choice(_moments(kind, before))
        mends_after = dice.randint(*kind.mends_after) if kind.mends_after is not None else None
        plan.faults.append(Fault(kind.name, target, when, mends_after))
    return plan


def _entries(before: Fault) -> tuple[str, ...]:
    """What the timeline is likely to say after a fault."""
    return () if before.target.startswith("standby") else KINDS[before.kind].leads_to


def _moments(kind: Kind, before: Fault) -> list[str]:
    """When a fault may come that belongs to the one before. A leader that has just been lost is known as the
    leader until there is another."""
    entries = [f"on {entry}" for entry in _entries(before)]
    once_more = kind.targets == ("leader",) and before.target == "leader"
    return entries if once_more else ["at once", *entries]


def _target(dice: random.Random, kind: Kind, before: Fault | None, attached: bool) -> str:
    target = dice.choice(kind.targets)
    if target == "rank":
        others = [
            rank for rank in range(RANKS) if not (attached and before and before.target == f"rank {rank}")
        ]
        target = f"rank {dice.choice(others)}"
        if attached and dice.random() < 0.4:
            target = "joiner"
    elif target == "standby":
        target = f"standby {dice.randrange(2)}"
    return target
