"""What torch's allocator is asked for on this thread, byte by byte."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate

from torch.profiler import ProfilerActivity, profile


@dataclass
class Allocations:
    """Bytes of each allocation, in order; negative where memory was given back."""

    nbytes: list[int] = field(default_factory=list)

    @property
    def held(self) -> int:
        """What is left in the end."""
        return sum(self.nbytes)

    @property
    def peak(self) -> int:
        """The most that was held at a time."""
        return max(accumulate(self.nbytes), default=0)


@contextmanager
def counted() -> Iterator[Allocations]:
    """Counts what is allocated within; the result is there afterwards."""
    found = Allocations()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as taken:
        yield found
    assert taken.profiler is not None and taken.profiler.kineto_results is not None
    events = [e for e in taken.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    found.nbytes += [event.nbytes() for event in events]
