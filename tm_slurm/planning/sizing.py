"""How many standbys waste least, and from which size of job on one of them pays."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from tm_slurm.planning.inputs import HOUR_S, ImpossibleInput, Inputs
from tm_slurm.planning.strategies import Strategy, restart, with_standbys

LARGEST_NODES = 1 << 20
"""No larger job is looked at for a break-even."""

MOST_STRATEGIES = 128
MOST_AWAY = 5000
"""More standbys than that, away at the same time, are a mistake in the input."""

_SHOWN_BEYOND_BEST = 3
_LEAST_SHOWN = 4


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All strategies for one job."""

    inputs: Inputs
    restart: Strategy
    standbys: list[Strategy]
    """0 … k standbys; of very many, some of them: the first, the last and the best always"""
    best: Strategy
    """the number of standbys that wastes least, of all numbers"""
    break_even_gpus: int | None
    """the smallest job for which one standby wastes less than none; None if there is none"""
    break_even_restart_gpus: int | None
    """the same, against restarts"""


def plan(inputs: Inputs, mttf_h: Callable[[int], float], *, most: int | None = None) -> Plan:
    """`mttf_h`: hours between failures by number of nodes, for the break-even sizes. `most`: the k."""
    best = best_number(inputs)
    last = max(_LEAST_SHOWN, best + _SHOWN_BEYOND_BEST) if most is None else most
    return Plan(
        inputs=inputs,
        restart=restart(inputs),
        standbys=[with_standbys(inputs, k) for k in _some(last, best)],
        best=with_standbys(inputs, best),
        break_even_gpus=_break_even(inputs, mttf_h, lambda sized: with_standbys(sized, 0)),
        break_even_restart_gpus=_break_even(inputs, mttf_h, restart),
    )


def _some(last: int, best: int) -> list[int]:
    every = math.ceil((last + 1) / MOST_STRATEGIES)
    return sorted({*range(0, last + 1, every), last, min(best, last)})


def best_number(inputs: Inputs) -> int:
    """The number of standbys that wastes least: what a further one saves only gets less (Erlang's B(k) is
    convex in k), so the interval is narrowed from both ends."""
    offered = (inputs.failures_per_s + inputs.planned_per_s) * inputs.repair_h * HOUR_S
    if offered > MOST_AWAY:
        raise ImpossibleInput(
            f"--repair {inputs.repair_h:g}: expected less, found {offered:,.0f} events in that time, "
            f"of which each takes a standby; at most {MOST_AWAY:,} are looked at"
        )
    low, high = 0, math.ceil(offered + 6.0 * math.sqrt(offered) + 6.0)
    while low < high:
        middle = (low + high) // 2
        if with_standbys(inputs, middle).wasted_gpu_h <= with_standbys(inputs, middle + 1).wasted_gpu_h:
            high = middle
        else:
            low = middle + 1
    return low


def _break_even(
    inputs: Inputs, mttf_h: Callable[[int], float], other: Callable[[Inputs], Strategy]
) -> int | None:
    """What one standby saves grows with the size of the job, what it costs does not."""

    def pays(nodes: int) -> bool:
        sized = replace(inputs, gpus=nodes * inputs.gpus_per_node, mttf_h=mttf_h(nodes))
        return with_standbys(sized, 1).wasted_gpu_h < other(sized).wasted_gpu_h

    high = 1
    while not pays(high):
        high *= 2
        if high > LARGEST_NODES:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high * inputs.gpus_per_node
