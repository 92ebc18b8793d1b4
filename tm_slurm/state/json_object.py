"""JSON from elsewhere: from the other side of a connection, or from a disk."""

from __future__ import annotations

import json
from typing import Any

from tm_slurm.state.errors import StateError


def read_json(text: bytes, what: str) -> dict[str, Any]:
    """The JSON object in a message; StateError for anything else."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StateError(f"{what}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise StateError(f"{what}: a JSON object was expected, found a {type(content).__name__}")
    return content
