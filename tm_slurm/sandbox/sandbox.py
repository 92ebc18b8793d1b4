"""Shadow iterations: whole training steps whose collectives are answered at once, without any peer: as they
were recorded in the job's first steps, or by their identity where there is no recording.

They make a joiner's first real step cost what any step costs: imports done, optimizer state there, DDP's
buckets rebuilt (that happens before the second forward, so there must be at least two; the recording has the
order that rank 0 has told all), kernels compiled, memory allocated.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tm_slurm.comm import Endpoint
from tm_slurm.comm._tm import Tape
from tm_slurm.sandbox.imitation import (
    Shape,
    can_be_imitated,
    imitate,
    replicated,
    shape_of,
)
from tm_slurm.sandbox.recording import Recording

log = logging.getLogger("tm_slurm.sandbox")

BUILDING = -1
"""The step in which a role is built."""

BATCH_LIMIT_S = 20.0
"""So long a joiner waits for another one of its batch in one call; then it warms up alone."""


@dataclass(frozen=True)
class Answers:
    """What a warm-up was answered with. `role_class`: of the recording, none without one; `answered`: calls
    from it; `missed`: calls that took another path than the recorded one, the first of them in words;
    `why_alone`: what has ended the calls among the joiners of one batch, if something has."""

    role_class: str | None = None
    answered: int = 0
    missed: int = 0
    first_miss: str = ""
    why_alone: str = ""


class Sandbox:
    """Of one process. While it is entered, its endpoint opens no link and waits for nobody."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._tape: Tape | None = None
        self._recording: Recording | None = None
        self._why_alone = ""

    def enter(self, recording: Recording | None = None, batch: Iterable[int] = ()) -> None:
        """From now on collectives are answered alone; before the role is built. Those among the ranks of a
        batch of joiners, this one's included, are real, as long as that works."""
        self._why_alone = ""
        self._endpoint.share_sandbox(batch, limit_s=BATCH_LIMIT_S)
        self._endpoint.sandbox = True
        if (tape := self._detach_tape()) is not None:
            tape.forget()  # a standby never holds two
        self._recording = recording
        if recording is not None:
            self._tape = Tape.player(
                [(c.step, c.name, c.group, c.peer, c.source, list(c.outputs)) for c in recording.calls]
            )
            self._endpoint.attach(self._tape)

    def leave(self) -> None:
        """From now on collectives are real. What the shadow iterations did to the state must be overwritten
        by now."""
        self._endpoint.sandbox = False
        self.leave_batch()
        if (tape := self._detach_tape()) is not None:
            # this may be the pause of a switch, and giving back memory takes milliseconds
            threading.Thread(target=tape.forget, name="tm-forgets").start()

    def leave_batch(self) -> None:
        """From now on all are answered alone again."""
        self._why_alone = self._why_alone or self._endpoint.why_alone
        self._endpoint.share_sandbox((), limit_s=0)

    def _detach_tape(self) -> Tape | None:
        self._endpoint.attach(None)
        tape, self._tape, self._recording = self._tape, None, None
        return tape

    def begin_step(self, step: int) -> None:
        """Step `step` begins, counted from the start of the job; steps beyond those that were recorded are
        answered as the last one was."""
        if self._tape is not None:
            self._tape.begin_step(step)

    def answers(self) -> Answers:
        """With what the calls since `enter` were answered."""
        why_alone = self._why_alone or self._endpoint.why_alone
        if self._tape is None or self._recording is None:
            return Answers(why_alone=why_alone)
        tape = self._tape
        return Answers(self._recording.role_class, tape.answered, tape.missed, tape.first_miss, why_alone)

    def shadow_steps(self, count: int) -> Iterator[int]:
        """The numbers of the shadow iterations to run."""
        for step in range(count):
            self.begin_step(step)
            yield step

    def rebuild_buckets(self, state: Mapping[str, Any]) -> None:
        """After the first shadow iteration: what DDP does before its second forward, without that."""
        self.begin_step(1)
        for part in replicated(state):
            part.reducer._rebuild_buckets()

    def can_imitate(self, state: Mapping[str, Any]) -> bool:
        """Whether `imitate` may do for this role, which was just built. Without a recording nobody knows the
        order of DDP's buckets."""
        return self._recording is not None and can_be_imitated(state, self._recording)

    def imitate(self, state: Mapping[str, Any], shape: Shape) -> bool:
        """In place of the shadow iterations: make `state` what they would have made of it. Whether it is so
        now, with the `shape` that another role of this class had after them; if not, it must be built
        anew."""
        tape = self._tape
        assert tape is not None
        self._endpoint.attach(None)  # it has the answers to other calls
        try:
            imitate(state)
            if shape_of(state) != shape:
                return False
            self._endpoint.attach(tape)
            missed = tape.missed
            self.rebuild_buckets(state)
            return tape.missed == missed
        except Exception as error:  # of an optimizer or a hook of the user's, or of torch: it need not work
            log.warning("this role cannot be imitated reason=%r", error)
            return False
        finally:
            self._endpoint.attach(tape)
            tape.begin_step(BUILDING)

    @property
    def role_class(self) -> str | None:
        """That of the role which was built last; None without a recording."""
        return self._recording.role_class if self._recording is not None else None


def least_steps(state: Mapping[str, Any]) -> int:
    """After how many steps every further one is like the last: DDP rebuilds its buckets before the second
    forward, with a static graph before the third."""
    parts = list(replicated(state))
    return 3 if any(part.static_graph for part in parts) else 2 if parts else 1


def shadow_steps_of_another_role(state: Mapping[str, Any], wanted: int) -> int:
    """How many shadow iterations a role needs in a process that is warm: one, in which its optimizers get
    their state (see `Sandbox.rebuild_buckets`); with a static graph of DDP all."""
    least = least_steps(state)
    return max(wanted, least) if least > 2 else 1
