"""Slurm's ways to write a time limit."""

from __future__ import annotations

import math
import re

_NO_LIMIT = {"UNLIMITED", "INFINITE", "-1"}
_WITH_DAYS = re.compile(r"(\d+)-(\d+)(?::(\d+))?(?::(\d+))?\Z")
_WITHOUT_DAYS = re.compile(r"(\d+)(?::(\d+))?(?::(\d+))?\Z")


class TimeLimitError(ValueError):
    """Not a time limit that Slurm would read."""


def parse_time_limit(limit: str | int | None) -> float | None:
    """Return a time limit in seconds; None for no limit of its own (not given, or UNLIMITED).

    A number is minutes. Text is what `sbatch --time` takes: minutes, minutes:seconds, hours:minutes:seconds,
    days-hours, days-hours:minutes, days-hours:minutes:seconds. Raises TimeLimitError.
    """
    if limit is None:
        return None
    text = str(limit).strip()
    if text.upper() in _NO_LIMIT:
        return None
    seconds = _seconds(text)
    if seconds is None:
        raise TimeLimitError(
            f"expected minutes or a time such as 90:00, 12:00:00, 1-12 or 1-12:00:00, found {limit!r}"
        )
    if seconds <= 0:
        raise TimeLimitError(f"expected more than 0 minutes, found {limit!r} (UNLIMITED asks for no limit)")
    return float(seconds)


def minutes_of(limit: str | int | None) -> int | None:
    """Return a time limit in whole minutes, rounded up as Slurm does; None for no limit of its own."""
    seconds = parse_time_limit(limit)
    return None if seconds is None else math.ceil(seconds / 60)


def _seconds(text: str) -> int | None:
    with_days = _WITH_DAYS.match(text)
    if with_days:
        days, hours, minutes, seconds = (int(part or 0) for part in with_days.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    without_days = _WITHOUT_DAYS.match(text)
    if not without_days:
        return None
    parts = [int(part) for part in without_days.groups() if part is not None]
    if len(parts) == 1:
        return parts[0] * 60
    if len(parts) == 2:
        return parts[0] * 60 + parts[1]
    return (parts[0] * 60 + parts[1]) * 60 + parts[2]
