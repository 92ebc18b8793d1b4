"""The job directory: where it is and how it is made.

Everybody who needs it makes it: the submitting command, the batch script, the agent of every node, in any
order and at the same time. Whoever comes first decides what is in it; the others find that.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import tempfile
from dataclasses import replace
from pathlib import Path

from tm_slurm.config import Config, dump
from tm_slurm.submit.registry import register

SECRET_BYTES = 32
_JOB_ID = "%j"
_SUBMISSION = "submission"
_ATTEMPTS = 5


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


def named_for(config: Config, name: str) -> Config:
    """Return the resolved `config` with a directory for a job that has no id yet, nor ever another's id."""
    directory = config.job.directory.replace(_JOB_ID, name)
    return replace(config, job=replace(config.job, directory=directory))


def shared_root(config: Config) -> Path:
    """Return the lowest folder that does not depend on the job's id; `config` is a resolved one."""
    path = Path(config.job.directory)
    while _JOB_ID in str(path):
        path = path.parent
    return path


def new_submission() -> str:
    """Return a name for one submission: what tells a requeued job from another one that got the same id."""
    return secrets.token_hex(8)


def prepare_job_dir(config: Config, job_id: int | None, submission: str | None = None) -> Path:
    """Make the directory of job `job_id` (mode 0700) with its secret and its copy of the configuration.

    `config` is a resolved one. Safe to call from many processes and nodes at once: the directory appears
    whole, and everybody finds the same. What belongs to `submission` is kept, so a requeued job finds what
    it wrote; what another job with the same id left (ids begin anew on a new cluster) is renamed to
    DIRECTORY.old-SUBMISSION. Without a `submission` whatever is there is kept. Without a `job_id`, `config`
    is one of `named_for`. Raises JobDirError.
    """
    path = Path(config.job.directory) if job_id is None else job_directory(config, job_id)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(_ATTEMPTS):
            owner = _submission_of(path)
            if owner is not None and submission in {owner, None}:
                break
            if owner is not None:
                _set_aside(path, owner)
            _appear(path, config, submission or new_submission())
        else:
            raise JobDirError(f"job directory {path}: somebody else makes the same at the same time")
        _make_private(path)
    except OSError as error:
        raise JobDirError(
            f"job directory {path}: {error.strerror} ({error.filename}); set job.directory to a place that "
            f"you can write and all nodes share"
        ) from error
    if job_id is not None:
        register(job_id, path)
    return path


def claim(path: Path, submission: str) -> bool:
    """Return whether the directory is there and of this submission; what another one left is renamed."""
    owner = _submission_of(path)
    if owner is not None and owner != submission:
        _set_aside(path, owner)
    return owner == submission


def set_verdict_aside(path: Path) -> None:
    """Rename the verdict of an earlier run of the same job, if there is one: this run has none yet."""
    number = 0
    while (path / f"verdict.{number}.json").exists():
        number += 1
    with contextlib.suppress(FileNotFoundError):
        (path / "verdict.json").rename(path / f"verdict.{number}.json")


def _submission_of(path: Path) -> str | None:
    """Return whose directory `path` is, None when there is none yet; an empty directory counts as none."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    if not stat.S_ISDIR(found.st_mode):
        raise JobDirError(f"job directory {path}: expected a directory, found something else; remove it")
    if found.st_uid != os.geteuid():
        raise JobDirError(
            f"job directory {path}: belongs to somebody else; set job.directory to a place of yours"
        )
    for _ in range(_ATTEMPTS):
        try:
            return (path / _SUBMISSION).read_text().strip()
        except FileNotFoundError:
            pass
        # Not there, or just renamed by somebody else, who puts a whole new one in its place.
        try:
            content = os.listdir(path)
        except FileNotFoundError:
            return None
        if not content:
            return None
        if _SUBMISSION not in content:
            break
    raise JobDirError(f"job directory {path}: there is something else in it; remove it or set job.directory")


def _set_aside(path: Path, owner: str) -> None:
    """Rename the directory of another submission; of several processes that try, one succeeds and the
    others see it.
    """
    with contextlib.suppress(FileNotFoundError):
        try:
            path.rename(f"{path}.old-{owner}")
        except OSError as error:
            # Somebody has done it, and `path` is a new one already.
            if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
                raise


def _appear(path: Path, config: Config, submission: str) -> None:
    """Make the directory under another name, then rename it; when somebody was faster, theirs stays."""
    fresh = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))  # mode 0700
    try:
        for folder in ("logs", "requests"):
            (fresh / folder).mkdir(mode=0o700)
        _write(fresh / "secret", secrets.token_bytes(SECRET_BYTES))
        _write(fresh / "config.yaml", dump(config).encode())
        _write(fresh / _SUBMISSION, f"{submission}\n".encode())
        try:
            fresh.rename(path)
        except OSError as error:
            if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
                raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _write(path: Path, content: bytes) -> None:
    """Create `path` (mode 0600) with `content`, on the disk when this returns."""
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def _make_private(path: Path) -> None:
    if stat.S_IMODE(path.stat().st_mode) != 0o700:
        path.chmod(0o700)
