"""A user without rights, who can run this checkout's Python on every host of a local cluster, wherever it is
kept."""

from __future__ import annotations

import contextlib
import os
import pwd
import sys
from collections.abc import Iterator
from pathlib import Path

from administration import open_directory

from tm_slurm.localcluster import LocalCluster

USER = "nobody"
PROJECT = Path(__file__).parents[2]

# In the mount namespace of one host: a folder that lets nobody in ($1) is replaced by one that holds nothing
# but the paths given ($2 …), which are below it.
_LET_IN = """
set -e
closed=$1; shift
stand=$(mktemp -d)
mount -t tmpfs -o mode=755 tmpfs "$stand"
for path; do
    mkdir -p "$stand${path#"$closed"}"
    mount --rbind "$path" "$stand${path#"$closed"}"
done
mount --rbind "$stand" "$closed"
umount -l "$stand"
rmdir "$stand"
"""


def closed_above(path: Path) -> Path | None:
    """The topmost folder on the way to `path` that other users may not pass."""
    return next((folder for folder in reversed(path.parents) if not folder.stat().st_mode & 0o001), None)


def let_in(cluster: LocalCluster) -> None:
    """Let every user reach the interpreter and the checkout on all hosts of a cluster in mode namespaces. The
    machine itself stays as it is."""
    needed: dict[Path, set[Path]] = {}
    for path in (Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve(), PROJECT):
        closed = closed_above(path)
        if closed is not None:
            needed.setdefault(closed, set()).add(path)
    for closed, paths in needed.items():
        outermost = sorted(path for path in paths if not any(other in path.parents for other in paths))
        for host in (None, *cluster.node_names):
            cluster.run(["sh", "-c", _LET_IN, "sh", closed, *outermost], node=host, timeout_s=20.0)


@contextlib.contextmanager
def directory_of(user: str) -> Iterator[Path]:
    """A directory that belongs to a user."""
    account = pwd.getpwnam(user)
    with open_directory(f"of-{user}") as path:
        os.chown(path, account.pw_uid, account.pw_gid)
        yield path
