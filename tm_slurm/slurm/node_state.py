"""What a node's state says, in every spelling Slurm has for it.

`scontrol` writes a base state and flags (`MIXED+DRAIN+REBOOT_REQUESTED`), `sinfo` a single word with a mark
behind it (`DRAINING@`, `alloc*`). Both are read into the same two fields, because a state read as one word
hides what matters: `MIXED+DRAIN` in a maintenance reservation is not a healthy node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Base = Literal["IDLE", "ALLOCATED", "MIXED", "DOWN", "ERROR", "FUTURE", "UNKNOWN"]
LeavingKind = Literal["down", "fail", "reboot", "drain", "maintenance"]

LEAVING_KINDS: tuple[LeavingKind, ...] = get_args(LeavingKind)
"""Why a node is about to be lost, the most urgent first."""

_BASES: dict[str, Base] = {name: name for name in get_args(Base)} | {
    "ALLOC": "ALLOCATED",
    "MIX": "MIXED",
    "FUTR": "FUTURE",
    "UNK": "UNKNOWN",
}

# Words that stand for a base state and flags at once: what sinfo prints where scontrol prints the parts.
_WORDS: dict[str, tuple[Base, str]] = {
    "DRAINING": ("ALLOCATED", "DRAIN"),
    "DRNG": ("ALLOCATED", "DRAIN"),
    "DRAINED": ("IDLE", "DRAIN"),
    "FAILING": ("ALLOCATED", "FAIL"),
    "FAILG": ("ALLOCATED", "FAIL"),
}

_FLAG_SPELLINGS: dict[str, str] = {
    "BOOT": "REBOOT_ISSUED",
    "CANC_R": "CANCEL_REBOOT",
    "COMP": "COMPLETING",
    "INVAL": "INVALID_REG",
    "INVALID": "INVALID_REG",
    "MAINT": "MAINTENANCE",
    "NO_RESPOND": "NOT_RESPONDING",
    "NPC": "PERFCTRS",
    "PLND": "PLANNED",
    "POWERED_DN": "POWERED_DOWN",
    "POWRING_DN": "POWERING_DOWN",
    "POW_DN": "POWER_DOWN",
    "POW_UP": "POWER_UP",
    "REBOOT": "REBOOT_REQUESTED",
    "RESM": "RESUME",
    "RESV": "RESERVED",
}

_MARKS: dict[str, str] = {
    "*": "NOT_RESPONDING",
    "~": "POWERED_DOWN",
    "#": "POWERING_UP",
    "!": "POWER_DOWN",
    "%": "POWERING_DOWN",
    "$": "MAINTENANCE",
    "@": "REBOOT_REQUESTED",
    "^": "REBOOT_ISSUED",
    "-": "PLANNED",
}

_REBOOT_FLAGS = frozenset({"REBOOT_REQUESTED", "REBOOT_ISSUED"})
_POWER_OFF_FLAGS = frozenset({"POWERING_DOWN", "POWERED_DOWN"})


@dataclass(frozen=True)
class NodeState:
    """A node's base state and its flags, in the long words of `scontrol show node`."""

    base: Base
    flags: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, text: str) -> NodeState:
        """Read any spelling: `MIXED+DRAIN`, `DOWN*`, `DRAINING@`, `alloc$`, `REBOOT^`.

        Nothing is refused: a word that no known Slurm prints is kept as a flag, so that a newer Slurm is
        still read.
        """
        base: Base | None = None
        flags: set[str] = set()
        for part in text.strip().upper().split("+"):
            word = part.rstrip("".join(_MARKS))
            marks = part[len(word) :]
            if word in {"REBOOT", "BOOT"} and "^" in marks:
                word = "REBOOT_ISSUED"
            flags.update(_MARKS[mark] for mark in marks)
            if word in _BASES:
                base = _BASES[word]
            elif word in _WORDS:
                implied_base, flag = _WORDS[word]
                base = base or implied_base
                flags.add(flag)
            elif word:
                flags.add(_FLAG_SPELLINGS.get(word, word))
        if base is None:
            # sinfo's one word for a node that no job holds (MAINT, RESERVED, PLANNED, FAIL, DRAIN,
            # COMPLETING …).
            base = "IDLE" if flags else "UNKNOWN"
        return cls(base, frozenset(flags))

    def __str__(self) -> str:
        return "+".join([self.base, *sorted(self.flags)])

    @property
    def is_busy(self) -> bool:
        """True while something of a job is on the node, its clean-up included."""
        return self.base in {"ALLOCATED", "MIXED"} or "COMPLETING" in self.flags

    @property
    def is_drained(self) -> bool:
        """True when the node is to be drained and nothing of a job is on it any more: the administrator has
        it.
        """
        return "DRAIN" in self.flags and not self.is_busy

    @property
    def is_free(self) -> bool:
        """True when nothing of a job is on the node any more, whatever it was left for: DRAINED, or free
        for a reservation, a reboot, a repair.
        """
        return not self.is_busy and self.base != "UNKNOWN"

    @property
    def leaving_kinds(self) -> tuple[LeavingKind, ...]:
        """Every reason in this state for ranks to leave the node, the most urgent first; empty for a node
        to stay on.

        FAIL means "applications should leave" and counts like DRAIN. A node that does not answer is not
        leaving: it becomes DOWN when slurmctld gives it up.
        """
        found: set[LeavingKind] = set()
        if self.base in {"DOWN", "ERROR"} or self.flags & _POWER_OFF_FLAGS:
            found.add("down")
        if "FAIL" in self.flags:
            found.add("fail")
        if self.flags & _REBOOT_FLAGS:
            found.add("reboot")
        if self.flags & {"DRAIN", "POWER_DOWN"}:
            found.add("drain")
        if "MAINTENANCE" in self.flags:
            found.add("maintenance")
        return tuple(kind for kind in LEAVING_KINDS if kind in found)

    def leaving(self) -> LeavingKind | None:
        """Return the most urgent reason to leave the node, or None when there is none."""
        kinds = self.leaving_kinds
        return kinds[0] if kinds else None
