"""torchft's lighthouse; its settings as JSON: python -m baselines.torchft_lighthouse '{"bind": …}'"""

from __future__ import annotations

import json
import signal
import sys

from torchft.coordination import LighthouseServer

if __name__ == "__main__":
    lighthouse = LighthouseServer(**json.loads(sys.argv[1]))
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    lighthouse.shutdown()
