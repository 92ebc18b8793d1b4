"""One number for everything a rank holds: how "bit for bit equal" is checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import xxhash

from tm_slurm.state.capturing import capture
from tm_slurm.state.dtypes import dtype_name
from tm_slurm.state.tensors import value_bytes
from tm_slurm.state.tree import Json


@torch.no_grad()
def digest(state: Mapping[str, Any], step: int | None = None, *, generators: bool = False) -> str:
    """xxh3-128, as 32 hexadecimal digits, over the names, dtypes, shapes and bits of all state, scalars
    included.

    Equal on two ranks, in any process, exactly if their state is: 0.0 and -0.0 differ, and so do two nans
    with different bits. `step` and, with `generators`, the global random generators are hashed too.
    Gradients, train/eval mode and how a tensor lies in memory or is tied to another are not. Raises
    StateError as `capture` does.
    """
    snapshot = capture(state, 0 if step is None else step, generators=generators)
    hasher = xxhash.xxh3_128()
    for named, _ in sorted(snapshot.all_tensors(), key=lambda pair: pair[0].name):
        header = [named.name, dtype_name(named.local.dtype, named.name), list(named.local.shape)]
        hasher.update(json.dumps(header).encode("ascii") + b"\n")
        hasher.update(value_bytes(named.local))
    rest = {
        "kinds": snapshot.kinds,
        "tree": {key: _numbers_only(tree) for key, tree in snapshot.tree.items()},
        "generators": snapshot.generators,
        "step": step,
    }
    hasher.update(json.dumps(canonical(rest), sort_keys=True).encode("ascii"))
    return hasher.hexdigest()


def _numbers_only(tree: Json) -> Json:
    """A module's tree without its modes; anything else as it is."""
    if isinstance(tree, dict) and tree.keys() == {"evaluating", "frozen", "extra"}:
        return tree["extra"]
    return tree


def canonical(tree: Json) -> Json:
    """The tree of a value without the order of dictionaries and the numbers of tensors: the same for equal
    values."""
    if isinstance(tree, list):
        return [canonical(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    content = {key: canonical(item) for key, item in tree.items()}
    for tag in ("$dict", "$defaultdict", "states", "shared"):
        if isinstance(content.get(tag), list):
            content[tag] = sorted(content[tag], key=lambda pair: json.dumps(pair, sort_keys=True))
    for tag in ("$tensor", "$array"):
        if tag in content:
            content[tag] = 0  # its name, which is hashed, says where it is
    return content
