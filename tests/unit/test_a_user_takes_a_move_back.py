"""`tm-slurm cancel-move`: users take back what they asked for before the switch; a drain they never do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from loopback_job import SECRET, Job

from tm_slurm.cli.app import main


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tm_slurm.coordinator.leader.TICK_S", 0.01)


async def typed(job_dir: Path, *words: str) -> Result:
    """A command, typed while the job goes on."""
    return await asyncio.to_thread(CliRunner().invoke, main, [words[0], str(job_dir), *words[1:]])


def play(job_dir: Path, act: Callable[[Job], object]) -> None:
    (job_dir / "config.yaml").touch()
    (job_dir / "secret").write_bytes(SECRET)
    (job_dir / "secret").chmod(0o600)

    async def main_() -> None:
        async with Job(job_dir) as job:
            job.lead("n4")
            await job.start()
            await act(job)  # type: ignore[misc]

    asyncio.run(main_())


@pytest.mark.parametrize(("phase", "held"), [("preparing", "joined"), ("armed", "vote")])
def test_a_request_is_taken_back_before_the_switch(tmp_path: Path, phase: str, held: str) -> None:
    async def act(job: Job) -> None:
        job.hold = {held}
        done = await typed(tmp_path, "migrate", "--node=n1", "--json")
        assert done.exit_code == 0 and not json.loads(done.output)["waits_for_a_standby"], done.output
        await job.until(phase, lambda: getattr(job.leader.state.move, "phase", "") == phase)
        done = await typed(tmp_path, "cancel-move", "--node=n1", "--json")
        assert done.exit_code == 0 and json.loads(done.output)["outcome"] == "cancelled", done.output
        assert job.leader.state.move is None and job.leader.state.nodes["n1"].notice is None
        assert "n1" in job.seats().values()

    play(tmp_path, act)


def test_too_late_is_said(tmp_path: Path) -> None:
    async def act(job: Job) -> None:
        job.hold = {"resumed"}
        await typed(tmp_path, "migrate", "--node=n1")
        await job.until("the switch", lambda: getattr(job.leader.state.move, "phase", "") == "switching")
        done = await typed(tmp_path, "cancel-move", "--node=n1")
        assert done.exit_code == 1 and "too late" in done.stderr, done.output

    play(tmp_path, act)


@pytest.mark.parametrize(
    ("node", "drained", "expected"),
    [
        ("n1", True, "scontrol update nodename=n1 state=resume"),
        ("n2", False, "nothing is to be moved off node n2"),
        ("n9", False, "node n9 is not in this job"),
    ],
)
def test_what_cannot_be_taken_back(tmp_path: Path, node: str, drained: bool, expected: str) -> None:
    async def act(job: Job) -> None:
        job.hold = {"joined"}
        if drained:
            job.drain(node)
            await job.until("a move", lambda: job.leader.state.move is not None)
        done = await typed(tmp_path, "cancel-move", f"--node={node}")
        assert done.exit_code == 2 and expected in done.stderr, done.output
        assert (job.leader.state.move is not None) == drained

    play(tmp_path, act)
