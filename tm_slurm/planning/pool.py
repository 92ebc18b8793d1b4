"""A pool of k standbys, each of which is away for a while after it was used.

Events come as a Poisson process of rate r (nodes that fail independently). One that finds a standby takes
it, and it is replaced after an exponential time of mean 1/v; one that finds none takes nothing from the pool.
That is Erlang's loss system (A. K. Erlang 1917; L. Kleinrock, Queueing Systems, volume 1, 1975, "M/M/m/m"):

    busy standbys      p_j ∝ (r/v)^j / j!                          j = 0 … k
    none is free       B(k) = p_k = A·B(k-1) / (k + A·B(k-1)),     A = r/v, B(0) = 1
    busy on average    A·(1 - B(k))                                (Little's law)

The distribution of j, and so B, does not depend on how replacement times are distributed, only on their mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_STEP = 40.0
"""Longest piece of a window, in expected transitions, that is expanded at once: exp(-40) is still a float."""
_NEGLIGIBLE = 1e-13


def none_free(standbys: int, offered: float) -> float:
    """B(k): the share of events that find none of `standbys` free; `offered` is A, events a repair time."""
    blocked = 1.0
    for k in range(1, standbys + 1):
        blocked = offered * blocked / (k + offered * blocked)
    return blocked


def busy_on_average(standbys: int, offered: float) -> float:
    """How many of the standbys are being replaced, on average."""
    return offered * (1.0 - none_free(standbys, offered))


def busy_distribution(standbys: int, offered: float) -> list[float]:
    """p_0 … p_k, in a way that neither a large k nor a large A overflows."""
    if offered == 0:
        return [1.0] + [0.0] * standbys
    logs = [j * math.log(offered) - math.lgamma(j + 1) for j in range(standbys + 1)]
    most = max(logs)
    weights = [math.exp(log - most) for log in logs]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def all_found_one(
    standbys: int, *, failures_per_s: float, events_per_s: float, repair_s: float, window_s: float
) -> float:
    """The probability that in `window_s` seconds no failure found the pool empty.

    Failures are `failures_per_s` of the `events_per_s` that use the pool. The chain of busy standbys, begun
    in p_j, loses the rate `failures_per_s` in its last state: the answer is p · exp(G·window) · 1, by
    uniformization (A. Jensen 1953): exp(G t) = Σ_n Poisson(n; q t) (I + G/q)^n, q the fastest rate.
    """
    chances = busy_distribution(standbys, events_per_s * repair_s)
    chain = _Chain(failures_per_s, events_per_s, 1.0 / repair_s, events_per_s + standbys / repair_s)
    pieces = max(1, math.ceil(chain.fastest * window_s / _STEP))
    for _ in range(pieces):
        chances = _after(chances, chain, window_s / pieces)
    return min(1.0, math.fsum(chances))


@dataclass(frozen=True)
class _Chain:
    """Rates a second: failures, all events, one replacement, and the fastest of any state."""

    failures: float
    events: float
    back: float
    fastest: float


def _after(chances: list[float], chain: _Chain, seconds: float) -> list[float]:
    mean = chain.fastest * seconds
    weight = math.exp(-mean)
    left = 1.0 - weight
    current = chances
    total = [weight * chance for chance in current]
    n = 0
    while left > _NEGLIGIBLE and n < mean + 12.0 * math.sqrt(mean) + 40.0:
        n += 1
        current = _one_transition(current, chain)
        weight *= mean / n
        left -= weight
        total = [sum_ + weight * chance for sum_, chance in zip(total, current, strict=True)]
    return total


def _one_transition(chances: list[float], chain: _Chain) -> list[float]:
    last = len(chances) - 1
    after = []
    for j, chance in enumerate(chances):
        leaving = j * chain.back + (chain.events if j < last else chain.failures)
        value = chance * (1.0 - leaving / chain.fastest)
        if j > 0:
            value += chances[j - 1] * chain.events / chain.fastest
        if j < last:
            value += chances[j + 1] * (j + 1) * chain.back / chain.fastest
        after.append(value)
    return after
