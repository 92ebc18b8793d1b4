"""A YAML file and the command line's overrides to a checked `Config`, and back to text."""

from __future__ import annotations

import difflib
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from tm_slurm.config import yaml_text
from tm_slurm.config.impossible import ImpossibleValue
from tm_slurm.config.model import SECTIONS, Config
from tm_slurm.config.yaml_text import Entry, YamlError

_Section = TypeVar("_Section")


class ConfigError(ValueError):
    """A configuration that cannot be used: one line, `file:line: what was expected and found`."""


def load(path: Path | str, overrides: Mapping[str, Any] | None = None) -> Config:
    """Read the configuration in the file at `path`.

    `overrides` hold over the file: dotted keys ("train.steps") and their values, as they come from the
    command line. Raises ConfigError, naming file and line and, for a misspelt key, the nearest one that
    exists.
    """
    try:
        with open(path, "rb") as stream:
            text = stream.read(yaml_text.MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if len(text) > yaml_text.MAX_BYTES:
        raise ConfigError(f"{path}: expected at most {yaml_text.MAX_BYTES} bytes: is this a configuration?")
    return loads(text, name=str(path), overrides=overrides)


def loads(text: str | bytes, *, name: str, overrides: Mapping[str, Any] | None = None) -> Config:
    """Read the configuration in `text`, which messages call `name`; see `load`."""
    try:
        root = yaml_text.read(text, name)
    except YamlError as error:
        place = f"{name}:{error.line}" if error.line is not None else name
        raise ConfigError(f"{place}: {error}") from error
    if not isinstance(root.value, dict):
        raise ConfigError(f"{root.where}: expected sections such as 'job:', found {_describe(root)}")
    for key, value in (overrides or {}).items():
        _override(root, key, value)
    return _bind_config(root, name)


def dump(config: Config) -> str:
    """Return the configuration as YAML text, every key written out; `loads` gives an equal one back."""
    return yaml_text.write(asdict(config))


def parse_override(text: str) -> tuple[str, Any]:
    """Read `train.steps=50` from a command line into its dotted key and its value. Raises ConfigError."""
    key, equals, written = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text}: expected KEY=VALUE, such as train.steps=50")
    try:
        return key.strip(), yaml_text.scalar(written)
    except YamlError as error:
        raise ConfigError(f"--set {text}: {error}") from error


def _override(root: Entry, key: str, value: Any) -> None:
    where = f"--set {key}"
    *sections, last = key.split(".")
    here = root
    for depth, section in enumerate(sections):
        below = here.value.get(section)
        if below is None or below.value is None:
            below = here.value[section] = Entry({}, where)
        if not isinstance(below.value, dict):
            upper = ".".join(sections[: depth + 1])
            raise ConfigError(
                f"{where}: {upper} holds {_describe(below)} at {below.where}, which has no keys"
            )
        here = below
    here.value[last] = _to_entry(value, where)


def _to_entry(value: Any, where: str) -> Entry:
    if isinstance(value, Mapping):
        return Entry({str(key): _to_entry(item, where) for key, item in value.items()}, where)
    if isinstance(value, (list, tuple)):
        return Entry([_to_entry(item, where) for item in value], where)
    return Entry(value, where)


def _bind_config(root: Entry, name: str) -> Config:
    sections: dict[str, Any] = {}
    for key, entry in root.value.items():
        if key not in SECTIONS:
            raise ConfigError(f"{entry.where}: unknown section {key!r}{_nearest(key, '', list(SECTIONS))}")
        if entry.value is not None and not isinstance(entry.value, dict):
            raise ConfigError(f"{entry.where}: {key}: expected keys below it, found {_describe(entry)}")
        sections[key] = _bind_section(SECTIONS[key], key, Entry(entry.value or {}, entry.where))
    if "train" not in sections:
        sections["train"] = _bind_section(SECTIONS["train"], "train", Entry({}, f"{name}:1"))
    return Config(**sections)


def _bind_section(section: type[_Section], name: str, entry: Entry) -> _Section:
    kinds = typing.get_type_hints(section)
    known = [key.name for key in fields(section)]  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for key, below in entry.value.items():
        if key not in known:
            raise ConfigError(f"{below.where}: unknown key {name}.{key}{_nearest(key, name, known)}")
        values[key] = _convert(below, kinds[key], f"{name}.{key}")
    try:
        return section(**values)
    except ImpossibleValue as error:
        place = entry.value.get(error.key, entry).where
        raise ConfigError(f"{place}: {name}.{error.key}: {error.problem}") from error


def _convert(entry: Entry, kind: Any, key: str) -> Any:
    """Return the entry's value as `kind`; raises ConfigError where it is not of that kind. bool is not a
    number.
    """
    value = entry.value
    choices = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    for choice in choices:
        if choice is type(None) and value is None:
            return None
        if choice is Any:
            return entry.plain()
        if typing.get_origin(choice) is list and isinstance(value, list):
            (item_kind,) = typing.get_args(choice)
            return [_convert(item, item_kind, f"{key}[{index}]") for index, item in enumerate(value)]
        if typing.get_origin(choice) is dict and isinstance(value, dict):
            return entry.plain()
        if typing.get_origin(choice) is typing.Literal and isinstance(value, str):
            allowed = typing.get_args(choice)
            if value in allowed:
                return value
            names = ", ".join(allowed)
            nearest = _nearest(value, "", list(allowed))
            raise ConfigError(f"{entry.where}: {key}: expected one of {names}, found {value!r}{nearest}")
        if choice is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            if not math.isfinite(value):
                raise ConfigError(f"{entry.where}: {key}: expected a finite number, found {value}")
            return float(value)
        if isinstance(choice, type) and type(value) is choice:
            return value
    hint = ""
    if str in choices and isinstance(value, (bool, int, float)):
        hint = "; put it in quotes"
    if value is None and any(typing.get_origin(choice) in {list, dict} for choice in choices):
        hint = "; leave the key out, or write [] or {}"
    expected = " or ".join(_NAMES.get(typing.get_origin(choice) or choice, "text") for choice in choices)
    raise ConfigError(f"{entry.where}: {key}: expected {expected}, found {_describe(entry)}{hint}")


_NAMES: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "keys below it",
    type(None): "nothing",
}


def _describe(entry: Entry) -> str:
    value = entry.value
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return f"the number {value}"
    if isinstance(value, str):
        return f"the text {value!r}"
    return "a list" if isinstance(value, list) else "keys below it"


def _nearest(wrong: str, section: str, known: list[str]) -> str:
    """Return "; did you mean …?": a name of the same section, else the key of another section."""
    prefix = f"{section}." if section else ""
    close = difflib.get_close_matches(wrong.lower(), known, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {prefix}{close[0]}?"
    elsewhere = {
        key.name: name for name, other in SECTIONS.items() if name != section for key in fields(other)
    }
    if wrong in SECTIONS and section:
        return f"; did you mean the section {wrong}?"
    close = difflib.get_close_matches(wrong.lower(), list(elsewhere), n=1, cutoff=0.8)
    if close:
        return f"; did you mean {elsewhere[close[0]]}.{close[0]}?"
    return f"; known are {', '.join(known)}" if len(known) < 8 else ""
