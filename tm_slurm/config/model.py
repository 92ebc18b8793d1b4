"""Every key of a job's configuration, with its type, its default, its meaning and its limits.

The text behind each key is what configs/README.md says of it (see `tm_slurm.config.reference`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from tm_slurm.config.impossible import ImpossibleValue
from tm_slurm.config.sbatch_options import check_sbatch_options, features_of
from tm_slurm.config.time_limit import TimeLimitError, parse_time_limit

SLOWEST_BYTES_S = 100e6
"""Bytes a second at which a state still counts as on its way: 1 Gbit/s nearly. What it takes so is added to
switch_timeout_s."""

LEAVING_S = 20
"""What it takes to tell all agents to go, end their rank processes, and end the job."""

NO_STANDBY_CHOICES = ("wait", "double-up", "shrink", "requeue", "fail")
SnapshotChoice = Literal["auto", "always", "never"]
LaunchChoice = Literal["batch", "allocation"]
BatchHostChoice = Literal["keep", "requeue"]
NonfiniteChoice = Literal["ignore", "redo", "stop"]


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """What is asked of Slurm: machines, time, place."""

    name: Annotated[str, "the job's name in squeue"] = "tm_slurm"
    nodes: Annotated[int, "active nodes: those that hold ranks"] = 1
    standbys: Annotated[int, "further nodes held in reserve, warmed up, to take over a leaver's ranks"] = 0
    ranks_per_node: Annotated[int, "rank processes on each active node (one for each GPU, usually)"] = 1
    ranks: Annotated[
        int | None,
        "all ranks together; only checked: it must be nodes times ranks_per_node",
    ] = None
    cpus_per_rank: Annotated[int, "CPUs for each rank process"] = 1
    gpus_per_rank: Annotated[int, "GPUs for each rank process"] = 0
    partition: Annotated[str | None, "Slurm partition; without it the cluster's default"] = None
    account: Annotated[str | None, "account to charge"] = None
    qos: Annotated[str | None, "quality of service"] = None
    time_limit: Annotated[
        str | int | None,
        "minutes, or Slurm's spellings (`1-12:00:00`, `90:00`, `UNLIMITED`); without it the partition's",
    ] = None
    signal_delay_s: Annotated[
        int,
        "seconds before the time limit at which Slurm warns the job (SIGUSR2), and before a reservation of "
        "all its nodes; where a checkpoint takes more than a third of that, the job stops earlier by itself",
    ] = 120
    max_requeues: Annotated[int, "a job that was started again so often is not requeued any more"] = 3
    constraint: Annotated[str | None, "node features, as for `sbatch --constraint`"] = None
    batch_feature: Annotated[
        str | None,
        "feature of the node that the batch script runs on (`sbatch --batch`), the one that cannot be given "
        "back: a service node, say; without `constraint`, one node with it is asked for; a `constraint` has "
        "to name it (`[gpu*5&service*1]`)",
    ] = None
    exclude: Annotated[str | None, "nodes not to use, as a host list"] = None
    reservation: Annotated[str | None, "reservation to run in"] = None
    memory: Annotated[
        str | int | None,
        "memory a node, as for `sbatch --mem` (a number is megabytes)",
    ] = None
    directory: Annotated[
        str,
        "where job directories are made, on a file system that all nodes share; `~` and `%j` (the "
        "job's id) are replaced, and the id is added as a folder where there is no `%j`; relative "
        "to the directory of submission",
    ] = "tm-slurm-jobs"
    launch: Annotated[
        LaunchChoice,
        "`batch`: one job holds everything, and the node that its batch script is on cannot be given back; "
        "`allocation`: the job is a controller of one CPU that gets the nodes by `salloc --no-shell`, so "
        "that each of them can",
    ] = "batch"
    python: Annotated[str | None, "Python interpreter on the nodes; without it the one that submits"] = None
    setup: Annotated[
        list[str],
        "shell lines to run on the batch host before the agents start",
    ] = field(default_factory=list)
    sbatch: Annotated[
        dict[str, Any],
        "further sbatch options, long names without the dashes (`mail-user: me`)",
    ] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _at_least(
            self, {"nodes": 1, "standbys": 0, "ranks_per_node": 1, "cpus_per_rank": 1, "gpus_per_rank": 0}
        )
        _at_least(self, {"signal_delay_s": 1, "max_requeues": 0})
        if self.ranks is not None:
            self._check_ranks(self.ranks)
        try:
            parse_time_limit(self.time_limit)
        except TimeLimitError as error:
            raise ImpossibleValue("time_limit", str(error)) from error
        if isinstance(self.memory, int):
            _at_least(self, {"memory": 0})
        if isinstance(self.memory, str) and not re.fullmatch(r"\d+[KMGT]?B?", self.memory, re.IGNORECASE):
            raise ImpossibleValue("memory", f"expected a size such as 16G or 500M, found {self.memory!r}")
        if not self.directory.strip():
            raise ImpossibleValue("directory", "expected a path, found empty text")
        for key in fields(self):
            value = getattr(self, key.name)
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str) and (not text.isprintable() or not text.strip()):
                    raise ImpossibleValue(key.name, f"expected one line of printable text, found {text!r}")
        self._check_batch_feature()
        check_sbatch_options(self.sbatch)

    def _check_batch_feature(self) -> None:
        feature = self.batch_feature
        if feature is None:
            return
        if not re.fullmatch(r"[\w.:=+-]+", feature):
            raise ImpossibleValue(
                "batch_feature", f"expected the name of one node feature, found {feature!r}"
            )
        if self.launch == "allocation":
            problem = "expected none with launch: allocation, where there is no batch script"
            raise ImpossibleValue("batch_feature", f"{problem}, found {feature!r}")
        if self.constraint is not None and feature not in features_of(self.constraint):
            example = f"[{self.constraint}*{self.all_nodes - 1}&{feature}*1]"
            problem = f"expected one that names batch_feature {feature}, such as {example}"
            raise ImpossibleValue("constraint", f"{problem}, found {self.constraint!r}")

    def _check_ranks(self, ranks: int) -> None:
        if ranks < 1 or ranks % self.ranks_per_node:
            raise ImpossibleValue(
                "ranks",
                f"{ranks} ranks cannot be divided into nodes of ranks_per_node: {self.ranks_per_node}",
            )
        if ranks != self.nodes * self.ranks_per_node:
            raise ImpossibleValue(
                "ranks",
                f"{ranks} ranks with ranks_per_node: {self.ranks_per_node} need "
                f"nodes: {ranks // self.ranks_per_node}, found nodes: {self.nodes}",
            )

    @property
    def stop_timeout_s(self) -> float:
        """Of Slurm's warning before the time limit, what a last checkpoint may take; the rest is for
        leaving."""
        return max(self.signal_delay_s - LEAVING_S, self.signal_delay_s / 2)

    @property
    def all_nodes(self) -> int:
        """Active nodes and standbys together: what Slurm is asked for."""
        return self.nodes + self.standbys


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What runs in each rank process."""

    module: Annotated[str | None, "Python module to run (`python -m`); this or `script`"] = None
    script: Annotated[str | None, "Python file to run; this or `module`"] = None
    args: Annotated[list[str], "arguments for it"] = field(default_factory=list)
    steps: Annotated[int | None, "training steps; holds over what the script says"] = None
    options: Annotated[
        dict[str, Any],
        "free-form, for the script: `tm_slurm.options()` returns it",
    ] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.module is None and self.script is None:
            raise ImpossibleValue(
                "module", "expected 'module' or 'script', found neither: what is to be run?"
            )
        if self.module is not None and self.script is not None:
            raise ImpossibleValue("script", "expected 'module' or 'script', found both")
        if self.module is not None and not all(part.isidentifier() for part in self.module.split(".")):
            raise ImpossibleValue(
                "module", f"expected a module name such as package.train, found {self.module!r}"
            )
        if self.script is not None and not self.script.strip():
            raise ImpossibleValue("script", "expected a path, found empty text")
        if self.steps is not None:
            _at_least(self, {"steps": 1})


HEARTBEATS_A_SECOND = 10_000
"""That a leader hears with ease, and answers: some 0.3 of a core."""

HEARTBEATS_IN_KEEPALIVE = 2.5
"""One may be lost on the way, or late. They keep up the lease, too, for those who cannot see it renewed."""


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """How the coordinator behaves. All times in seconds."""

    poll_interval_s: Annotated[
        float,
        "how often Slurm is asked for the nodes' states; less often in a job of more than 1,000 nodes (so "
        "many are asked for in a second), where strigger and the plugin tell sooner",
    ] = 1.0
    heartbeat_s: Annotated[
        float,
        "how often agents report to the leader (less often where that would be more than 10,000 reports a "
        "second, but 2.5 times in keepalive_s and lease_s)",
    ] = 0.5
    keepalive_s: Annotated[
        float,
        "silence after which a link or a control connection counts as broken",
    ] = 2.0
    lease_s: Annotated[float, "silence after which another agent may become leader"] = 2.0
    start_timeout_s: Annotated[float, "time for all rank processes to come up"] = 600.0
    prepare_timeout_s: Annotated[
        float, "time for the preparation of a move, during training, or for a successor to build its role"
    ] = 120.0
    switch_timeout_s: Annotated[
        float,
        "time for the pause of a move, or for a successor that has its role to take the state, before it "
        "counts as failed; 10 s more for each gigabyte of state",
    ] = 60.0
    finish_timeout_s: Annotated[
        float,
        "time for the rank processes to end after the last step (what the script does after training is in "
        "it); then they are ended",
    ] = 600.0
    stop_timeout_s: Annotated[
        float | None,
        "time for the checkpoint when the job must stop (time limit, preemption); then it goes back into the "
        "queue with the newest one that is there; without it, job.signal_delay_s less 20 s, or half of it "
        "where that is more",
    ] = None
    shadow_steps: Annotated[int, "warm-up steps of a standby, inside the sandbox"] = 3
    on_no_standby: Annotated[
        list[str],
        "what to do when ranks are lost and no standby is left, in the order to try: `wait` for a node "
        "(refill_wait_s), `double-up` (a surviving node hosts them as well, until another comes), `shrink` "
        "(the others do their share of every step as well, until a node comes: the same global batch, summed "
        "in another order; for replicas whose script uses tm_slurm.shares()), `requeue` (the job goes back "
        "into the queue and on from its checkpoint), `fail`",
    ] = field(default_factory=lambda: ["double-up", "fail"])
    refill_wait_s: Annotated[float, "how long `wait` waits; training stands still meanwhile"] = 120.0
    max_failures_per_step: Annotated[
        int,
        "a step at which rank processes have died so often is itself the cause: the job ends with the first "
        "one's last words",
    ] = 2
    on_nonfinite: Annotated[
        NonfiniteChoice,
        "when a rank's gradients are not all finite before they are applied: nothing; do the step again "
        "once, then end the job; end the job",
    ] = "ignore"
    snapshots: Annotated[
        SnapshotChoice,
        "keep each rank's state in the memory of another node's agent: where parameters have no replica on "
        "another node, always, or never",
    ] = "auto"
    snapshot_every_steps: Annotated[
        int | None,
        "without it, as often as costs at most 1 % of the time",
    ] = None
    snapshot_memory: Annotated[
        int,
        "megabytes that an agent may hold for other nodes' snapshots (two for each rank)",
    ] = 65536
    checkpoint_every_steps: Annotated[
        int | None,
        "write a checkpoint to the job directory so often, beside training; without it only when the job "
        "must stop (time limit, preemption)",
    ] = None
    checkpoints_kept: Annotated[int, "older ones are removed"] = 2
    watchdog_floor_s: Annotated[
        float,
        "a step is never called stuck before so many seconds: more than the longest time that some ranks "
        "work on alone while others wait for them (an evaluation of rank 0, say)",
    ] = 60.0
    watchdog_factor: Annotated[
        float,
        "a step is called stuck when it takes so many times as long as this job's long steps do (those that "
        "have come twice)",
    ] = 10.0
    straggler_slower: Annotated[
        float | None,
        "a node is left when the own work of one of its ranks (the part of a step in which it waits for no "
        "other) takes by so much longer than that of its replicas (0.1: 10 %), step after step (a rank "
        "that is slow on a second node, too, has more to do, and no node is left for it); without it nobody "
        "looks, and none is",
    ] = None
    straggler_steps: Annotated[
        int,
        "after so many steps that is certain of a rank that is slower by twice as much or more; after more "
        "steps of one that is slower by less",
    ] = 10
    window_lead_s: Annotated[
        float | None,
        "how long before a reservation of its nodes for something else the job leaves them; without it 600, "
        "or three times what the longest preparation of a move has taken, if that is more",
    ] = None
    metrics_port: Annotated[
        int | None,
        "port at which the coordinator tells its metrics to Prometheus (GET /metrics; on which node, the job "
        "directory's metrics_targets.json says, for file_sd_configs); 0: any free one; without it there are "
        "none",
    ] = None
    signed_events: Annotated[
        bool,
        "hear what root's programs on the nodes tell (SPANK plugin, prolog, epilog, health checks, "
        "triggers), where an administrator has installed them",
    ] = True
    batch_host_drain: Annotated[
        BatchHostChoice,
        "when the node of the batch script should be given back, which Slurm cannot take out of a running "
        "job: `keep` (its ranks move away, and it stays DRAINING until the job ends), or `requeue` (the job "
        "writes a checkpoint and goes back into the queue, at most job.max_requeues times)",
    ] = "keep"
    release: Annotated[bool, "give the leaver's node back to Slurm when its ranks have moved"] = True
    refill: Annotated[
        bool,
        "ask Slurm for another node (a one-node job like this one, which ends with it) for each that was "
        "given back or lost; off, since it takes and charges nodes beyond those that were asked for at first",
    ] = False
    elastic: Annotated[
        bool,
        "the same as soon as a node should be left and no standby is free for it, so that none need be held "
        "in reserve; training goes on meanwhile",
    ] = False

    def __post_init__(self) -> None:
        for key in fields(self):
            seconds = getattr(self, key.name) if key.name.endswith("_s") else None
            if seconds is not None and seconds <= 0:
                raise ImpossibleValue(key.name, f"expected more than 0 seconds, found {seconds:g}")
        _at_least(self, {"shadow_steps": 0, "max_failures_per_step": 1, "checkpoints_kept": 1})
        _at_least(self, {"snapshot_memory": 1})
        for name in ("snapshot_every_steps", "checkpoint_every_steps"):
            if getattr(self, name) is not None:
                _at_least(self, {name: 1})
        for choice in self.on_no_standby:
            if choice not in NO_STANDBY_CHOICES:
                known = ", ".join(NO_STANDBY_CHOICES)
                raise ImpossibleValue("on_no_standby", f"expected some of {known}, found {choice!r}")
        if self.straggler_slower is not None and self.straggler_slower <= 0:
            raise ImpossibleValue(
                "straggler_slower", f"expected more than 0, found {self.straggler_slower:g}"
            )
        _at_least(self, {"straggler_steps": 5})
        if self.metrics_port is not None and not 0 <= self.metrics_port < 65536:
            raise ImpossibleValue("metrics_port", f"expected a port (0 to 65535), found {self.metrics_port}")
        if self.watchdog_factor <= 1:
            raise ImpossibleValue("watchdog_factor", f"expected more than 1, found {self.watchdog_factor:g}")
        if self.heartbeat_s >= self.keepalive_s:
            raise ImpossibleValue(
                "heartbeat_s",
                f"expected less than keepalive_s ({self.keepalive_s:g}): an agent would be taken for dead "
                f"between two reports; found {self.heartbeat_s:g}",
            )

    def heartbeat_of(self, nodes: int) -> float:
        """Seconds between two heartbeats where there are so many nodes: `heartbeat_s`, and longer in a large
        job, so that hearing and answering them does not take all of the leader's core."""
        enough = min(self.keepalive_s, self.lease_s) / HEARTBEATS_IN_KEEPALIVE
        return max(self.heartbeat_s, min(nodes / HEARTBEATS_A_SECOND, enough))


@dataclass(frozen=True, kw_only=True)
class CommConfig:
    """The collectives between ranks."""

    timeout_s: Annotated[float, "seconds after which a collective fails although no link is broken"] = 1800.0
    delta_groups: Annotated[
        bool,
        "in a planned move replace single links; false: all ranks end their groups and build again together, "
        "as a migration without delta groups does (TrainMover's Migration Naive; for benchmarks)",
    ] = True

    def __post_init__(self) -> None:
        if self.timeout_s <= 0:
            raise ImpossibleValue("timeout_s", f"expected more than 0 seconds, found {self.timeout_s:g}")


@dataclass(frozen=True, kw_only=True)
class StandbyConfig:
    """How standbys warm up."""

    warm_up: Annotated[
        bool,
        "warm up ahead; false: a standby builds its role and does a first step in the pause (for benchmarks)",
    ] = True
    recorded_steps: Annotated[
        int,
        "first steps of the job whose collectives one rank of each role class records, for standbys to "
        "warm up with; 0: none, standbys warm up with identity answers",
    ] = 2
    recording_limit_mb: Annotated[
        int,
        "megabytes of host memory that a rank may use for its recording; one that grows beyond is dropped, "
        "and standbys warm up with identity answers",
    ] = 4096
    recording_wait_s: Annotated[
        float,
        "how long a standby waits for the recording of its role class before it warms up without it",
    ] = 60.0
    warm_order: Annotated[
        list[str],
        "the order in which a standby warms up for role classes (`first`, `middle`, `last` of a pipeline, "
        "`only` without one, or the names that `build` gives in `role_class`); others come before these",
    ] = field(default_factory=lambda: ["first", "last", "middle"])
    keep_built: Annotated[
        list[str],
        "the class that each standby keeps built in the end: the first entry is the first standby's, and so "
        "on, the last one that of all others",
    ] = field(default_factory=lambda: ["middle"])
    cpu_share: Annotated[
        float,
        "part of its CPUs that a standby's process may use while it warms up, where it shares the machine",
    ] = 1.0
    shared_compile_cache: Annotated[
        bool,
        "keep what torch.compile makes in the job directory, so that each program is compiled once a job",
    ] = True

    def __post_init__(self) -> None:
        _at_least(self, {"recorded_steps": 0, "recording_limit_mb": 1})
        if self.recording_wait_s < 0:
            raise ImpossibleValue(
                "recording_wait_s", f"expected 0 seconds or more, found {self.recording_wait_s:g}"
            )
        if not self.keep_built:
            raise ImpossibleValue("keep_built", "expected at least one role class, found none")
        if not 0 < self.cpu_share <= 1:
            raise ImpossibleValue("cpu_share", f"expected more than 0, at most 1, found {self.cpu_share:g}")


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole job."""

    job: JobConfig = field(default_factory=JobConfig)
    train: TrainConfig
    policy: PolicyConfig = field(
        default_factory=PolicyConfig, metadata={"doc": "how the coordinator behaves"}
    )
    comm: CommConfig = field(default_factory=CommConfig)
    standby: StandbyConfig = field(default_factory=StandbyConfig)


SECTIONS: Mapping[str, type] = {
    "job": JobConfig,
    "train": TrainConfig,
    "policy": PolicyConfig,
    "comm": CommConfig,
    "standby": StandbyConfig,
}


def _at_least(section: object, least: Mapping[str, int]) -> None:
    for name, lowest in least.items():
        value = getattr(section, name)
        if value < lowest:
            raise ImpossibleValue(name, f"expected at least {lowest}, found {value}")
