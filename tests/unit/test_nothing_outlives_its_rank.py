"""What a rank process has started ends with it, even what has left its session."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

AGENT = """
import os, subprocess, sys
from pathlib import Path
from tm_slurm.agent.orphans import adopt_orphans, end_orphans

adopt_orphans()
quiet = "stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL"
sleep = f"subprocess.Popen(['sleep', '60'], start_new_session=True, {quiet})"
rank = f"import subprocess; print({sleep}.pid)"
other = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
marked = {**os.environ, "TM_SLURM_INCARNATION": "77"}
orphan = int(subprocess.run([sys.executable, "-c", rank], env=marked, capture_output=True, check=True).stdout)
assert int(Path(f"/proc/{orphan}/stat").read_text().rpartition(")")[2].split()[1]) == os.getpid()
end_orphans(76)
assert Path(f"/proc/{orphan}").exists()
end_orphans(77)
assert not Path(f"/proc/{orphan}").exists()
assert other.poll() is None
other.kill()
"""


def test_a_child_that_left_the_session_is_ended_with_its_rank_and_nothing_else() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", AGENT], cwd=root, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
