"""Finding a job's directory again by the job's id: one link a job, kept apart by cluster, since every cluster
counts its jobs from 1.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from tm_slurm.slurm.configuration import cluster_identity

_UNKNOWN_CLUSTER = "unknown"
_ATTEMPTS = 3


def register(job_id: int, path: Path) -> None:
    """Remember, for this user, where the directory of a job of this cluster is; a home directory that cannot
    be written is no error.
    """
    root = _root()
    folder = root / (cluster_identity() or _UNKNOWN_CLUSTER)
    for _ in range(_ATTEMPTS):  # somebody else may tidy the new folder away before anything is in it
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            fresh = folder / f".{job_id}.{os.getpid()}.{secrets.token_hex(4)}"
            fresh.symlink_to(path)
            fresh.replace(folder / str(job_id))
            break
    with contextlib.suppress(OSError):
        _tidy(root)


def registered(job_id: int) -> Path | None:
    """Return where the directory of a job of this cluster was made last, or None when none is known.

    Where no cluster is configured, the only job of that id counts, of whatever cluster it is.
    """
    cluster = cluster_identity()
    root = _root()
    if cluster is not None:
        return _target(root / cluster / str(job_id))
    found = {target for link in root.glob(f"*/{job_id}") if (target := _target(link)) is not None}
    return found.pop() if len(found) == 1 else None


def all_registered() -> dict[int, Path]:
    """Return the directories of all jobs of this cluster that are known; where no cluster is configured, of
    all those whose id is known once only.
    """
    cluster = cluster_identity()
    found: dict[int, set[Path]] = {}
    for link in _root().glob(f"{cluster or '*'}/*"):
        target = _target(link) if link.name.isdigit() else None
        if target is not None:
            found.setdefault(int(link.name), set()).add(target)
    return {job_id: paths.pop() for job_id, paths in found.items() if len(paths) == 1}


def clusters_with(job_id: int) -> list[str]:
    """Return the clusters, by their identity, of which a job with that id is known."""
    return sorted(link.parent.name for link in _root().glob(f"*/{job_id}") if link.is_symlink())


def _target(link: Path) -> Path | None:
    try:
        return Path(os.readlink(link))
    except OSError:
        return None


def _tidy(root: Path) -> None:
    """Remove links to directories that are gone, and the folders of clusters of which nothing is left."""
    for folder in root.iterdir():
        if folder.is_symlink() or not folder.is_dir():
            continue
        for link in folder.iterdir():
            if not link.exists():
                link.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            folder.rmdir()


def _root() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state) / "tm_slurm" / "jobs"
