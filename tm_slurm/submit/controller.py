"""The controller of launch mode `allocation`: `python -m tm_slurm.submit.controller CONFIG [KEY=VALUE …]`, in
a job of one CPU or in a shell on a login node.

It gets the nodes by `salloc --no-shell`, starts an agent on each by `srun --jobid`, lets go of that srun, and
waits for the coordinator's verdict. Nothing depends on it from then on: when it is requeued, lost, or started
again elsewhere, it takes the same allocation up by the job directory (tm_slurm.coordinator.allocation). It
has itself requeued when its own node is drained.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tm_slurm.config import Config, ConfigError, load, loads, parse_override
from tm_slurm.coordinator.allocation import Allocation
from tm_slurm.coordinator.training import standby_jobs_of
from tm_slurm.slurm import (
    QueuedJob,
    Slurm,
    SlurmRefused,
    SlurmUnavailable,
    connect,
    environment,
)
from tm_slurm.submit.asked_options import OFF, asked_overrides
from tm_slurm.submit.checks import Unsubmittable, check_options
from tm_slurm.submit.job_dir import (
    JobDirError,
    named_for,
    new_submission,
    prepare_job_dir,
    resolve,
    set_verdict_aside,
)
from tm_slurm.submit.letting_go import let_go, members_of_group, missing_agents
from tm_slurm.submit.registry import register
from tm_slurm.submit.resources import output_option, step_options
from tm_slurm.submit.salloc import salloc_options
from tm_slurm.submit.verdict import NoVerdict, Verdict, attempt_now, read_verdict, said_of

LOOK_S = 0.25
NODE_INTERVAL_S = 1.0
"""Between looks at the state of the controller's own node, and at the allocation."""

GONE_LIMIT_S = 10.0
"""So long after the end of the allocation a verdict may still come."""

ENDED_CODE = 143
_ENDING = frozenset({"COMPLETING"})


class Told(Exception):
    """Slurm or the user ends this controller (SIGTERM), or its time is over (SIGUSR2)."""


class CannotStart(RuntimeError):
    """There are no nodes, or no agents on them; one line."""


@dataclass(frozen=True, kw_only=True)
class Own:
    """The controller's job and its node; None in a shell."""

    job_id: int | None
    node: str | None

    @classmethod
    def from_environment(cls) -> Own:
        job_id = environment.job_id()
        return cls(job_id=job_id, node=os.environ.get(environment.NODE_NAME) if job_id else None)


class Controller:
    """For one job directory, whose resolved configuration `config` is."""

    def __init__(self, config: Config, job_dir: Path, own: Own, slurm: Slurm) -> None:
        self._config = config
        self._job_dir = job_dir
        self._own = own
        self._slurm = slurm
        self._told = 0
        self._salloc: subprocess.Popen[str] | None = None

    def run(self) -> int:
        """Until training has ended; the exit code to end with."""
        before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        try:
            while True:
                verdict = self._train()
                if verdict.state != "requeue":
                    return verdict.exit_code
        except Told:
            return ENDED_CODE if self._told == signal.SIGTERM else self._come_again("its time is over")
        except CannotStart as error:
            print(f"tm_slurm: {error}", file=sys.stderr)
            return 1
        finally:
            if self._salloc is not None and self._salloc.poll() is None:
                self._salloc.terminate()  # salloc takes its request back
                self._salloc.wait()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: Any) -> None:
        self._told = number

    def _train(self) -> Verdict:
        """One start of training, to its verdict."""
        known = self._taken_up()
        if known is None:
            known = self._start()
        verdict = self._verdict(known)
        with contextlib.suppress(SlurmRefused, SlurmUnavailable):
            if not known.given_back:
                self._slurm.cancel(known.job_id)
        print("\n".join(said_of(verdict)), flush=True)
        return verdict

    def _taken_up(self) -> Allocation | None:
        """The allocation of an earlier start of this controller, unless it is time for another one."""
        known = Allocation.read(self._job_dir)
        if known is None:
            return None
        with contextlib.suppress(NoVerdict):
            if read_verdict(self._job_dir, known.attempt).state == "requeue":
                return None
            return known
        if known.launched:
            print(f"tm_slurm: going on with allocation {known.job_id}", flush=True)
            return known
        self._cancel(known.job_id)  # its agents may be there or not: nobody has seen to it
        return None

    # ---- nodes ----

    def _start(self) -> Allocation:
        before = Allocation.read(self._job_dir)
        attempt = 0 if before is None else before.attempt + 1
        begins = self._begins(before)
        job_id = self._get_nodes(attempt, begins)
        known = Allocation(job_id=job_id, controller=self._own.job_id, attempt=attempt)
        set_verdict_aside(self._job_dir)
        known.write(self._job_dir)
        register(job_id, self._job_dir)
        self._launch(known)
        known = replace(known, launched=True)
        known.write(self._job_dir)
        return known

    def _begins(self, before: Allocation | None) -> float | None:
        with contextlib.suppress(NoVerdict):
            return None if before is None else read_verdict(self._job_dir, before.attempt).begins
        return None

    def _get_nodes(self, attempt: int, begins: float | None) -> int:
        """Ask for the nodes, unless an earlier start of this controller has, and wait for them. They wait in
        the queue like any job."""
        name = f"tm-nodes-{self._own.job_id or self._job_dir.name}.{attempt}."
        found = self._in_the_queue(name)
        if found is None:
            options = salloc_options(self._config, called=name, begins=begins)
            self._salloc = subprocess.Popen(
                ["salloc", *options],
                env=environment.for_submission(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            )
        while found is None or found.state != "RUNNING":
            self._pause()
            if self._salloc is not None and self._salloc.poll() not in (None, 0):
                words = " ".join((self._salloc.stderr.read() if self._salloc.stderr else "").split())
                raise CannotStart(f"no nodes: {words}")
            found = self._in_the_queue(name)
        print(f"tm_slurm: allocation {found.job_id}: {' '.join(found.nodes)}", flush=True)
        return found.job_id

    def _in_the_queue(self, name: str) -> QueuedJob | None:
        with contextlib.suppress(SlurmUnavailable):
            jobs = [job for job in self._slurm.queued(name) if job.state not in _ENDING]
            return min(jobs, key=lambda job: job.job_id, default=None)
        return None

    def _cancel(self, job_id: int) -> None:
        """Until Slurm answers: two allocations must not train in one directory."""
        while True:
            try:
                self._slurm.cancel(job_id)
                return
            except SlurmRefused:  # it is over for so long that Slurm knows it no longer
                return
            except SlurmUnavailable:
                self._pause()

    # ---- agents ----

    def _launch(self, known: Allocation) -> None:
        """Start the agents, and let go of them when all are there."""
        logs = self._job_dir / "logs"
        since = self._job_dir / f".launch-{known.attempt}"
        since.touch()
        nodes = self._slurm.job(known.job_id).nodes
        srun = subprocess.Popen(
            self._launch_command(known),
            env=self._launch_environment(known),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + self._config.policy.start_timeout_s
        began = since.stat().st_mtime
        try:
            while missing := missing_agents(self._job_dir, nodes, began):
                self._pause()
                if srun.poll() is not None:
                    self._cancel(known.job_id)
                    raise CannotStart(
                        f"no agents on {', '.join(missing)}: srun ended with {srun.returncode}; see {logs}"
                    )
                if time.monotonic() > deadline:  # the coordinator says what becomes of nodes that do not come
                    print(f"tm_slurm: no agents yet on {', '.join(missing)}", file=sys.stderr)
                    break
        except Told:
            self._cancel(known.job_id)
            raise
        let_go(members_of_group(srun.pid))
        srun.wait()

    def _launch_command(self, known: Allocation) -> list[str]:
        python = self._config.job.python or sys.executable
        agent = [python, "-u", "-m", "tm_slurm.agent", "--job-dir", str(self._job_dir)]
        srun = [
            "srun",
            f"--jobid={known.job_id}",
            *step_options(self._config),
            output_option(self._job_dir),
            *agent,
        ]
        script = "\n".join([*self._config.job.setup, 'exec "$@"'])
        return ["bash", "-c", script, "bash", *srun] if self._config.job.setup else srun

    def _launch_environment(self, known: Allocation) -> dict[str, str]:
        """`TM_SLURM_EVENTS_TO` is for the SPANK plugin, where there is one: events about the job go there."""
        restarts = {environment.RESTART_COUNT: str(known.attempt)} if known.attempt else {}
        heard = self._config.policy.signed_events
        events = {"TM_SLURM_EVENTS_TO": str(self._job_dir)} if heard else {OFF: "1"}
        return {**environment.for_submission(), **restarts, **events}

    # ---- waiting ----

    def _verdict(self, known: Allocation) -> Verdict:
        looked_at, gone_since = 0.0, None
        while True:
            with contextlib.suppress(NoVerdict):
                return read_verdict(self._job_dir, known.attempt)
            self._pause()
            now = time.monotonic()
            if now - looked_at < NODE_INTERVAL_S:
                continue
            looked_at = now
            if self._own_node_is_left():
                self._come_again(f"node {self._own.node} should be left")
                continue
            gone_since = (gone_since or now) if self._is_gone(known) else None
            if gone_since is not None and now - gone_since > GONE_LIMIT_S:
                self._cancel_standby_jobs(known)
                reason = f"allocation {known.job_id} has ended, and the coordinator came to no end"
                return Verdict(state="failed", exit_code=1, reason=f"{reason}; see {self._job_dir}/logs")

    def _is_gone(self, known: Allocation) -> bool:
        """Whether no node of this job is left, as far as Slurm says: the allocation has ended, and not
        because training goes on on nodes of standby jobs alone."""
        with contextlib.suppress(SlurmUnavailable, SlurmRefused):
            if self._slurm.job(known.job_id).is_over:
                now = Allocation.read(self._job_dir) or known
                return not now.given_back or not self._slurm.queued(standby_jobs_of(known.job_id))
        return False

    def _cancel_standby_jobs(self, known: Allocation) -> None:
        """All that led was killed, and nobody else is there to cancel what waits in the queue."""
        with contextlib.suppress(SlurmUnavailable, SlurmRefused):
            for job in self._slurm.queued(standby_jobs_of(known.job_id)):
                with contextlib.suppress(SlurmRefused):  # it has ended meanwhile
                    self._slurm.cancel(job.job_id)

    def _own_node_is_left(self) -> bool:
        if self._own.node is None:
            return False
        with contextlib.suppress(SlurmUnavailable, SlurmRefused):
            found = self._slurm.nodes([self._own.node]).get(self._own.node)
            return found is not None and bool(found.state.leaving_kinds)
        return False

    def _come_again(self, why: str) -> int:
        """Have this controller's job go back into the queue; training goes on meanwhile."""
        if self._own.job_id is None:
            return ENDED_CODE
        print(f"tm_slurm: this controller is requeued: {why}", flush=True)
        with contextlib.suppress(SlurmUnavailable, SlurmRefused):
            self._slurm.requeue(self._own.job_id)
        return ENDED_CODE

    def _pause(self) -> None:
        if self._told:
            raise Told
        time.sleep(LOOK_S)


SIGNALS = (signal.SIGTERM, signal.SIGUSR2)


def control(config: Config, job_dir: Path) -> int:
    """Run the controller for the job directory of the resolved `config`; the exit code to end with."""
    own = Own.from_environment()
    return Controller(config, job_dir, own, connect()).run()


def main(arguments: list[str]) -> int:
    """Run as a program; see the module's text. Exit code 2 and one line for whatever the user can mend."""
    parser = argparse.ArgumentParser(prog="python -m tm_slurm.submit.controller", description=__doc__)
    parser.add_argument("config", type=Path, help="the job's configuration, or a job directory to go on with")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="holds over the configuration")
    given = parser.parse_args(arguments)
    try:
        if given.config.is_dir():
            return control(load(given.config / "config.yaml"), given.config)
        typed = dict(map(parse_override, given.overrides))
        overrides = {**asked_overrides(os.environ, holds_nodes=False), **typed, "job.launch": "allocation"}
        config = resolve(load(given.config, overrides), base=Path.cwd(), python=sys.executable)
        check_options(config)
        own = Own.from_environment()
        submission = new_submission()
        if own.job_id is None:
            config = named_for(config, f"shell-{submission}")
        restarted = own.job_id is not None and bool(attempt_now())
        job_dir = prepare_job_dir(config, own.job_id, None if restarted else submission)
    except (ConfigError, JobDirError, Unsubmittable) as error:
        print(f"tm_slurm: {error}", file=sys.stderr)
        return 2
    print(f"tm_slurm: job directory {job_dir}", file=sys.stderr)
    return control(config, job_dir)


class ControllerTask:
    """What submitit runs in the controller's job; run again when that has gone back into the queue."""

    def __init__(self, config_text: str, submission: str) -> None:
        """`config_text` is a resolved configuration, `submission` a name of this one submission."""
        self.config_text = config_text
        self.submission = submission

    def __call__(self) -> int:
        """Make the job directory if nobody has yet, and control the job to its end; return 0 or exit with its
        code.
        """
        config = loads(self.config_text, name="the submitted configuration")
        own = Own.from_environment()
        if own.job_id is None:
            sys.exit("tm_slurm: not in a Slurm job: SLURM_JOB_ID is not set")
        try:
            job_dir = prepare_job_dir(config, own.job_id, self.submission)
        except JobDirError as error:
            sys.exit(f"tm_slurm: {error}")
        code = control(config, job_dir)
        if code:
            sys.exit(code)
        return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
