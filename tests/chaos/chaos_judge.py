"""What must be true when a run under chaos is over."""

from __future__ import annotations

import time
from pathlib import Path

from chaos_play import Play
from training_jobs import TrainingJob

from tm_slurm.localcluster import processes

ENDED_LIMIT_S = 60.0
GONE_LIMIT_S = 30.0
LOOK_S = 0.05
TORCH_METADATA = ".metadata"
"""A whole file, in every checkpoint of torch.distributed.checkpoint."""


def complaints(play: Play, undisturbed: list[str]) -> list[str]:
    """One line for each promise that was not kept; none: all is well.

    Everything that was broken is mended first, the job's own processes are left to end by themselves."""
    job = play.job
    found = [f"{event['fault']}: {event['how']}" for event in play.events if " ended before" in event["how"]]
    found += _end(play)
    trained = job.files.notes("trained")
    digests = [str(digest) for digest in trained[-1]["digests"]] if trained else []
    if digests != undisturbed:
        found.append(f"the end is not that of the undisturbed run: {digests} instead of {undisturbed}")
    found += _log(job, play.plan.steps)
    mend_all(job)
    return found + _leftovers(job)


def _end(play: Play) -> list[str]:
    job = play.job
    verdict = job.files.verdict()
    if verdict is None or verdict["state"] != "completed":
        return [f"the verdict is {verdict}"]
    wanted = {"COMPLETED", "CANCELLED"} if play.batch_host_lost else {"COMPLETED"}
    _wait_while(job, "RUNNING")
    mend_all(job)  # a job is COMPLETING as long as one of its nodes does not answer
    _wait_while(job, "COMPLETING")
    state = job.info().state
    return [] if state in wanted else [f"Slurm calls the job {state}, expected {' or '.join(sorted(wanted))}"]


def _wait_while(job: TrainingJob, state: str) -> None:
    deadline = time.monotonic() + ENDED_LIMIT_S
    while job.info().state == state and time.monotonic() < deadline:
        time.sleep(LOOK_S)


def _log(job: TrainingJob, steps: int) -> list[str]:
    told = [int(step["step"]) for step in job.files.steps()]
    if told == list(range(steps)):
        return []
    lost = sorted(set(range(steps)) - set(told))
    again = sorted({step for step in told if told.count(step) > 1})
    return [f"steps.jsonl: lost {lost[:20]}, told again {again[:20]}, {len(told)} lines for {steps} steps"]


def mend_all(job: TrainingJob) -> None:
    """Every node on, plugged in, thawed, with a slurmd; jobs and what Slurm was told stay."""
    job.cluster.up()


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
