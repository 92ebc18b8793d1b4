"""What an administrator adds to a cluster: where it is installed, and the lines that put it to use."""

from __future__ import annotations

from tm_slurm.install.installed import DEFAULT_PREFIX, Installed

__all__ = ["DEFAULT_PREFIX", "Installed"]
