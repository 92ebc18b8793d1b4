"""What runs on each node for `tm-slurm doctor`: a task of a step that answers questions, a line of JSON each.

    python -m tm_slurm.doctor.probe DIRECTORY

Every task hears every question on its standard input (srun gives it to all), and answers with its node's
name. It ends with its input. Imports no torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import resource
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from tm_slurm import __version__
from tm_slurm.control import listening_at
from tm_slurm.slurm import AddressUnknown, reachable_address

CONNECT_S = 3.0
SEE_S = 5.0
"""How long a file of another node may take to be seen: shared file systems cache for some seconds."""
_LOOK_AGAIN_S = 0.1
_SIOCGIFADDR = 0x8915

Answer = dict[str, Any]


class Probe:
    """One node's answers; see the methods `ask_…`."""

    def __init__(self, directory: Path, node: str) -> None:
        self.directory = directory
        self.node = node
        self._lock = FileLock(directory / "lock")
        self._listener: socket.socket | None = None

    def ask_who(self, question: Answer) -> Answer:
        """Host, address, limits, interfaces, and the sums of the files that were named."""
        address, problem = None, ""
        try:
            address = reachable_address(self.node, job_nodes=question["nodes"])
        except AddressUnknown as error:
            problem = str(error)
        port = self._listen(address) if address is not None else None
        return {
            "host": socket.gethostname(),
            "address": address,
            "problem": problem,
            "port": port,
            "version": __version__,
            "open_files": resource.getrlimit(resource.RLIMIT_NOFILE),
            "interfaces": interfaces(),
            "named_interfaces": {
                name: os.environ[name]
                for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
                if os.environ.get(name)
            },
            "files": {name: _sum_of(name) for name in question["files"]},
        }

    def _listen(self, address: str) -> int:
        self._listener = listening_at(address)
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()
        return int(self._listener.getsockname()[1])

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.sendall(self.node.encode())

    def ask_clock(self, question: Answer) -> Answer:
        return {"clock": time.time()}

    def ask_write(self, question: Answer) -> Answer:
        """Leave a file for the others."""
        try:
            (self.directory / f"from-{self.node}").write_text(self.node)
        except OSError as error:
            return {"error": f"{error.filename}: {error.strerror}"}
        return {}

    def ask_see(self, question: Answer) -> Answer:
        """Of which of `nodes` the file is seen here."""
        missing = set(question["nodes"])
        until = time.monotonic() + SEE_S
        while missing:
            missing = {name for name in missing if not self._is_from(name)}
            if not missing or time.monotonic() > until:
                break
            time.sleep(_LOOK_AGAIN_S)  # nothing tells of a file that another host has written
        return {"missing": sorted(missing)}

    def _is_from(self, node: str) -> bool:
        try:
            return (self.directory / f"from-{node}").read_text() == node
        except OSError:
            return False

    def ask_lock(self, question: Answer) -> Answer:
        """Take the lock if it is free, and keep it if that is asked for."""
        if question["node"] != self.node:
            return {}
        try:
            self._lock.acquire(timeout=question["wait_s"])
        except Timeout:
            return {"taken": False}
        except (OSError, NotImplementedError) as error:
            return {"error": str(error)}
        if not question["keep"]:
            self._lock.release()
        return {"taken": True}

    def ask_unlock(self, question: Answer) -> Answer:
        self._lock.release()
        return {}

    def ask_reach(self, question: Answer) -> Answer:
        """Resolve each of `hosts` (node to name), connect to each of `listeners` (node to address, port)."""
        names: dict[str, list[str]] = {}
        for node, host in question["hosts"].items():
            try:
                found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
                names[node] = sorted({str(entry[4][0]) for entry in found})
            except OSError:
                names[node] = []
        refused = {}
        for node, (address, port) in question["listeners"].items():
            try:
                with socket.create_connection((address, port), timeout=CONNECT_S) as connection:
                    said = connection.recv(256).decode(errors="replace")
                if said != node:
                    refused[node] = f"{address}:{port} answers as {said or 'nobody'}"
            except OSError as error:
                refused[node] = f"{address}:{port}: {error.strerror or error}"
        return {"names": names, "refused": refused}


def interfaces() -> dict[str, str]:
    """The network interfaces that have an IPv4 address: name to address."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def _sum_of(name: str) -> str | None:
    """None for a file that is not there; of a directory or a pattern, nothing is looked at."""
    try:
        return hashlib.sha256(Path(name).read_bytes()).hexdigest()[:12]
    except OSError:
        return None


def main() -> None:
    probe = Probe(Path(sys.argv[1]), os.environ.get("SLURMD_NODENAME") or socket.gethostname())
    answers: dict[str, Callable[[Answer], Answer]] = {
        name.removeprefix("ask_"): getattr(probe, name) for name in dir(probe) if name.startswith("ask_")
    }
    _say({"node": probe.node, "to": "hello"})
    for line in sys.stdin:
        question = json.loads(line)
        answer = answers[question["ask"]](question)
        _say({"node": probe.node, "to": question["ask"], "number": question["number"], **answer})


def _say(answer: Answer) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
