"""Prints what the extras named on the command line require, one requirement a line, as installed tm_slurm
says.

python tests/extras.py lightning transformers hydra
"""

from __future__ import annotations

import sys
from importlib.metadata import requires

from packaging.requirements import Requirement


def of(extras: list[str]) -> list[str]:
    """Without the marker that ties each to its extra."""
    found = []
    for text in requires("tm_slurm") or []:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is not None and any(marker.evaluate({"extra": extra}) for extra in extras):
            requirement.marker = None
            found.append(str(requirement))
    return found


if __name__ == "__main__":
    print("\n".join(of(sys.argv[1:])))
