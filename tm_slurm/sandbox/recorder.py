"""Recording the first steps of a job (TrainMover §4): one rank of each role class has a tape attached while
its role is built and in its first steps. Then the tape is taken off, and nothing of it is left in the path of
a collective or of a step."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tm_slurm.comm import Endpoint
from tm_slurm.comm._tm import Tape
from tm_slurm.sandbox.recording import Call, Recording, layout_of
from tm_slurm.sandbox.role_class import agree
from tm_slurm.sandbox.store import RecordingError, write, write_refusal

Told = dict[str, Any]


class Recorder:
    """Of one rank and one start of the job.

    `steps`: how many to record; `limit_bytes`: of host memory for what is recorded; `directory`: where
    recordings are kept; `tell`: called once, from another thread, with how it ended (`kind` is `recorded` or
    `recording_failed`)."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        steps: int,
        limit_bytes: int,
        directory: Path,
        tell: Callable[[Told], None],
    ) -> None:
        self._endpoint = endpoint
        self._limit_bytes = limit_bytes
        self._directory = directory
        self._tell = tell
        self._tape = Tape.recorder(limit_bytes)
        self._about: Recording | None = None
        self._begun = 0
        self.steps_left = steps
        endpoint.attach(self._tape)

    def is_designated(self, role_class: str, rank: int, world_size: int) -> bool:
        """After the role is built: whether this rank records for its class, as the lowest rank of it does. A
        collective of all ranks. If not, the tape is off."""
        self._endpoint.attach(None)
        ranks = agree(role_class, world_size)
        self._about = Recording(role_class, ranks, layout_of(world_size, role_class))
        if rank != ranks[0]:
            self._tape.take()
            return False
        self._endpoint.attach(self._tape)
        return True

    def begin_step(self) -> None:
        """What comes from now on belongs to the next step."""
        self._tape.begin_step(self._begun)

    def step_ended(self) -> bool:
        """Whether there is more to record."""
        self._begun += 1
        self.steps_left -= 1
        return self.steps_left > 0 and not self._tape.overflowed

    def finish(self) -> threading.Thread:
        """Take the tape off; another thread stores what is on it, and tells."""
        self._endpoint.attach(None)
        storing = threading.Thread(target=self._store, name="tm-recording", daemon=True)
        storing.start()
        return storing

    def give_up(self, why: str) -> None:
        """The tape is off, and nothing of it is kept."""
        self._endpoint.attach(None)
        self._tape.take()
        self._refuse(why)

    def _store(self) -> None:
        about = self._about
        assert about is not None
        try:
            if self._tape.overflowed:
                raise RecordingError(
                    f"the first steps have more than {self._limit_bytes >> 20} MB of answers; raise "
                    "standby.recording_limit_mb to record them"
                )
            calls = [Call(*call) for call in self._tape.take()]
            stored = write(self._directory, Recording(about.role_class, about.ranks, about.layout, calls))
        except RecordingError as error:
            self._refuse(str(error))
            return
        told = {"role_class": about.role_class, "ranks": list(about.ranks), **vars(stored)}
        self._say({"kind": "recorded", **told})

    def _refuse(self, why: str) -> None:
        about = self._about
        if about is None:
            return
        with contextlib.suppress(RecordingError):  # a full disk: standbys wait as long as they may
            write_refusal(self._directory, about, why)
        self._say({"kind": "recording_failed", "role_class": about.role_class, "why": why})

    def _say(self, told: Told) -> None:
        self._tell(told)
