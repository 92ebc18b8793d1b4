"""Where a local cluster keeps its files: one directory of its own, removed with it."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from tm_slurm.localcluster.errors import LocalClusterError

_LONGEST_SOCKET = "spool/n9999/n9999_4294967295.4294967295"
"""The longest name of a socket that Slurm makes below the directory."""
_UNIX_PATH_MAX = 107
_FILES = (
    "slurm.conf",
    "cgroup.conf",
    "hosts",
    "cluster.json",
    "cluster.json.new",
    "slurmctld.pid",
    "slurmd.*.pid",
)
_FOLDERS = ("munge", "state", "spool", "log", "plugins")


@dataclass(frozen=True)
class Layout:
    """Paths of one cluster. `directory` is absolute and free of symbolic links."""

    directory: Path

    @classmethod
    def of(cls, name: str, directory: str | os.PathLike[str] | None) -> Layout:
        """The layout of a cluster by its name, or in a directory of the caller's choice.

        Raises:
            LocalClusterError: the name is not a plain word, or the path is too long for a Unix socket.
        """
        if not re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,31}", name):
            raise LocalClusterError(
                f"cluster name {name!r}: expected at most 32 lower-case letters, digits, '-' or '_'"
            )
        chosen = Path(directory).expanduser() if directory is not None else default_root() / name
        layout = cls(Path(os.path.realpath(chosen)))
        room = _UNIX_PATH_MAX - len(_LONGEST_SOCKET) - 1
        if len(os.fsencode(layout.directory)) > room:
            raise LocalClusterError(
                f"directory {layout.directory} is too long for Slurm's sockets "
                f"(at most {room} bytes): choose another with --directory"
            )
        if re.search(r"[\s%#\"'\\]", str(layout.directory)):
            raise LocalClusterError(
                f"directory {str(layout.directory)!r}: Slurm's files cannot name it "
                "(blank, quote, '%', '#' or backslash): choose another with --directory"
            )
        return layout

    @property
    def id(self) -> str:
        """Eight hexadecimal digits that tell this cluster from others on the machine."""
        return sha256(os.fsencode(self.directory)).hexdigest()[:8]

    @property
    def slurm_conf(self) -> Path:
        return self.directory / "slurm.conf"

    @property
    def cgroup_conf(self) -> Path:
        return self.directory / "cgroup.conf"

    @property
    def hosts(self) -> Path:
        return self.directory / "hosts"

    @property
    def record(self) -> Path:
        return self.directory / "cluster.json"

    @property
    def lock(self) -> Path:
        return self.directory / "lock"

    @property
    def plugins(self) -> Path:
        """Plugins of Slurm that are built for this cluster."""
        return self.directory / "plugins"

    @property
    def munge_key(self) -> Path:
        return self.directory / "munge" / "key"

    @property
    def munge_socket(self) -> Path:
        return self.directory / "munge" / "socket"

    def options(self, name: str) -> str:
        """What `tm-slurm cluster COMMAND` needs to mean the cluster `name` here; mostly empty, else with a
        blank before it.
        """
        named = "" if name == "local" else f" --name {name}"
        is_default = str(self.directory) == os.path.realpath(default_root() / name)
        return named if is_default else f"{named} --directory {self.directory}"

    def log(self, daemon: str) -> Path:
        """The log of `munged`, `slurmctld`, or `slurmd.NODE`."""
        return self.directory / "log" / f"{daemon}.log"

    def claim(self) -> None:
        """Makes the directory, or takes over one that is empty or already holds a cluster.

        Raises:
            LocalClusterError: it holds something else, or cannot be written.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o755)
            strange = sorted(set(os.listdir(self.directory)) - self._own_names())
            if strange:
                raise LocalClusterError(
                    f"directory {self.directory} holds other things ({strange[0]}): choose an empty one"
                )
            if self.directory.stat().st_uid != os.geteuid():
                raise PermissionError(13, "belongs to another user")
        except OSError as error:
            raise LocalClusterError(
                f"directory {self.directory}: {error.strerror}: choose one of your own with --directory"
            ) from None

    def prepare(self) -> None:
        """Empties the directory (but for the lock) and lays out fresh folders and a fresh munge key."""
        self._remove_contents()
        os.chmod(self.directory, 0o755)
        for folder in _FOLDERS:
            path = self.directory / folder
            path.mkdir()
            os.chmod(path, 0o755)
        key = os.open(self.munge_key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400)
        with os.fdopen(key, "wb") as stream:
            stream.write(os.urandom(128))

    def remove(self) -> None:
        """Removes what the cluster put there, the lock last, and the directory if nothing else is in it."""
        self._remove_contents()
        self.lock.unlink(missing_ok=True)
        try:
            self.directory.rmdir()
            if self.directory.parent == default_root():
                self.directory.parent.rmdir()
        except OSError:  # not empty (a waiting `up`, or another cluster), or already gone
            return

    def last_words(self, daemon: str, said: str = "") -> str:
        """The last two complaints in a daemon's log or in what it `said`, as one line."""
        for log in (self.log(daemon), self.log(f"{daemon}.out")):
            if log.exists():
                said += "\n" + log.read_text(errors="replace")
        lines = [re.sub(r"^\[\S+\] |^\w+: ", "", line).strip() for line in said.splitlines() if line.strip()]
        complaints = [line for line in lines if re.search(r"error|fatal", line, re.IGNORECASE)]
        return "; ".join(dict.fromkeys((complaints or lines or ["it said nothing"])[-2:]))

    def _own_names(self) -> set[str]:
        names = {path.name for pattern in _FILES for path in self.directory.glob(pattern)}
        return names | set(_FOLDERS) | {"lock"}

    def _remove_contents(self) -> None:
        for pattern in _FILES:
            for path in self.directory.glob(pattern):
                path.unlink(missing_ok=True)
        for folder in _FOLDERS:
            path = self.directory / folder
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)


def default_root() -> Path:
    """Where clusters live by default: /var/lib/tm_slurm for root, else in the user's state directory."""
    if os.geteuid() == 0:
        return Path("/var/lib/tm_slurm")
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "tm_slurm"
