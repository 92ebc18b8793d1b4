"""What one check has found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["pass", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """`found` is what is there, `meaning` what it means for jobs of tm_slurm, `mend` the command or line that
    changes it (nothing, where nothing has to be)."""

    check: str
    verdict: Verdict
    found: str
    meaning: str = ""
    mend: str = ""


def passed(check: str, found: str, meaning: str = "") -> Finding:
    return Finding(check, "pass", found, meaning)


def warned(check: str, found: str, meaning: str, mend: str) -> Finding:
    """Jobs run; something is slower, or less is noticed."""
    return Finding(check, "warn", found, meaning, mend)


def failed(check: str, found: str, meaning: str, mend: str) -> Finding:
    """Jobs do not run, or are lost where they need not be."""
    return Finding(check, "fail", found, meaning, mend)
