"""What is wrong with a value that has the right type."""

from __future__ import annotations


class ImpossibleValue(ValueError):
    """A value of the right type that cannot be: `key` is its name in its section, `problem` the rest."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"{key}: {problem}")
        self.key = key
        self.problem = problem
