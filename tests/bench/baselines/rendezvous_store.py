"""The TCP store of a rendezvous, in a process of its own: python -m baselines.rendezvous_store PORT"""

from __future__ import annotations

import signal
import sys

from torch.distributed import TCPStore

if __name__ == "__main__":
    store = TCPStore("0.0.0.0", int(sys.argv[1]), is_master=True, wait_for_workers=False)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
