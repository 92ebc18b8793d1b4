"""What must be true when a run under chaos is over."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

from chaos_play import Play
from training_jobs import TrainingJob

from tm_slurm.localcluster import processes

ENDED_LIMIT_S = 60.0
COMPLETING_LIMIT_S = 5.0
GONE_LIMIT_S = 30.0
LOOK_S = 0.05
TORCH_METADATA = ".metadata"
"""A whole file, in every checkpoint of torch.distributed.checkpoint."""


def complaints(play: Play, undisturbed: list[str]) -> list[str]:
    """One line for each promise that was not kept; none: all is well.

    Everything that was broken is mended first, the job's own processes are left to end by themselves."""
    job = play.job
    found = [f"{event['fault']}: {event['how']}" for event in play.events if " ended before" in event["how"]]
    verdict = job.files.verdict()
    if verdict is None or verdict["state"] != "completed":
        found.append(f"the verdict is {verdict}")
    trained = job.files.notes("trained")
    digests = [str(digest) for digest in trained[-1]["digests"]] if trained else []
    if digests != undisturbed:
        found.append(f"the end is not that of the undisturbed run: {digests} instead of {undisturbed}")
    found += _log(job, play.plan.steps)
    _wait_while(job, "RUNNING", ENDED_LIMIT_S)
    job.cluster.up()  # every node on, plugged in, thawed, with a slurmd
    return found + _leftovers(job) + _slurms_word(play)


def _slurms_word(play: Play) -> list[str]:
    """How Slurm calls the job that has ended, when nothing of it is left on any node."""
    job = play.job
    _wait_while(job, "COMPLETING", COMPLETING_LIMIT_S)
    if job.info().state == "COMPLETING":
        _write_off(job)
        _wait_while(job, "COMPLETING", ENDED_LIMIT_S)
    state = job.info().state
    wanted = {"COMPLETED", "CANCELLED"} if play.batch_host_lost else {"COMPLETED"}
    if state in wanted:
        return []
    nodes = job.cluster.node_states()
    return [f"Slurm calls the job {state}, expected {' or '.join(sorted(wanted))}; the nodes are {nodes}"]


def _write_off(job: TrainingJob) -> None:
    """Slurm asks a node that was off for the job's end only after minutes; an administrator says so at
    once."""
    for node, state in job.cluster.node_states().items():
        if "COMPLETING" in state:
            job.cluster.set_down(node, "nothing of the job is left here")
            job.cluster.resume(node)


def _wait_while(job: TrainingJob, state: str, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while job.info().state == state and time.monotonic() < deadline:
        time.sleep(LOOK_S)


def _log(job: TrainingJob, steps: int) -> list[str]:
    told = [int(step["step"]) for step in job.files.steps()]
    if told == list(range(steps)):
        return []
    lost = sorted(set(range(steps)) - set(told))
    again = sorted({step for step in told if told.count(step) > 1})
    late = [step for before, step in itertools.pairwise(told) if step < before]
    return [f"steps.jsonl: lost {lost[:20]}, told again {again[:20]}, out of order at {late[:20]}"]


def _leftovers(job: TrainingJob) -> list[str]:
    deadline = time.monotonic() + GONE_LIMIT_S
    while (left := _processes(job)) and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    found = [f"still running on {where}" for where in left]
    partial = [path for path in job.files.job_dir.rglob("*") if _is_partial(path)]
    return found + [f"partial file {path.relative_to(job.files.job_dir)}" for path in partial]


def _processes(job: TrainingJob) -> list[str]:
    marks = {f"TM_SLURM_JOB_DIR={job.files.job_dir}", f"SLURM_JOB_ID={job.job_id}"}
    return [
        f"{node}: {pid} {processes.command_name(pid)}"
        for node in job.cluster.node_names
        for pid in job.cluster.node_pids(node)
        if marks & processes.environment_of(pid)
    ]


def _is_partial(path: Path) -> bool:
    """What a writer makes before it renames it, and has left: `.NAME.PID`, `.partial-…`, `.…`."""
    return path.name.startswith(".") and path.name != TORCH_METADATA
