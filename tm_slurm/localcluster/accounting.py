"""A small accounting plugin, without which Slurm up to 24.05 lets a job give back one node and no second."""

from __future__ import annotations

import glob
import os
import shutil
from pathlib import Path

from tm_slurm.localcluster.errors import LocalClusterError
from tm_slurm.localcluster.launch import finish
from tm_slurm.localcluster.layout import Layout
from tm_slurm.localcluster.requirements import program, search_path, slurm_version

NAME = "accounting_storage/tm"
_SOURCE = Path(__file__).with_name("accounting_storage_tm.c")
_FOLDERS = (
    "/usr/lib/*/slurm-wlm",
    "/usr/lib/*/slurm",
    "/usr/lib64/slurm",
    "/usr/lib/slurm",
    "/usr/local/lib/slurm",
)


def plugin_folder() -> Path | None:
    """Where Slurm's own plugins are, if this release has the accounting plugin that ours builds on."""
    beside = Path(os.path.realpath(program("slurmctld"))).parent.parent
    folders = [str(beside / "lib" / "slurm"), str(beside / "lib64" / "slurm")]
    for pattern in (*folders, *_FOLDERS):
        for found in sorted(glob.glob(pattern)):
            if Path(found, "accounting_storage_none.so").exists():
                return Path(found)
    return None


def is_needed() -> bool:
    """Whether this release of Slurm needs the plugin: later ones number their jobs themselves."""
    return slurm_version() < (24, 11) and plugin_folder() is not None


def build(layout: Layout) -> str:
    """Compiles the plugin into the cluster's directory (about 40 ms) and returns the PluginDir that finds it.

    Raises:
        LocalClusterError: no C compiler, or it refused.
    """
    compiler = next((c for c in ("cc", "gcc", "clang") if shutil.which(c, path=search_path())), None)
    if compiler is None:
        raise LocalClusterError("no C compiler for the accounting plugin: apt-get install gcc libc6-dev")
    slurm = plugin_folder()
    target = layout.plugins / "accounting_storage_tm.so"
    major, minor, micro = slurm_version()
    done = finish(
        [
            program(compiler),
            *("-shared", "-fPIC", "-O1", "-std=c11", "-Wall", "-Wextra", "-Werror"),
            f"-DSLURM_VERSION={major << 16 | minor << 8 | micro}",
            *("-o", str(target), str(_SOURCE)),
            *("-Wl,--no-as-needed", f"{slurm}/accounting_storage_none.so", f"-Wl,-rpath,{slurm}"),
        ]
    )
    if done.returncode != 0:
        raise LocalClusterError(
            f"compiling {_SOURCE.name} failed: {(done.stderr.strip() or '?').splitlines()[0]}"
        )
    return f"{layout.plugins}:{slurm}"
