"""Submission through submitit: the same step and the same end as the template, and a job that can be
requeued.
"""

from __future__ import annotations

import contextlib
import getpass
import io
import logging
import os
import re
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import FailedJobError, FailedSubmissionError

from tm_slurm.config import Config, dump, loads, minutes_of
from tm_slurm.slurm import SlurmRefused, SlurmUnavailable, connect, environment
from tm_slurm.submit.controller import ControllerTask
from tm_slurm.submit.job_dir import JobDirError, new_submission, prepare_job_dir, shared_root
from tm_slurm.submit.prepare import UNHEARD
from tm_slurm.submit.refusals import key_of
from tm_slurm.submit.resources import cpus_per_node, gpus_per_node, memory_of, step_options

SUBMIT_TIMEOUT_S = 60
_TIMED_OUT = 124
"""timeout(1)'s exit code."""
_WITHOUT_LIMIT_MINUTES = 60 * 24 * 365
_UNCLAIMED = re.compile(r"[0-9a-f]{32}\.pkl|\.submission_file_[0-9a-f]{32}\.sh")
_UNCLAIMED_AGE_S = 3600.0


class SubmissionFailed(RuntimeError):
    """sbatch did not take the job; one line with its own words."""


class SubmissionRefused(SubmissionFailed):
    """sbatch did not take the job as it is configured; the line begins with the key."""


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """A job that Slurm has taken."""

    job_id: int
    job_dir: Path
    log: Path


class AgentTask:
    """What submitit runs on each node: the agent.

    Checkpointable, so that the job can go back into the queue.
    """

    def __init__(self, config_text: str, submission: str) -> None:
        """`config_text` is a resolved configuration, `submission` a name of this one submission."""
        self.config_text = config_text
        self.submission = submission

    def __call__(self) -> int:
        """Make the job directory if nobody has yet, run the agent to its end, return 0 or exit with its
        code.
        """
        from tm_slurm.agent.main import run

        config = loads(self.config_text, name="the submitted configuration")
        job_id = environment.job_id()
        if job_id is None:
            sys.exit("tm_slurm: not in a Slurm job: SLURM_JOB_ID is not set")
        # submitit has a handler of its own; the agent's would write every line a second time.
        logging.getLogger("submitit").propagate = False
        try:
            job_dir = prepare_job_dir(config, job_id, self.submission)
        except JobDirError as error:
            sys.exit(f"tm_slurm: {error}")
        code = run(job_dir)
        if code:
            sys.exit(code)
        return code

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """Return what a requeued job runs: the same. The training state is in the job directory, not here."""
        return submitit.helpers.DelayedSubmission(self)


class AgentExecutor(submitit.SlurmExecutor):
    """submitit's Slurm executor, with the environment and the time limit that were asked for, and a bounded
    wait.
    """

    def __init__(self, config: Config, submission: str) -> None:
        """`config` is a resolved configuration, `submission` a name of this one submission."""
        python = interpreter(config)
        self._set_up(config, submission_folder(config), _parameters(config, python, submission))

    def _set_up(self, config: Config, folder: Path, parameters: dict[str, Any]) -> None:
        self.config = config
        python = interpreter(config)
        super().__init__(folder, max_num_timeout=config.job.max_requeues, python=python)
        self.update_parameters(**parameters)

    @classmethod
    def name(cls) -> str:
        return "slurm"

    @classmethod
    def affinity(cls) -> int:
        # Without Slurm at hand a script can still be shown; submitting it fails with sbatch's own error.
        return 2

    def script(self) -> str:
        """Return the batch script that would be submitted."""
        return self._make_submission_file_text(self._submitit_command_str, "")

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        text = super()._make_submission_file_text(command, uid)
        if self.config.job.time_limit is None:
            text = text.replace(f"#SBATCH --time={_WITHOUT_LIMIT_MINUTES}\n", "")
        return text

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        kept = environment.for_submission()
        drop = [word for name in environment.dropped(os.environ, kept) for word in ("-u", name)]
        return ["timeout", str(SUBMIT_TIMEOUT_S), "env", *drop, "sbatch", str(submission_file_path)]


class ControllerExecutor(AgentExecutor):
    """submitit's Slurm executor for the controller of launch mode `allocation`: one CPU, anywhere."""

    def __init__(self, config: Config) -> None:
        """`config` is a resolved configuration."""
        self._set_up(config, submission_folder(config), _controller_parameters(config))


def executor(config: Config, submission: str) -> AgentExecutor:
    """Return what submits the resolved `config` in its launch mode."""
    if config.job.launch == "allocation":
        return ControllerExecutor(config)
    return AgentExecutor(config, submission)


def interpreter(config: Config) -> str:
    """Return the Python of the resolved `config`, as a word of the shell."""
    return shlex.quote(config.job.python or sys.executable)


def submission_folder(config: Config) -> Path:
    """Return where submitit keeps its files: a folder that is there before the job, private to the user."""
    return shared_root(config) / f".submitit-{getpass.getuser()}"


def script_text(config: Config, submission: str | None = None) -> str:
    """Return the batch script that `submit` would submit for the resolved `config`; nothing is written."""
    return executor(config, submission or new_submission()).script()


def submit(config: Config) -> Submitted:
    """Submit the resolved `config` and make its job directory. Waits for sbatch, at most SUBMIT_TIMEOUT_S.

    Raises SubmissionFailed (SubmissionRefused when the configuration is to blame), or JobDirError when
    the directory cannot be made.
    """
    folder = submission_folder(config)
    submission = new_submission()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _sweep(folder)
        # submitit prints sbatch's words before it raises them.
        with contextlib.redirect_stderr(io.StringIO()):
            task = ControllerTask if config.job.launch == "allocation" else AgentTask
            job = executor(config, submission).submit(task(dump(config), submission))
    except (FailedJobError, FailedSubmissionError) as error:
        words = words_of(error)
        key = key_of(words)
        if key == "job.constraint" and config.job.constraint is None and config.job.batch_feature:
            key = "job.batch_feature"
        if key is not None:
            raise SubmissionRefused(f"{key}: {words}") from error
        raise SubmissionFailed(words) from error
    except OSError as error:
        raise SubmissionRefused(f"job.directory: {folder}: {error.strerror}") from error
    job_id = int(job.job_id)
    try:
        job_dir = prepare_job_dir(config, job_id, submission)
    except JobDirError as error:
        raise JobDirError(f"{error}; {_withdraw(job_id)}") from error
    log = Path(str(job.paths.stdout))
    link = job_dir / "logs" / "job.log"
    if not link.is_symlink():
        link.symlink_to(log)
    return Submitted(job_id=job_id, job_dir=job_dir, log=log)


def _parameters(config: Config, python: str, submission: str) -> dict[str, Any]:
    job = config.job
    directory = shlex.quote(job.directory)
    return {
        **node_parameters(config),
        "nodes": job.all_nodes,
        "additional_parameters": {"no-kill": True, "requeue": True, **further_options(config)},
        "setup": [
            *job.setup,
            f"tm_slurm_start=$({python} -m tm_slurm.submit.prepare --submitted {directory} {submission}"
            f"{unheard(config)}) || exit 2",
            'eval "$tm_slurm_start"',
        ],
        "srun_args": step_options(config),
        # A requeue ends the batch script: the verdict has a word to say to Slurm before it goes.
        "teardown": ["trap '' TERM", f'{python} -m tm_slurm.submit.verdict "$job_dir"'],
    }


def _controller_parameters(config: Config) -> dict[str, Any]:
    """In the partition, account and quality of service of the nodes, but no more of them than one CPU."""
    return {
        **node_parameters(config),
        "constraint": None,
        "mem": None,
        "nodes": 1,
        "cpus_per_task": 1,
        "gpus_per_node": None,
        "additional_parameters": {"requeue": True, **further_options(replace_sbatch(config))},
        "srun_args": ["--export=ALL", "--mpi=none", "--overlap"],
    }


def replace_sbatch(config: Config) -> Config:
    """Return `config` without sbatch options of its own: they are for the nodes."""
    return replace(config, job=replace(config.job, sbatch={}))


def further_options(config: Config) -> dict[str, Any]:
    """Return sbatch options that submitit has no parameter for: long names without the dashes."""
    job = config.job
    further: dict[str, Any] = {}
    if job.time_limit is not None and minutes_of(job.time_limit) is None:
        further["time"] = "UNLIMITED"
    if job.reservation is not None:
        further["reservation"] = job.reservation
    if job.batch_feature is not None:
        further["batch"] = job.batch_feature
    return further | {name: value for name, value in job.sbatch.items() if value is not False}


def node_parameters(config: Config) -> dict[str, Any]:
    """Return submitit's parameters for what every node of the resolved `config` is to be."""
    job = config.job
    return {
        "job_name": job.name,
        "partition": job.partition,
        "account": job.account,
        "qos": job.qos,
        "constraint": job.constraint or (f"{job.batch_feature}*1" if job.batch_feature else None),
        "exclude": job.exclude,
        "time": minutes_of(job.time_limit) or _WITHOUT_LIMIT_MINUTES,
        "mem": memory_of(config),
        "ntasks_per_node": 1,
        "cpus_per_task": cpus_per_node(config),
        "gpus_per_node": gpus_per_node(config) or None,
        "signal_delay_s": job.signal_delay_s,
        "stderr_to_stdout": True,
        "wckey": None,
    }


def unheard(config: Config) -> str:
    """Return the further word for tm_slurm.submit.prepare that policy.signed_events asks for."""
    return "" if config.policy.signed_events else f" {UNHEARD}"


def _withdraw(job_id: int) -> str:
    """Cancel a job that cannot run; return what became of it."""
    try:
        connect().cancel(job_id)
    except (SlurmRefused, SlurmUnavailable) as error:
        return f"job {job_id} is still in the queue: {error}"
    return f"job {job_id} was cancelled"


def _sweep(folder: Path) -> None:
    """Remove what submissions that failed long ago left: files that submitit renames within seconds
    otherwise.
    """
    for path in folder.iterdir():
        if not path.is_symlink() and _UNCLAIMED.fullmatch(path.name):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > _UNCLAIMED_AGE_S:
                    path.unlink()


def words_of(error: Exception) -> str:
    """Return in one line why the submission failed, in sbatch's words where there are any."""
    cause = error.__cause__
    if isinstance(cause, subprocess.CalledProcessError) and cause.returncode == _TIMED_OUT:
        return f"sbatch: no answer within {SUBMIT_TIMEOUT_S} s"
    words = " ".join(str(error).split())
    return words if words.startswith("sbatch") else f"sbatch failed: {words or cause}"
