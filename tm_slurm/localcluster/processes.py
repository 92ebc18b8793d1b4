"""Processes of this machine as /proc shows them, and how to signal them and nobody else."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tm_slurm.localcluster.errors import LocalClusterError


@dataclass(frozen=True)
class ProcessId:
    """A process that cannot be mistaken for a later one with the same number.

    `start` is the kernel's start time in clock ticks since boot.
    """

    pid: int
    start: int

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """The identity of a living process; None if there is none (a zombie counts as none)."""
        fields = _stat(pid)
        if fields is None or fields[0] in "ZX":
            return None
        return cls(pid, int(fields[19]))

    def alive(self) -> bool:
        return ProcessId.of(self.pid) == self

    def stopped(self) -> bool:
        """Whether the process is stopped by a signal (SIGSTOP)."""
        fields = _stat(self.pid)
        return fields is not None and fields[0] in "Tt" and self.alive()

    def send(self, signum: signal.Signals) -> bool:
        """Signals this very process; False if it is gone. Never reaches a process that took over its number.

        Raises:
            LocalClusterError: the process belongs to somebody else.
        """
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EPERM, errno.EINVAL):
                raise
            handle = None  # a kernel before 5.3
        try:
            if not self.alive():
                return False
            if handle is None:
                os.kill(self.pid, signum)
            else:
                signal.pidfd_send_signal(handle, signum)
        except ProcessLookupError:
            return False
        except PermissionError:
            raise LocalClusterError(
                f"process {self.pid} ({command_name(self.pid)}) belongs to another user: be that user or root"
            ) from None
        finally:
            if handle is not None:
                os.close(handle)
        return True


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the third (state) on."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()


def boot_id() -> str:
    """Changes with every boot of the machine: process start times only compare within one boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def every() -> Iterator[int]:
    """The numbers of all processes that are alive, zombies not among them."""
    for entry in os.listdir("/proc"):
        if entry.isdigit() and ProcessId.of(int(entry)) is not None:
            yield int(entry)


def command_name(pid: int) -> str:
    """The kernel's name of the program (at most 15 characters); empty if the process is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def environment_of(pid: int) -> frozenset[str]:
    """The `NAME=value` pairs a process was started with; empty if gone, not ours to read, or wiped."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return frozenset()
    return frozenset(os.fsdecode(item) for item in raw.split(b"\0") if item)


def open_files(pid: int) -> set[str]:
    """Paths of the files a process holds open; empty if it is gone or not ours to read."""
    folder = f"/proc/{pid}/fd"
    found = set()
    try:
        for name in os.listdir(folder):
            try:
                found.add(os.readlink(f"{folder}/{name}"))
            except OSError:  # closed meanwhile
                continue
    except OSError:
        return set()
    return found


def namespace(pid: int, kind: str) -> int | None:
    """The inode of a process's namespace (`net`, `pid`, …); None if it is gone or not ours to read."""
    try:
        return os.stat(f"/proc/{pid}/ns/{kind}").st_ino
    except OSError:
        return None


def parent(pid: int) -> int:
    """The parent's number, 0 if there is none."""
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def ancestors(pid: int) -> set[int]:
    """The process and all its ancestors."""
    line = set()
    while pid > 0:
        line.add(pid)
        pid = parent(pid)
    return line


def descendants(roots: Iterable[int]) -> set[int]:
    """All children, grandchildren … of some processes, the processes themselves not among them."""
    children: dict[int, list[int]] = {}
    for pid in every():
        children.setdefault(parent(pid), []).append(pid)
    found: set[int] = set()
    front = list(roots)
    while front:
        for child in children.get(front.pop(), []):
            if child not in found:
                found.add(child)
                front.append(child)
    return found


def identify(pids: Iterable[int]) -> set[ProcessId]:
    """Identities of those that are still alive."""
    return {found for pid in pids if (found := ProcessId.of(pid)) is not None}


def signal_all(find: Callable[[], set[ProcessId]], signum: signal.Signals, *, timeout_s: float) -> None:
    """Signals whatever `find` finds, again until it finds nothing: nothing escapes by forking.

    Raises:
        LocalClusterError: something was still found after `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while found := find():
        for process in found:
            process.send(signum)
        if time.monotonic() > deadline:
            names = ", ".join(f"{p.pid} ({command_name(p.pid)})" for p in sorted(found, key=lambda p: p.pid))
            raise LocalClusterError(f"{signum.name} had no effect within {timeout_s:g} s on: {names}")
        time.sleep(0.01)
