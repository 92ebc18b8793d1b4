"""The reference of all keys, as Markdown, out of the dataclasses themselves:

`python -m tm_slurm.config.reference`.
"""

from __future__ import annotations

import types
import typing
from dataclasses import MISSING, Field, fields
from typing import Any

from tm_slurm.config.model import SECTIONS

_INTRODUCTION = """\
# Configuration of a job

One YAML file says what is asked of Slurm and what is run. `tm-slurm submit configs/char_gpt.yaml` and
`sbatch sbatch_templates/train.sbatch configs/char_gpt.yaml` read it; `--set train.steps=50` after the first,
`train.steps=50` after the second, hold over it.
A misspelt key, a wrong type or an impossible number is an error with file and line, and nothing is submitted.
Text is read by the rules of YAML 1.2: `3e-4` is a number, `1:30:00` is text.

This page is written by `python -m tm_slurm.config.reference > configs/README.md`.
"""

_TYPE_NAMES: dict[Any, str] = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    types.NoneType: "nothing",
}


def markdown() -> str:
    """Return the reference of every section and key: name, type, default, meaning."""
    parts = [_INTRODUCTION]
    for name, section in SECTIONS.items():
        parts.append(f"\n## `{name}`\n\n{(section.__doc__ or '').strip()}\n\n")
        parts.append("| key | type | default | meaning |\n|---|---|---|---|\n")
        hints = typing.get_type_hints(section, include_extras=True)
        for key in fields(section):
            kind, meaning = typing.get_args(hints[key.name])[:2]
            cells = [f"`{key.name}`", _type_name(kind), _default(key), meaning]
            parts.append(f"| {' | '.join(cells)} |\n")
    return "".join(parts)


def _type_name(kind: Any) -> str:
    if isinstance(kind, types.UnionType):
        return " or ".join(
            _type_name(choice) for choice in typing.get_args(kind) if choice is not types.NoneType
        )
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if origin is list:
        return f"list of {_type_name(inside[0])}"
    if origin is dict:
        return "keys and values"
    if origin is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in inside)
    return _TYPE_NAMES[kind]


def _default(key: Field[Any]) -> str:
    value = key.default_factory() if key.default_factory is not MISSING else key.default
    if value is None or value in ([], {}):
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, list):
        return f"`[{', '.join(value)}]`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


if __name__ == "__main__":
    print(markdown(), end="")
