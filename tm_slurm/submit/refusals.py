"""Which of sbatch's refusals are the user's own to mend, and by which key of the configuration."""

from __future__ import annotations

_KEYS = (
    ("invalid account", "job.account"),
    ("invalid qos", "job.qos"),
    ("violates accounting/qos policy", "job.account, job.qos"),
    ("invalid partition", "job.partition"),
    ("group not permitted to use this partition", "job.partition"),
    ("invalid feature specification", "job.constraint"),
    ("invalid constraint", "job.constraint"),
    ("job --batch option is invalid", "job.batch_feature"),
    ("invalid node name", "job.exclude"),
    ("generic resource (gres) specification", "job.gpus_per_rank"),
    ("invalid gres", "job.gpus_per_rank"),
    ("invalid trackable resource (tres)", "job.gpus_per_rank"),
    ("reservation is invalid", "job.reservation"),
    ("access denied to requested reservation", "job.reservation"),
    ("time limit is invalid", "job.time_limit"),
    ("invalid --time", "job.time_limit"),
    ("memory specification", "job.memory"),
    ("invalid --mem", "job.memory"),
    ("unrecognized option", "job.sbatch"),
    ("requested node configuration is not available", "job"),
    ("more processors requested than permitted", "job.cpus_per_rank"),
)
"""A phrase in sbatch's words, in lower case, and the key whose value it is about."""


def key_of(words: str) -> str | None:
    """Return the key that sbatch refused, as far as its words tell.

    None for what is not the user's mistake.
    """
    said = words.lower()
    return next((key for phrase, key in _KEYS if phrase in said), None)
