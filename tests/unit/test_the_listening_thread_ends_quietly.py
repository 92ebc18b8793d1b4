"""A rank process that has done its work ends with its own exit code, whatever its listening thread does."""

from __future__ import annotations

import socket
import subprocess
import sys

SCRIPT = """
import os, sys, time
from tm_slurm.comm import Endpoint
from tm_slurm.runtime import agent_link

agent_link.BEAT_S = 0.0
link = agent_link.AgentLink.from_environment()
endpoint = Endpoint(secret=b"s" * 32, job="j", host="127.0.0.1", incarnation=1)
looks = []

def look():  # nearly all the time the thread is in native code
    for _ in range(200):
        endpoint.linked()
    looks.append(1)

link.start({}, every_beat=look)
while len(looks) < 3:
    time.sleep(0.001)
"""


def test_a_thread_in_native_code_does_not_abort_the_end() -> None:
    for _ in range(5):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            done = subprocess.run(
                [sys.executable, "-c", SCRIPT],
                capture_output=True,
                check=False,
                env={"TM_SLURM_AGENT_FD": str(theirs.fileno()), "PYTHONWARNINGS": "ignore"},
                pass_fds=[theirs.fileno()],
                text=True,
                timeout=60,
            )
        assert (done.returncode, done.stderr) == (0, "")
