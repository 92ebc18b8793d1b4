"""A node's state in Slurm's words, split into its flags."""

from __future__ import annotations

import re

_SUFFIXES = {"*": "NOT_RESPONDING"}
BROKEN = frozenset({"DOWN", "NOT_RESPONDING", "UNKNOWN", "FUTURE", "INVAL", "INVALID_REG", "ERROR"})
"""Flags of a node that cannot run a job until something is done about it."""
AWAY = BROKEN | {"DRAIN", "FAIL"}
"""Flags of a node that takes no new job."""


def flags_of(text: str) -> frozenset[str]:
    """The words of `MIXED+DRAIN`, `DOWN*+DRAIN` … ; a trailing `*` reads NOT_RESPONDING."""
    words: set[str] = set()
    for part in text.upper().split("+"):
        words.update(flag for suffix, flag in _SUFFIXES.items() if part.endswith(suffix))
        words.add(part.rstrip("*~#!%$@^-"))
    return frozenset(words - {""})


def states_in(text: str) -> dict[str, str]:
    """Node name to state text, from the output of `scontrol -o show nodes`."""
    found = {}
    for line in text.splitlines():
        match = re.match(r"NodeName=(\S+) ", line)
        state = re.search(r" State=(\S+)", line)
        if match and state:
            found[match[1]] = state[1]
    return found
