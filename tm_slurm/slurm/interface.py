"""What the rest of tm_slurm asks of Slurm, whoever answers: the command line today, pyslurm later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tm_slurm.slurm.node_state import NodeState

REQUEUE_PAUSE_S = 3
"""Seconds after which a requeued job may start again: slurmd refuses credentials from the second in which it
ended the old start, and Slurm takes that for the end of the new one (exit code 1). It counts whole seconds,
and clocks are a little apart. Slurm itself waits for two minutes."""


class SlurmUnavailable(RuntimeError):
    """The question could not be asked, or no usable answer came in time.

    Never a statement about a node or a job.
    """


class SlurmRefused(RuntimeError):
    """Slurm answered, and the answer is no. The message is Slurm's own."""


class ResizeBlocked(SlurmRefused):
    """Slurm will not change this running job any more.

    Slurm 22.05 marks a job that was resized as waiting for slurmdbd's new index number, and where no
    slurmdbd runs that number never comes: every later `scontrol update` of the job is refused, after 5 s of
    waiting in slurmctld.
    """


@dataclass(frozen=True, kw_only=True)
class NodeInfo:
    """One node as slurmctld sees it.

    Times are seconds of the wall clock (Unix time), None where Slurm has none.
    """

    name: str
    state: NodeState
    reason: str = ""
    reason_user: str = ""
    reason_at: float | None = None
    address: str = ""
    hostname: str = ""
    cpus: int = 0
    boot_time: float | None = None
    slurmd_start_time: float | None = None
    partitions: tuple[str, ...] = ()
    version: str = ""


@dataclass(frozen=True, kw_only=True)
class JobInfo:
    """One job as slurmctld sees it.

    Times are seconds of the wall clock (Unix time), None where Slurm has none.
    """

    job_id: int
    name: str
    user: str
    state: str
    state_reason: str = ""
    nodes: tuple[str, ...] = ()
    batch_host: str | None = None
    comment: str = ""
    partition: str = ""
    time_limit_s: float | None = None
    submit_time: float | None = None
    start_time: float | None = None
    end_time: float | None = None
    requeue: bool = False
    restarts: int = 0
    work_dir: str = ""
    exit_code: int = 0
    exit_signal: int = 0
    array_element: str = ""
    """`ARRAY_TASK` if it is an element of an array: the one name that no other job has"""
    reservations: tuple[str, ...] = ()
    preempt_time: float | None = None

    @property
    def is_over(self) -> bool:
        """True once Slurm will run nothing of this job any more."""
        return self.state not in {
            "PENDING",
            "RUNNING",
            "SUSPENDED",
            "COMPLETING",
            "CONFIGURING",
            "RESIZING",
            "REQUEUED",
            "REQUEUE_HOLD",
            "REQUEUE_FED",
            "SIGNALING",
            "STAGE_OUT",
            "STOPPED",
            "RESV_DEL_HOLD",
            "SPECIAL_EXIT",
        }


@dataclass(frozen=True, kw_only=True)
class QueuedJob:
    """A job in the queue, one that runs included, in few words. `nodes` is empty until it has some."""

    job_id: int
    name: str
    state: str
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PartitionInfo:
    """One partition: what a submission is checked against."""

    name: str
    state: str
    is_default: bool
    nodes: tuple[str, ...]
    max_nodes: int | None
    max_time_s: float | None


@dataclass(frozen=True, kw_only=True)
class ReservationInfo:
    """One reservation of nodes. Times are seconds of the wall clock (Unix time); `cpus` is how many of the
    nodes' CPUs it holds, all together, None where Slurm does not say.
    """

    name: str
    nodes: tuple[str, ...]
    start_time: float
    end_time: float
    flags: frozenset[str] = frozenset()
    cpus: int | None = None


class Slurm(Protocol):
    """Questions to slurmctld. Every call blocks for a bounded time.

    Raises, everywhere: SlurmUnavailable when no answer came, SlurmRefused when the answer is no.
    """

    def nodes(self, names: Sequence[str]) -> dict[str, NodeInfo]:
        """Return what Slurm says of each of `names`; a name that Slurm does not know is left out."""
        ...

    def job(self, job_id: int) -> JobInfo:
        """Return what Slurm says of a job, also for some minutes after its end."""
        ...

    def queued(self, name_prefix: str) -> list[QueuedJob]:
        """Return this user's jobs whose name begins so and that are not over yet."""
        ...

    def steps(self, job_id: int) -> set[str]:
        """Return the steps of a job that are not over yet: their numbers, and `batch` or `extern`."""
        ...

    def partitions(self) -> dict[str, PartitionInfo]:
        """Return the partitions that this user can see."""
        ...

    def reservations(self) -> dict[str, ReservationInfo]:
        """Return the reservations that this user can see: all, unless the site hides them (PrivateData)."""
        ...

    def shrink(self, job_id: int, keep: Sequence[str]) -> None:
        """Give back every node of a running job but those in `keep`.

        Tasks on the nodes given back get SIGKILL.

        The batch host cannot be given back: SlurmRefused, job unharmed. Raises ResizeBlocked where this
        Slurm will not shrink the same job a second time.
        """
        ...

    def cancel(self, job_id: int) -> None:
        """End a job; a job that is over already is no error."""
        ...

    def requeue(self, job_id: int) -> None:
        """Put a running job back into the queue, same id."""
        ...

    def begin_not_before(self, job_id: int, at: float) -> None:
        """Have a job that is in the queue start at `at` (Unix seconds) or later, REQUEUE_PAUSE_S from now at
        the earliest.

        Slurm takes it as soon as the job is requeued, also while its old processes are still being ended;
        SlurmRefused while it runs.
        """
        ...

    def set_comment(self, job_id: int, text: str) -> None:
        """Set the job's comment, which squeue and scontrol show to administrators."""
        ...

    def version(self) -> str:
        """Return the release of the client commands, such as "22.05.8"."""
        ...

    def expand(self, hostlist: str) -> list[str]:
        """Return the names that a host list stands for."""
        ...
