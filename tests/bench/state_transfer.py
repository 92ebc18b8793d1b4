"""How long a state takes from one process to another, against the same bytes through raw sockets.

    python tests/bench/state_transfer.py           (a part of bench_downtime.py)

A sender process and this one, over loopback; state and raw bytes alternate. `state_s` is what the receiver
measures: from the first message in the pause until everything is restored and checked.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
from typing import Any

import torch

from tm_slurm.state import Receiver, Sender, capture, digest, receive_raw, send_raw

LIMIT_S = 120.0
WIDTH = 1024
COPIES = 3
"""A weight and AdamW's two moments of it."""

PAIRS = 7


def state_of(total_bytes: int, value: float) -> dict[str, Any]:
    """A model with AdamW, together about `total_bytes`."""
    torch.set_num_threads(1)
    layers = max(1, round(total_bytes / (COPIES * 4 * (WIDTH * WIDTH + WIDTH))))
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, value)
        parameter.grad = torch.full_like(parameter, value)
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def serve(port: int, total_bytes: int, pairs: int) -> None:
    """The sender process: raw bytes and the state in turn, `pairs` times."""
    state = state_of(total_bytes, 0.5)
    raw = socket.create_connection(("127.0.0.1", port), LIMIT_S)
    carrier = socket.create_connection(("127.0.0.1", port), LIMIT_S)
    sender = Sender(carrier)
    sender.prepare(capture(state, 0), timeout_s=LIMIT_S)
    size = capture(state, 0).nbytes
    for step in range(pairs):
        send_raw([raw], size, timeout_s=LIMIT_S)
        sender.send(capture(state, step), timeout_s=LIMIT_S)
    print(digest(state), flush=True)


def measure(total_bytes: int, pairs: int = PAIRS) -> dict[str, Any]:
    """Ratios of state to raw, one of each pair; `state_s` and `floor_s` in seconds."""
    state = state_of(total_bytes, 0.25)
    size = capture(state, 0).nbytes
    rows = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(LIMIT_S)
        words = [sys.executable, __file__, "--serve", str(server.getsockname()[1])]
        words += ["--bytes", str(total_bytes), "--pairs", str(pairs)]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
            try:
                raw, carrier = server.accept()[0], server.accept()[0]
                receiver = Receiver(carrier, state)
                receiver.prepare(timeout_s=LIMIT_S)
                for _ in range(pairs):
                    floor_s = size / receive_raw([raw], size, timeout_s=LIMIT_S)
                    report = receiver.receive(timeout_s=LIMIT_S)
                    rows.append({"state_s": report.seconds, "floor_s": floor_s})
                sent, _ = process.communicate(timeout=LIMIT_S)
            except BaseException:
                process.kill()
                raise
    if sent.strip() != digest(state):
        raise AssertionError("the state that has arrived is not the one that was sent")
    return {"bytes": size, "pairs": rows, "ratios": [row["state_s"] / row["floor_s"] for row in rows]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--serve", type=int, help="be the sender and connect to this port")
    parser.add_argument("--bytes", type=int, default=256 << 20)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    given = parser.parse_args()
    if given.serve is not None:
        serve(given.serve, given.bytes, given.pairs)
    else:
        print(measure(given.bytes, given.pairs))


if __name__ == "__main__":
    main()
