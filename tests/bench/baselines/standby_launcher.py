"""A launcher on the node in reserve: imported, and about to join the rendezvous when its turn comes.

python -m baselines.standby_launcher MODULE ARGUMENTS…
"""

from __future__ import annotations

import importlib
import sys

from baselines.run_files import RunFiles

if __name__ == "__main__":
    module = importlib.import_module(sys.argv[1])
    importlib.import_module("torch.distributed.elastic.rendezvous.c10d_rendezvous_backend")
    RunFiles.from_environment().await_turn()
    module.main(sys.argv[2:])
