"""Slurm by its own commands (scontrol, squeue, scancel), whose output has not changed from 22.05 to 26.05."""

from __future__ import annotations

import math
import subprocess
import tempfile
import time
from collections.abc import Sequence

from tm_slurm.slurm import environment
from tm_slurm.slurm.hostlist import HostlistError, expand, join
from tm_slurm.slurm.interface import (
    REQUEUE_PAUSE_S,
    JobInfo,
    NodeInfo,
    PartitionInfo,
    QueuedJob,
    ReservationInfo,
    ResizeBlocked,
    SlurmRefused,
    SlurmUnavailable,
)
from tm_slurm.slurm.scontrol_text import (
    ScontrolFormatError,
    parse_jobs,
    parse_nodes,
    parse_partitions,
    parse_reservations,
)

# What a command says when it got no answer, as opposed to the answer "no".
_UNAVAILABLE_WORDS = (
    "unable to contact",
    "communication connection failure",
    "message send failure",
    "message receive failure",
    "communication shutdown failure",
    "socket timed out",
    "timed out",
    "connection refused",
    "connection reset",
    "connection timed out",
    "no route to host",
    "network is unreachable",
    "zero bytes were transmitted",
    "unexpected missing socket",
    "unexpected message received",
    "authentication error",
    "munge",
    "incompatible versions",
    "standby mode",
    "could not establish a configuration source",
    "unable to process configuration file",
    "resource temporarily unavailable",
    "cannot allocate memory",
)
_NO_RESERVATIONS = "no reservations in the system"
_WAITING_FOR_ACCOUNTING = "the db index is being set"


def is_no_answer(words: str) -> bool:
    """Whether Slurm's words say that no answer came, as opposed to the answer "no"."""
    return any(phrase in words.lower() for phrase in _UNAVAILABLE_WORDS)


class CommandLine:
    """The Slurm interface by the command line.

    One process a question, 5 to 10 ms each where slurmctld is idle.
    """

    def __init__(self, *, timeout_s: float = 10.0) -> None:
        """`timeout_s`: how long one command may take before the question counts as not answered."""
        self.timeout_s = timeout_s

    def nodes(self, names: Sequence[str]) -> dict[str, NodeInfo]:
        """Return what Slurm says of each of `names`; a name that Slurm does not know is left out."""
        if not names:
            return {}
        wanted = set(names)
        # One question for all: scontrol takes a list, answers for the nodes it knows, and exits 1 if one is
        # unknown.
        answer = self._run(["scontrol", "-o", "show", "node", join(names)], partial=True)
        try:
            found = parse_nodes(answer)
        except (ScontrolFormatError, HostlistError) as error:
            raise SlurmUnavailable(f"scontrol show node: {error}") from error
        return {name: info for name, info in found.items() if name in wanted}

    def job(self, job_id: int) -> JobInfo:
        """Return what Slurm says of a job, also for some minutes after its end (MinJobAge)."""
        answer = self._run(["scontrol", "-o", "show", "job", str(job_id)])
        try:
            jobs = [job for job in parse_jobs(answer) if job.job_id == job_id]
        except (ScontrolFormatError, HostlistError) as error:
            raise SlurmUnavailable(f"scontrol show job {job_id}: {error}") from error
        if not jobs:
            raise SlurmUnavailable(
                f"scontrol show job {job_id}: expected a record of the job, found {answer[:120]!r}"
            )
        return jobs[0]

    def queued(self, name_prefix: str) -> list[QueuedJob]:
        """Return this user's jobs whose name begins so and that are not over yet."""
        answer = self._run(["squeue", "--me", "--all", "--noheader", "--format=%i|%T|%N|%j"])
        found = []
        for line in answer.splitlines():
            job_id, state, nodes, name = [*line.split("|", 3), "", "", ""][:4]
            if not name.startswith(name_prefix) or not job_id.isdigit():
                continue  # an element of an array has another id, and is none of ours
            try:
                found.append(
                    QueuedJob(job_id=int(job_id), name=name, state=state, nodes=tuple(expand(nodes)))
                )
            except HostlistError as error:
                raise SlurmUnavailable(f"squeue: job {job_id}: {error}") from error
        return found

    def steps(self, job_id: int) -> set[str]:
        """Return the steps of a job that are not over yet: their numbers, and `batch` or `extern`."""
        words = ["squeue", "--steps", "--noheader", f"--jobs={self._address(job_id)}", "--format=%i"]
        return {line.strip().rpartition(".")[2] for line in self._run(words).splitlines() if line.strip()}

    def partitions(self) -> dict[str, PartitionInfo]:
        """Return the partitions that this user can see."""
        try:
            return parse_partitions(self._run(["scontrol", "-o", "show", "partition"]))
        except (ScontrolFormatError, HostlistError) as error:
            raise SlurmUnavailable(f"scontrol show partition: {error}") from error

    def reservations(self) -> dict[str, ReservationInfo]:
        """Return the reservations that this user can see: all, unless the site hides them (PrivateData)."""
        answer = self._run(["scontrol", "-o", "show", "reservations"])
        try:
            found = parse_reservations(answer)
        except (ScontrolFormatError, HostlistError) as error:
            raise SlurmUnavailable(f"scontrol show reservations: {error}") from error
        if not found and _NO_RESERVATIONS not in answer.lower():
            raise SlurmUnavailable(
                f"scontrol show reservations: expected records of reservations, found {answer[:120]!r}"
            )
        return found

    def shrink(self, job_id: int, keep: Sequence[str]) -> None:
        """Give back every node of a running job but those in `keep`; see Slurm.shrink."""
        if not keep:
            raise SlurmRefused(
                f"job {job_id}: expected at least one node to keep; cancel the job to give all back"
            )
        self._update(job_id, f"NodeList={join(keep)}")

    def cancel(self, job_id: int) -> None:
        """End a job; a job that is over already is no error."""
        self._run(["scancel", self._address(job_id)])

    def requeue(self, job_id: int) -> None:
        """Put a running job back into the queue, same id.

        Only the job given: never the array it may belong to.
        """
        self._run(["scontrol", "requeue", self._address(job_id)])

    def begin_not_before(self, job_id: int, at: float) -> None:
        """Have a job in the queue start at `at` (Unix seconds) or later; see Slurm.begin_not_before."""
        # Counted from now, so that no time zone is in it.
        self._update(job_id, f"StartTime=now+{max(REQUEUE_PAUSE_S, math.ceil(at - time.time()))}seconds")

    def set_comment(self, job_id: int, text: str) -> None:
        """Set the job's comment. Line ends become spaces: Slurm would print them as they are."""
        self._update(job_id, f"Comment={' '.join(text.split())}")

    def version(self) -> str:
        """Return the release of the client commands, such as "22.05.8"."""
        return self._run(["scontrol", "--version"]).split()[-1]

    def expand(self, hostlist: str) -> list[str]:
        """Return the names that a host list stands for; raises HostlistError. Asks nobody."""
        return expand(hostlist)

    def _address(self, job_id: int) -> str:
        """What a command is to be given for a job: `ARRAY_TASK` for the element of an array that this process
        is in. One of them has the array's own number as its id, and commands take that for the whole array.
        """
        if not environment.is_array_element(job_id):
            return str(job_id)
        try:
            return self.job(job_id).array_element or str(job_id)
        except SlurmRefused:  # it is over for so long that Slurm knows it no longer
            return str(job_id)

    def _update(self, job_id: int, change: str) -> None:
        try:
            self._run(["scontrol", "update", f"JobId={self._address(job_id)}", change])
        except SlurmRefused as refusal:
            if _WAITING_FOR_ACCOUNTING in str(refusal).lower():
                raise ResizeBlocked(str(refusal)) from refusal
            raise

    def _run(self, command: list[str], *, partial: bool = False) -> str:
        """Run one command and return its output. `partial`: output beside a non-zero exit is an answer."""
        # In a directory of its own: scontrol drops files where it stands when a job is resized.
        with tempfile.TemporaryDirectory(prefix="tm-slurm-") as directory:
            try:
                done = subprocess.run(
                    command,
                    capture_output=True,
                    check=False,
                    cwd=directory,
                    env=environment.for_client(),
                    errors="replace",
                    stdin=subprocess.DEVNULL,
                    text=True,
                    timeout=self.timeout_s,
                )
            except subprocess.TimeoutExpired as error:
                raise SlurmUnavailable(
                    f"{' '.join(command)}: no answer within {self.timeout_s:g} s"
                ) from error
            except OSError as error:
                raise SlurmUnavailable(f"{command[0]}: cannot be run: {error.strerror}") from error
        if done.returncode == 0 or (partial and "=" in done.stdout):
            return done.stdout
        words = " ".join(
            (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").split()
        )
        if done.returncode < 0 or is_no_answer(words):
            raise SlurmUnavailable(f"{' '.join(command[:3])}: {words}")
        raise SlurmRefused(words)
