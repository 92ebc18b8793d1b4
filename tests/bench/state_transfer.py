"""How long a state takes from other processes to this one, against the same bytes through raw sockets.

    python tests/bench/state_transfer.py [--bytes N]           (a part of bench_downtime.py)

One or two sender processes (replicas) and this one, over loopback; raw bytes, the state from one source and
the state from two alternate. `state_s` is what the receiver measures: from the first message in the pause
until everything is restored and checked. Where there are fewer processors than processes, two sources cannot
be faster than one.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import torch

from tm_slurm.state import Receiver, Sender, capture, digest, receive_raw, send_raw

LIMIT_S = 120.0
WIDTH = 1024
COPIES = 3
"""A weight and AdamW's two moments of it."""

SOURCES = 2
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


def serve(port: int, total_bytes: int, share: int, rounds: int) -> None:
    """A sender process: raw bytes and the whole state (the first one), then its share of the state, and so
    on, each when the receiver takes it."""
    state = state_of(total_bytes, 0.5)
    size = capture(state, 0).nbytes
    raw, whole, shared = (socket.create_connection(("127.0.0.1", port), LIMIT_S) for _ in range(3))
    alone, one_of_all = Sender(whole), Sender(shared, share=(share, SOURCES))
    if share == 0:
        alone.prepare(capture(state, 0), timeout_s=LIMIT_S)
    one_of_all.prepare(capture(state, 0), timeout_s=LIMIT_S)
    for step in range(rounds):
        if share == 0:
            send_raw([raw], size, timeout_s=LIMIT_S)
            alone.send(capture(state, step), timeout_s=LIMIT_S)
        raw.recv(1)  # the receiver is there for the shares
        one_of_all.send(capture(state, step), timeout_s=LIMIT_S)
    print(digest(state), flush=True)


@contextlib.contextmanager
def source(server: socket.socket, total_bytes: int, share: int, rounds: int) -> Iterator[Any]:
    """A sender process and its three connections; it must end well."""
    words = [sys.executable, __file__, "--serve", str(server.getsockname()[1]), "--share", str(share)]
    words += ["--bytes", str(total_bytes), "--rounds", str(rounds)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process, [server.accept()[0] for _ in range(3)]
        except BaseException:
            process.kill()
            raise


def measure(total_bytes: int, rounds: int = PAIRS) -> dict[str, Any]:
    """Ratios of state to raw, one of each round, and of two sources to one; `state_s` and `floor_s` in
    seconds."""
    state = state_of(total_bytes, 0.25)
    size = capture(state, 0).nbytes
    rows = []
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        server.settimeout(LIMIT_S)
        sources = [
            stack.enter_context(source(server, total_bytes, share, rounds)) for share in range(SOURCES)
        ]
        raws = [sockets[0] for _, sockets in sources]
        alone = Receiver(sources[0][1][1], state)
        alone.prepare(timeout_s=LIMIT_S)
        both = Receiver.of_sources([sockets[2] for _, sockets in sources], state)
        both.prepare(timeout_s=LIMIT_S)
        for _ in range(rounds):
            floor_s = size / receive_raw([raws[0]], size, timeout_s=LIMIT_S)
            state_s = alone.receive(timeout_s=LIMIT_S).seconds
            for raw in raws:
                raw.sendall(b"g")
            both_s = both.receive(timeout_s=LIMIT_S).seconds
            rows.append({"floor_s": floor_s, "state_s": state_s, "state_of_two_sources_s": both_s})
        digests = {process.communicate(timeout=LIMIT_S)[0].strip() for process, _ in sources}
    if digests != {digest(state)}:
        raise AssertionError("the state that has arrived is not the one that was sent")
    return {
        "bytes": size,
        "rounds": rows,
        "ratios": [row["state_s"] / row["floor_s"] for row in rows],
        "two_to_one_source": [row["state_of_two_sources_s"] / row["state_s"] for row in rows],
    }


def shown(measured: dict[str, Any]) -> str:
    """Both ratios in one line: median, minimum, maximum."""
    parts = []
    for name in ("ratios", "two_to_one_source"):
        values = measured[name]
        parts.append(f"{name} {statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})")
    cores = os.cpu_count()
    return f"{measured['bytes'] / 1e6:.0f} MB, {cores} processors: {', '.join(parts)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--serve", type=int, help="be a sender and connect to this port")
    parser.add_argument("--share", type=int, default=0)
    parser.add_argument("--bytes", type=int, default=256 << 20)
    parser.add_argument("--rounds", type=int, default=PAIRS)
    given = parser.parse_args()
    if given.serve is not None:
        serve(given.serve, given.bytes, given.share, given.rounds)
    else:
        print(shown(measure(given.bytes, given.rounds)))


if __name__ == "__main__":
    main()
