"""The job directory: where it is, how it is made, how it is found again by the job's id.

Everybody who needs it makes it: the submitting command, the batch script, the agent of every node, in any
order and at the same time. Whoever comes first decides what is in it; the others find that.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import tempfile
from dataclasses import replace
from pathlib import Path

from tm_slurm.config import Config, dump

SECRET_BYTES = 32
_JOB_ID = "%j"


class JobDirError(RuntimeError):
    """The job directory cannot be used; one line that says why and what to do."""


def resolve(config: Config, *, base: Path, python: str) -> Config:
    """Return `config` with every path absolute, so that it means the same on every node and at every time.

    `base` is the directory of submission, `python` the interpreter where the configuration names none. In
    `job.directory` the place of the job's id is left as %j.
    """
    directory = os.path.expanduser(config.job.directory)
    if _JOB_ID not in directory:
        directory = os.path.join(directory, _JOB_ID)
    train = config.train
    if train.script is not None:
        train = replace(train, script=str(base / Path(train.script).expanduser()))
    job = replace(config.job, directory=str(base / directory), python=config.job.python or python)
    return replace(config, job=job, train=train)


def job_directory(config: Config, job_id: int) -> Path:
    """Return where the directory of job `job_id` is; `config` is a resolved one."""
    return Path(config.job.directory.replace(_JOB_ID, str(job_id)))


def shared_root(config: Config) -> Path:
    """Return the lowest folder that does not depend on the job's id; `config` is a resolved one."""
    path = Path(config.job.directory)
    while _JOB_ID in str(path):
        path = path.parent
    return path


def prepare_job_dir(config: Config, job_id: int) -> Path:
    """Make the directory of job `job_id` (mode 0700) with its secret and its copy of the configuration.

    `config` is a resolved one. Safe to call from many processes and nodes at once, and again when the job was
    requeued: what is there is kept. Raises JobDirError.
    """
    path = job_directory(config, job_id)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        _make_private(path)
        for folder in ("logs", "requests"):
            (path / folder).mkdir(mode=0o700, exist_ok=True)
        _write_once(path / "secret", secrets.token_bytes(SECRET_BYTES))
        _write_once(path / "config.yaml", dump(config).encode())
    except OSError as error:
        raise JobDirError(
            f"job directory {path}: {error.strerror} ({error.filename}); set job.directory to a place that "
            f"you can write and all nodes share"
        ) from error
    register(job_id, path)
    return path


def set_verdict_aside(path: Path) -> None:
    """Rename the verdict of an earlier run of the same job, if there is one: this run has none yet."""
    number = 0
    while (path / f"verdict.{number}.json").exists():
        number += 1
    with contextlib.suppress(FileNotFoundError):
        (path / "verdict.json").rename(path / f"verdict.{number}.json")


def register(job_id: int, path: Path) -> None:
    """Remember, for this user, where the directory of a job is; a home directory that cannot be written is
    no error.
    """
    folder = _registry()
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = folder / f".{job_id}.{os.getpid()}.{secrets.token_hex(4)}"
        fresh.symlink_to(path)
        fresh.replace(folder / str(job_id))
        for link in folder.iterdir():
            if not link.exists():
                link.unlink(missing_ok=True)


def registered(job_id: int) -> Path | None:
    """Return where the directory of a job of this user was made last, or None when none is known."""
    try:
        return Path(os.readlink(_registry() / str(job_id)))
    except OSError:
        return None


def _registry() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state) / "tm_slurm" / "jobs"


def _make_private(path: Path) -> None:
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise JobDirError(f"job directory {path}: expected a directory, found something else; remove it")
    if found.st_uid != os.geteuid():
        raise JobDirError(
            f"job directory {path}: belongs to somebody else; set job.directory to a place of yours"
        )
    if stat.S_IMODE(found.st_mode) != 0o700:
        path.chmod(0o700)


def _write_once(path: Path, content: bytes) -> None:
    """Create `path` (mode 0600) with `content`, whole or not at all, unless it exists."""
    if path.exists():
        return
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # O_EXCL, mode 0600
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        with contextlib.suppress(FileExistsError):
            _link(temporary, path)
    finally:
        os.unlink(temporary)


def _link(source: str, path: Path) -> None:
    """Give the file a second name, which fails if that exists; where there are no hard links, write it
    again.
    """
    try:
        os.link(source, path)
    except OSError as error:
        if error.errno not in {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}:
            raise
        with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as stream:
            stream.write(Path(source).read_bytes())
