"""How each kind of fault is done to a node of the local cluster, and undone."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from training_jobs import TrainingJob

Act = Callable[[TrainingJob, str], None]


def _signal_rank(number: signal.Signals) -> Act:
    return lambda job, node: os.kill(job.rank_pid(node), number)


def _signal_agent(number: signal.Signals) -> Act:
    return lambda job, node: os.kill(job.agent_pid(node), number)


def _continue_agent(job: TrainingJob, node: str) -> None:
    """Whoever is on the node and was stopped goes on; fine if it is gone."""
    job.cluster.thaw(node)


INFLICT: dict[str, Act] = {
    "rank_killed": _signal_rank(signal.SIGKILL),
    "rank_stopped": _signal_rank(signal.SIGSTOP),
    "agent_killed": _signal_agent(signal.SIGKILL),
    "agent_stopped": _signal_agent(signal.SIGSTOP),
    "powered_off": lambda job, node: job.cluster.power_off(node),
    "powered_off_and_on": lambda job, node: job.cluster.power_off(node),
    "silently_off": lambda job, node: job.cluster.power_off(node, silent=True),
    "unplugged": lambda job, node: job.cluster.unplug(node),
    "frozen": lambda job, node: job.cluster.freeze(node),
    "slurmd_killed": lambda job, node: job.cluster.kill_slurmd(node),
    "drained": lambda job, node: job.cluster.drain(node, "chaos"),
    "drained_and_resumed": lambda job, node: job.cluster.drain(node, "chaos"),
    "set_down": lambda job, node: job.cluster.set_down(node, "chaos"),
    "leader_killed": _signal_agent(signal.SIGKILL),
    "leader_stopped": _signal_agent(signal.SIGSTOP),
    "leader_off": lambda job, node: job.cluster.power_off(node),
}

MEND: dict[str, Act] = {
    "agent_stopped": _continue_agent,
    "powered_off_and_on": lambda job, node: job.cluster.restore(node),
    "unplugged": lambda job, node: job.cluster.plug_in(node),
    "frozen": lambda job, node: job.cluster.thaw(node),
    "slurmd_killed": lambda job, node: job.cluster.restore(node),
    "drained_and_resumed": lambda job, node: job.cluster.resume(node),
    "leader_stopped": _continue_agent,
}
"""What is undone while the job runs; `restore` takes a while and runs beside everything else."""

SLOW = frozenset({"powered_off_and_on", "slurmd_killed"})

LOSES_THE_NODE = frozenset(
    {"powered_off", "powered_off_and_on", "silently_off", "unplugged", "frozen", "leader_off"}
)
"""Kinds by which a batch host loses its batch script; Slurm then calls the job CANCELLED at best."""
