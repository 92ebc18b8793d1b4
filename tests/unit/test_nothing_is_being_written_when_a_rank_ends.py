"""A thread that writes a checkpoint while the interpreter ends would abort the rank process, and the job with
it, although all steps are done."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest
import torch
from snapshot_examples import SECRET
from state_examples import training

from tm_slurm.config.model import PolicyConfig
from tm_slurm.runtime import checkpoint
from tm_slurm.runtime.agent_link import AgentLink
from tm_slurm.runtime.sharing import Shares
from tm_slurm.runtime.storing import Storing
from tm_slurm.runtime.vote import CHECKPOINT

torch.set_num_threads(1)


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("tm-")}


def test_a_checkpoint_that_is_being_written_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_go_on, write = threading.Event(), threading.Event(), checkpoint.write

    def slowly(*args: object, **kwargs: object) -> None:
        begun.set()
        assert may_go_on.wait(10.0)
        write(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoint, "write", slowly)
    before = threads()
    agent, own = socket.socketpair()
    with agent, own:
        storing = Storing(SECRET, tmp_path, PolicyConfig(), AgentLink(own))
        storing.at_boundary(CHECKPOINT, training(1, 1), 1, shares=Shares(), epoch=0)
        assert begun.wait(10.0)
        threading.Timer(0.1, may_go_on.set).start()
        storing.close()
        assert threads() <= before
        assert list(tmp_path.rglob("rank-00000.json"))
        storing.handlers()["publish"]({"step": 1, "epoch": 0, "world_size": 1})  # comes too late
        assert threads() <= before
