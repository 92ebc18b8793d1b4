"""What fails in the sandbox is said, and the standby stays; the same in a real step ends the process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tm_slurm.comm import PeerLost
from tm_slurm.runtime.surviving import Surviving


def runtime(*, sandbox: bool) -> Any:
    found: Any = Surviving()
    found.told = []
    link = SimpleNamespace(send=found.told.append)
    found._worker = SimpleNamespace(endpoint=SimpleNamespace(sandbox=sandbox), link=link, rank=2)
    found.state, found.step = {}, 7
    found._discarded = False
    return found


def test_in_the_sandbox_it_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    standby = runtime(sandbox=True)
    with standby.attempt():
        raise ValueError("no pickle")
    assert not standby._discarded and not standby.told
    assert "a shadow step has failed" in (said := capfd.readouterr().err) and "no pickle" in said


def test_a_real_step_raises() -> None:
    rank = runtime(sandbox=False)
    with pytest.raises(ValueError, match="no pickle"), rank.attempt():
        raise ValueError("no pickle")
    assert [(told["kind"], told["rank"], told["step"]) for told in rank.told] == [("failing", 2, 7)]


def test_a_lost_peer_cannot_be_in_the_sandbox() -> None:
    with pytest.raises(PeerLost), runtime(sandbox=True).attempt():
        raise PeerLost("rank 1 is lost")
