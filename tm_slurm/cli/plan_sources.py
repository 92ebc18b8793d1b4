"""Where the figures of a plan are from: the command line, a measurement, or an assumption that is said."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from tm_slurm.cli.failures import Failed, UserMistake
from tm_slurm.planning import costs, failures
from tm_slurm.planning.inputs import HOUR_S

SACCT_LIMIT_S = 300.0


class Sources:
    """Resolves each input of the plan; `named` then says for each where it is from."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._given = given
        self.named: dict[str, str] = {}
        ways = [name for name in ("mttf", "sacct_days", "sacct_file") if given[name] is not None]
        if len(ways) > 1:
            options = " and ".join("--" + name.replace("_", "-") for name in ways)
            raise UserMistake(f"{options}: expected one way to know the MTTF, found {len(ways)}")
        self._timeline: list[dict[str, Any]] = []
        self._job = ""
        if given["job"] is not None:
            self._read_job(given["job"])
        self._measured = costs.from_timeline(self._timeline, self._job)

    def said(self, option: str, name: str, default: float) -> float:
        """An input that is given or assumed."""
        value = float(self._given[option])
        self.named[name] = "assumed" if value == default and not _was_typed(option) else "given"
        return value

    def mttf(self, nodes: int) -> Callable[[int], float]:
        """Hours between failures, by number of nodes."""
        given, per_node = self._given, int(self._given["gpus_per_node"])
        if given["mttf"] is not None:
            self.named["mttf_h"] = "given"
            return failures.in_proportion(given["mttf"], nodes)
        try:
            rate = self._rate()
        except failures.NoFailures as error:
            raise UserMistake(str(error)) from None
        if rate is None:
            self.named["mttf_h"] = "published: 7.9 h at 1,024 GPUs, 1.8 h at 16,384 (arXiv 2410.21680)"
            return lambda other: failures.published_mttf_h(other * per_node)
        self.named["mttf_h"] = f"{rate.source}, ± {rate.uncertainty:.0%}"
        return rate.mttf_h

    def downtime(self) -> float:
        from tm_slurm.config.model import PolicyConfig

        assumed = costs.paper_unplanned(self._given["gpus"], PolicyConfig.keepalive_s)
        return self._cost("downtime", "downtime_s", self._measured[0] or self._bench() or assumed)

    def planned_downtime(self) -> float:
        assumed = costs.paper_planned(self._given["gpus"])
        return self._cost("planned_downtime", "planned_s", self._measured[1] or assumed)

    def restart(self) -> float:
        return self._cost("restart", "restart_s", costs.paper_restart(self._given["gpus"]))

    def no_standby(self, restart_s: float, downtime_s: float) -> float:
        seconds = max(restart_s, downtime_s)
        assumed = costs.Cost(seconds, "assumed: a cold node takes as long as a restart")
        return self._cost("no_standby", "no_standby_s", assumed)

    def interval(self, mttf_h: float) -> float:
        cost = float(self._given["checkpoint_cost"])
        if self._given["checkpoint_interval"] is None and cost == 0:
            raise UserMistake("--checkpoint-cost 0: expected --checkpoint-interval as well")
        best = costs.Cost(math.sqrt(2.0 * cost * mttf_h * HOUR_S), "Young's optimum")
        return self._cost("checkpoint_interval", "checkpoint_interval_s", best)

    def _cost(self, option: str, name: str, otherwise: costs.Cost) -> float:
        given = self._given[option]
        self.named[name] = "given" if given is not None else otherwise.source
        return float(given) if given is not None else otherwise.seconds

    def _bench(self) -> costs.Cost | None:
        from tm_slurm.cli.plan import BENCH

        path: Path = self._given["bench"] or BENCH
        if str(path) == "/dev/null":
            return None
        try:
            found = costs.from_bench(path)
        except costs.UnreadableCosts as error:
            raise UserMistake(str(error)) from None
        if found is None and self._given["bench"] is not None:
            raise UserMistake(f"--bench {path}: there is no such file: run `make bench-downtime`")
        return found

    def _rate(self) -> failures.FailureRate | None:
        given = self._given
        if given["sacct_file"] is not None:
            path: Path = given["sacct_file"]
            try:
                return failures.from_sacct(path.read_text(errors="replace"), str(path))
            except OSError as error:
                raise UserMistake(f"--sacct-file {path}: {error.strerror}") from None
        if given["sacct_days"] is not None:
            return failures.from_sacct(_sacct(given["sacct_days"]), f"sacct, {given['sacct_days']} days")
        return failures.from_timeline(self._timeline, self._nodes, self._job) if self._job else None

    def _read_job(self, job: str) -> None:
        from tm_slurm.cli.jobs import find_job_dir
        from tm_slurm.cli.naming import resolve
        from tm_slurm.config import ConfigError, load
        from tm_slurm.observe.follow import JobFiles

        job_dir = find_job_dir(resolve(job))
        self._timeline = JobFiles(job_dir).timeline()
        self._job = f"timeline of job {job}"
        try:
            self._nodes = load(job_dir / "config.yaml").job.nodes
        except ConfigError as error:
            raise UserMistake(str(error)) from None


def _was_typed(option: str) -> bool:
    context = click.get_current_context(silent=True)
    return context is not None and context.get_parameter_source(option) is not click.ParameterSource.DEFAULT


def _sacct(days: int) -> str:
    from tm_slurm.slurm.environment import for_client

    command = ["sacct", *failures.SACCT_OPTIONS, f"--starttime=now-{days}days"]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            env=for_client(),
            timeout=SACCT_LIMIT_S,
            check=False,
        )
    except FileNotFoundError:
        raise UserMistake("--sacct-days: sacct is not installed here: give --mttf or --sacct-file") from None
    except subprocess.TimeoutExpired:
        raise Failed(
            f"sacct: no answer within {SACCT_LIMIT_S:g} s: look at fewer days, or use --sacct-file"
        ) from None
    if done.returncode != 0:
        words = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        raise Failed(f"sacct: {words}: give --mttf, or --sacct-file from where accounting works")
    return done.stdout
