"""What the processes of one run share: a directory that all nodes see. The nodes' side of it is here, too."""

from __future__ import annotations

import json
import os
import select
from pathlib import Path

from baselines.steps import StepWriter

RUN = "BASELINES_RUN"
"""Environment variable: the directory of the run."""

STANDBY_LIMIT_S = 900.0
"""A standby waits no longer for its turn."""


class RunFiles:
    """The directory of one run of one rival."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.steps = directory / "steps"
        self.checkpoint = directory / "checkpoint.pt"

    @classmethod
    def from_environment(cls) -> RunFiles:
        return cls(Path(os.environ[RUN]))

    def writer(self) -> StepWriter:
        """For the steps of this process."""
        return StepWriter(self.steps)

    # ---- an operator's orders ----

    @property
    def options(self) -> dict[str, object]:
        """The `train.options` of char_gpt."""
        found = json.loads((self.directory / "options.json").read_text())
        assert isinstance(found, dict)
        return found

    def order_to_leave(self, node: str) -> None:
        """The ranks of `node` are to go."""
        (self.directory / "leaves").write_text(node)

    @property
    def leaver(self) -> str | None:
        """The node that is to be left, if one is."""
        path = self.directory / "leaves"
        return path.read_text() if path.exists() else None

    # ---- the newest checkpoint ----

    def saved(self, steps_done: int) -> None:
        """The checkpoint that is there now is of so many steps."""
        self._replace("saved", str(steps_done))

    @property
    def saved_steps(self) -> int:
        path = self.directory / "saved"
        return int(path.read_text()) if path.exists() else -1

    # ---- standbys ----

    def make_standby(self, node: str) -> None:
        """There will be a process on `node` that waits for its turn."""
        os.mkfifo(self._turn(node))

    def await_turn(self) -> int:
        """On a standby, when all that it could do alone is done: say so, and wait; whose place is free (-1:
        it will be told). TimeoutError."""
        node = os.uname().nodename
        turn = os.open(self._turn(node), os.O_RDONLY | os.O_NONBLOCK)
        try:
            (self.directory / f"ready-{node}").touch()
            if not select.select([turn], [], [], STANDBY_LIMIT_S)[0]:
                raise TimeoutError(f"the standby on {node} was not needed within {STANDBY_LIMIT_S:.0f} s")
            return int(os.read(turn, 16))
        finally:
            os.close(turn)

    def is_ready(self, node: str) -> bool:
        """Whether the standby on `node` has nothing left to do but wait."""
        return (self.directory / f"ready-{node}").exists()

    def give_turn(self, node: str, rank: int = -1) -> None:
        """Wake the standby on `node`, for the place of `rank`. OSError when none waits there."""
        turn = os.open(self._turn(node), os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(turn, str(rank).encode())
        finally:
            os.close(turn)

    def _turn(self, node: str) -> Path:
        return self.directory / f"turn-{node}"

    def _replace(self, name: str, text: str) -> None:
        path = self.directory / f".{name}-{os.getpid()}"
        path.write_text(text)
        path.replace(self.directory / name)
