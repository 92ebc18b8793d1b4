"""What Slurm says of a job whose own files do not tell how it stands."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tm_slurm.submit.registry import registered

ANSWER_LIMIT_S = 3.0


@dataclass(frozen=True)
class SlurmWord:
    """`state` is Slurm's, such as PENDING; None when Slurm knows no such job any more."""

    state: str | None
    reason: str = ""
    is_over: bool = True

    @property
    def is_pending(self) -> bool:
        return self.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")

    @property
    def why_pending(self) -> str:
        """For people: Slurm's reason in words, and how to see more."""
        if not self.reason:
            return "Slurm has given no reason yet"
        words = self.reason.replace(",_", ", ").replace("_", " ")
        return f"{words}: sinfo -R says which" if "DRAINED" in words else words

    def __str__(self) -> str:
        if self.state is None:
            return "Slurm no longer knows it"
        return f"Slurm calls it {self.state}" + (f", {self.reason}" if self.reason else "")


def slurm_word(job_id: int | None, job_dir: Path) -> SlurmWord | None:
    """Ask Slurm, for at most 3 s; None when there is no answer, or the cluster here may be another one than
    the job's.
    """
    if job_id is None or os.path.realpath(registered(job_id) or "") != os.path.realpath(job_dir):
        return None
    return ask_slurm(job_id)


def ask_slurm(job_id: int) -> SlurmWord | None:
    """What the cluster of this shell says of a job of that id, None when it does not answer."""
    from tm_slurm.slurm import SlurmRefused, SlurmUnavailable, connect
    from tm_slurm.slurm.configuration import configuration_file

    path = configuration_file()
    if path is not None and not path.is_file():
        return None
    try:
        job = connect(timeout_s=ANSWER_LIMIT_S).job(job_id)
    except SlurmUnavailable:
        return None
    except SlurmRefused:
        return SlurmWord(None)
    return SlurmWord(job.state, job.state_reason, job.is_over)


def id_of(job: str, job_dir: Path, status: dict[str, object] | None) -> int | None:
    """The Slurm job id of a job that was named by its id or by its directory."""
    known = status.get("job_id") if status is not None else None
    for word in (job, str(known), job_dir.resolve().name):
        if word.isdigit():
            return int(word)
    return None
