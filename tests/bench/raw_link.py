"""The cables of a local cluster's nodes: made slower with `tc`, and what raw sockets get through them from
one node to another.

    python tests/bench/raw_link.py (--listen HOST | --call HOST PORT)      one end, which RawLink starts
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from tm_slurm.localcluster import LocalCluster
from tm_slurm.state import receive_raw, send_raw

LIMIT_S = 120.0
CABLE = "eth0"
LEAST_BURST_BYTES = 128 << 10
"""A frame of the kernel's own segmentation goes in one burst."""

BURST_S = 0.001
QUEUE_MS = 20


@contextlib.contextmanager
def shaped(cluster: LocalCluster, bytes_s: float) -> Iterator[None]:
    """No node sends faster than `bytes_s` bytes a second inside. LocalClusterError where `tc` fails."""
    burst = max(LEAST_BURST_BYTES, int(bytes_s * BURST_S))
    limit = ["rate", f"{round(8 * bytes_s)}bit", "burst", str(burst), "latency", f"{QUEUE_MS}ms"]
    with contextlib.ExitStack() as undone:
        for node in cluster.node_names:
            cluster.run(["tc", "qdisc", "add", "dev", CABLE, "root", "tbf", *limit], node=node)
            undone.callback(cluster.run, ["tc", "qdisc", "del", "dev", CABLE, "root"], node=node)
        yield


class _End:
    """One end of a raw link, a process on its node."""

    def __init__(self, cluster: LocalCluster, node: str, *words: str) -> None:
        command, environment = cluster.command([sys.executable, __file__, *words], node=node)
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def tell(self, do: str, total_bytes: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([do, total_bytes]) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        said = self._process.stdout.readline()
        if not said:
            raise AssertionError(f"an end of the raw link has ended with {self._process.wait(LIMIT_S)}")
        return json.loads(said)

    def end(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=LIMIT_S)


class RawLink:
    """A TCP connection between two nodes of a cluster, for as long as it is entered."""

    def __init__(self, cluster: LocalCluster, nodes: Sequence[str]) -> None:
        self._cluster, self._nodes = cluster, nodes
        self._ends: dict[str, _End] = {}

    def __enter__(self) -> RawLink:
        one, other = self._nodes
        host = self._cluster.address(one)
        try:
            self._ends[one] = _End(self._cluster, one, "--listen", host)
            port = self._ends[one].answer()
            self._ends[other] = _End(self._cluster, other, "--call", host, str(port))
            for end in self._ends.values():
                end.answer()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for end in self._ends.values():
            end.end()

    def bytes_s(self, sender: str, receiver: str, total_bytes: int) -> float:
        """Bytes a second, of `total_bytes` from the memory of one node to that of the other."""
        self._ends[sender].tell("send", total_bytes)
        self._ends[receiver].tell("receive", total_bytes)
        self._ends[sender].answer()
        return float(self._ends[receiver].answer())


def be_an_end(connection: socket.socket) -> None:
    print(json.dumps("connected"), flush=True)
    for line in sys.stdin:
        do, total_bytes = json.loads(line)
        half = send_raw if do == "send" else receive_raw
        print(json.dumps(half([connection], total_bytes, timeout_s=LIMIT_S)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--listen", metavar="HOST", help="wait for the other end, whose port is printed")
    which.add_argument("--call", nargs=2, metavar=("HOST", "PORT"))
    given = parser.parse_args()
    if given.call:
        be_an_end(socket.create_connection((given.call[0], int(given.call[1])), LIMIT_S))
        return
    with socket.create_server((given.listen, 0)) as server:
        server.settimeout(LIMIT_S)
        print(server.getsockname()[1], flush=True)
        be_an_end(server.accept()[0])


if __name__ == "__main__":
    main()
