"""A job's configuration: YAML text to typed, checked dataclasses and back. No torch."""

from __future__ import annotations

from tm_slurm.config.load import ConfigError, dump, load, loads, parse_override
from tm_slurm.config.model import CommConfig, Config, JobConfig, PolicyConfig, TrainConfig
from tm_slurm.config.time_limit import minutes_of

__all__ = [
    "CommConfig",
    "Config",
    "ConfigError",
    "JobConfig",
    "PolicyConfig",
    "TrainConfig",
    "dump",
    "load",
    "loads",
    "minutes_of",
    "parse_override",
]
