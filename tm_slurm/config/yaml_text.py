"""YAML text to values that know where they stand, and back.

Scalars are read by the rules of YAML 1.2 (`3e-4` is a number, `1:30:00` and `no` are text): those of 1.1,
PyYAML's own, turn a time limit into an integer and a learning rate into text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import yaml

MAX_BYTES = 1 << 20
_MAX_DEPTH = 50

_TAG = "tag:yaml.org,2002:"
_RESOLVERS: list[tuple[str, str, str]] = [
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("int", r"^[-+]?[0-9]+$", "-+0123456789"),
    (
        "float",
        r"^(?:[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        "-+0123456789.",
    ),
    ("null", r"^(?:~|null|Null|NULL|)$", "~nN\0"),
    ("merge", r"^(?:<<)$", "<"),
]


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalar rules of YAML 1.2."""

    def construct_integer(self, node: yaml.ScalarNode) -> int:
        return int(node.value)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes by the same rules."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.Node:
        # In double quotes whatever is not plainly visible is escaped, and so survives.
        return self.represent_scalar(_TAG + "str", text, style=None if text.isprintable() else '"')


for _class in (_Loader, _Dumper):
    _class.yaml_implicit_resolvers = {}
    for _name, _pattern, _first in _RESOLVERS:
        _characters = ["" if character == "\0" else character for character in _first]
        _class.add_implicit_resolver(_TAG + _name, re.compile(_pattern), _characters)


_Dumper.add_representer(str, _Dumper.represent_text)
_Loader.add_constructor(_TAG + "int", _Loader.construct_integer)


class YamlError(ValueError):
    """The text is not what it should be. `line` counts from 1; None where no line can be named."""

    def __init__(self, problem: str, line: int | None = None) -> None:
        super().__init__(problem)
        self.line = line


@dataclass(frozen=True)
class Entry:
    """A value, and where it was written: `where` is "line 12" or the command-line option it came from.

    `value` is a scalar, a list of entries, or a dict of text to entries.
    """

    value: Any
    where: str

    def plain(self) -> Any:
        """Return the value without the places."""
        if isinstance(self.value, list):
            return [entry.plain() for entry in self.value]
        if isinstance(self.value, dict):
            return {key: entry.plain() for key, entry in self.value.items()}
        return self.value


def read(text: str | bytes, where: str) -> Entry:
    """Read one YAML document; places become "{where}:LINE". An empty document is an empty mapping.

    Raises YamlError for broken syntax, a key given twice, a key that is not text, a value of a kind that
    has no place in a configuration, and aliases that contain themselves.
    """
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as error:
        raise _reader_error(error, text) from error
    try:
        node = loader.get_single_node()
        if node is None:
            return Entry({}, f"{where}:1")
        return _entry(loader, node, where, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = " ".join(part for part in (error.context, error.problem) if part)
        raise YamlError(" ".join(problem.split()), mark.line + 1 if mark else None) from error
    except yaml.reader.ReaderError as error:
        raise _reader_error(error, text) from error
    except RecursionError as error:
        raise YamlError("the values are nested too deeply") from error
    finally:
        loader.dispose()


def scalar(text: str) -> Any:
    """Read a value as it is written on a command line: one YAML value on one line. Raises YamlError."""
    return read(text, "").plain() if text.strip() else None


def write(value: Any) -> str:
    """Return YAML text that `read` turns back into `value`."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def _entry(loader: _Loader, node: yaml.Node, where: str, above: tuple[int, ...]) -> Entry:
    line = node.start_mark.line + 1
    place = f"{where}:{line}"
    if id(node) in above or len(above) > _MAX_DEPTH:
        raise YamlError("a value must not contain itself" if id(node) in above else "nested too deeply", line)
    above = (*above, id(node))
    if isinstance(node, yaml.CollectionNode) and node.tag not in {_TAG + "map", _TAG + "seq"}:
        raise YamlError(f"the tag {node.tag!r} is not supported", line)
    if isinstance(node, yaml.MappingNode):
        return Entry(_mapping(loader, node, where, above), place)
    if isinstance(node, yaml.SequenceNode):
        return Entry([_entry(loader, item, where, above) for item in node.value], place)
    value = loader.construct_object(node, deep=True)
    if value is not None and not isinstance(value, (str, int, float)):
        raise YamlError(f"expected text, a number, true or false, found a {type(value).__name__}", line)
    return Entry(value, place)


def _mapping(loader: _Loader, node: yaml.MappingNode, where: str, above: tuple[int, ...]) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if key_node.tag == _TAG + "merge":
            raise YamlError("'<<' is not supported: write the keys out", line)
        key = loader.construct_object(key_node, deep=True) if isinstance(key_node, yaml.ScalarNode) else None
        if not isinstance(key, str):
            raise YamlError(f"expected text as a key, found {key_node.value!r}; put it in quotes", line)
        if key in found:
            raise YamlError(
                f"{key!r} is given twice; the first is on line {found[key].where.rsplit(':')[-1]}", line
            )
        value = _entry(loader, value_node, where, above)
        # The place of a value is that of its key: the line people look for.
        found[key] = Entry(value.value, f"{where}:{line}")
    return found


def _reader_error(error: yaml.reader.ReaderError, text: str | bytes) -> YamlError:
    before = text[: error.position]
    line = before.count(b"\n" if isinstance(before, bytes) else "\n") + 1  # type: ignore[arg-type]
    return YamlError(f"a character that YAML does not allow ({error.reason})", line)
