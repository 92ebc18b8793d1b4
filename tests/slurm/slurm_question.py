"""Ask Slurm a question, print the answer as JSON: `python slurm_question.py '["job", [7]]' command_line`."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from tm_slurm.slurm import NodeState, connect


def plain(value: Any) -> Any:
    """`value` as JSON knows it."""
    if isinstance(value, NodeState):
        return str(value)
    if dataclasses.is_dataclass(value):
        return {name: plain(part) for name, part in vars(value).items()}
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, frozenset):
        return sorted(value)
    return list(value) if isinstance(value, tuple) else value


if __name__ == "__main__":
    call, arguments = json.loads(sys.argv[1])
    try:
        answer = plain(getattr(connect(timeout_s=20, by=sys.argv[2]), call)(*arguments))
    except RuntimeError as error:
        answer = {"raised": type(error).__name__, "words": str(error)}
    print(json.dumps(answer))
