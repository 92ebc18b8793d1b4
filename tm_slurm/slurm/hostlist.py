"""Slurm's short way to write many host names (`n[1-3,7]`), without asking Slurm.

Agrees with `scontrol show hostnames` on everything that Slurm 22.05 accepts, and also reads a suffix after
the brackets (`gpu[01-10]-ib`), which some sites' address lists use and that Slurm version refuses.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator

MAX_HOSTS = 65536
"""The most names one list may stand for:

Slurm's own limit, and what keeps a typing error from filling memory.
"""

_RANGE = re.compile(r"(\d+)(?:-(\d+))?\Z")
_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")


class HostlistError(ValueError):
    """The text is not a host list; the message quotes it and says where it stops making sense."""


def expand(hostlist: str) -> list[str]:
    """Return the host names that `hostlist` stands for, in Slurm's order, repeats kept.

    An empty list and Slurm's `(null)` give no names. Raises HostlistError for anything that is not a host
    list.
    """
    if hostlist.strip() in {"", "(null)"}:
        return []
    names: list[str] = []
    for expression in _split_at_commas(hostlist):
        names.extend(itertools.islice(_expand_one(expression, hostlist), MAX_HOSTS + 1))
        if len(names) > MAX_HOSTS:
            raise HostlistError(f"host list {hostlist!r} stands for more than {MAX_HOSTS} hosts")
    return names


def join(names: Iterable[str]) -> str:
    """Return `names` as a host list that every Slurm command takes: plain names with commas between them."""
    return ",".join(names)


def _split_at_commas(hostlist: str) -> Iterator[str]:
    depth = 0
    start = 0
    for position, character in enumerate(hostlist):
        if character == "[":
            depth += 1
        elif character == "]":
            depth -= 1
        if depth not in {0, 1}:
            raise HostlistError(
                f"host list {hostlist!r}: unexpected {character!r} at character {position + 1}"
            )
        if depth == 0 and (character == "," or character.isspace()):
            if start < position:
                yield hostlist[start:position]
            start = position + 1
    if depth:
        raise HostlistError(f"host list {hostlist!r}: a '[' is never closed")
    if start < len(hostlist):
        yield hostlist[start:]


def _expand_one(expression: str, whole: str) -> Iterator[str]:
    choices: list[list[str]] = []
    size = 1
    for bracketed, plain in _PIECE.findall(expression):
        choices.append([plain] if plain else _expand_brackets(bracketed, whole))
        size *= len(choices[-1])
        if size > MAX_HOSTS:
            raise HostlistError(f"host list {whole!r} stands for more than {MAX_HOSTS} hosts")
    return ("".join(parts) for parts in itertools.product(*choices))


def _expand_brackets(inside: str, whole: str) -> list[str]:
    numbers: list[str] = []
    for part in inside.split(","):
        match = _RANGE.match(part)
        if not match:
            raise HostlistError(
                f"host list {whole!r}: expected a number or a range such as 1-8, found {part!r}"
            )
        low, high = match[1], match[2] or match[1]
        if int(low) > int(high):
            raise HostlistError(f"host list {whole!r}: the range {part!r} runs backwards")
        if int(high) - int(low) >= MAX_HOSTS:
            raise HostlistError(f"host list {whole!r} stands for more than {MAX_HOSTS} hosts")
        numbers.extend(f"{number:0{len(low)}d}" for number in range(int(low), int(high) + 1))
    return numbers
