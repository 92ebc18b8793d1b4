"""An agent that comes late, or loses its leader at the end, finds the verdict and does not begin to lead."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from tm_slurm.agent.main import Agent
from tm_slurm.agent.surroundings import Surroundings
from tm_slurm.config import loads
from tm_slurm.coordinator.election import LeaderFile


def test_a_late_agent_ends_at_once_with_its_ranks(tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text("import time\ntime.sleep(60)\n")
    config = loads(json.dumps({"train": {"script": str(script)}}), name="test")
    (tmp_path / "logs").mkdir()
    (tmp_path / "secret").write_bytes(b"s" * 32)
    (tmp_path / "secret").chmod(0o600)
    (tmp_path / "verdict.json").write_text('{"state": "failed", "exit_code": 1, "reason": "test"}')

    async def run() -> int:
        agent = Agent(tmp_path, config, Surroundings("n1", None, ("n1", "n2"), 0), None)
        return await asyncio.wait_for(agent.run(), 15.0)

    assert asyncio.run(run()) == 0
    assert LeaderFile.read(tmp_path) is None
