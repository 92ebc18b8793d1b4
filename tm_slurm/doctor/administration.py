"""The administrators' part: is the plugin loaded and of this build, are prolog, epilog and health wired."""

from __future__ import annotations

import glob
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from tm_slurm import __version__
from tm_slurm.doctor.finding import Finding, failed, passed, warned
from tm_slurm.doctor.settings import Settings, release
from tm_slurm.install import DEFAULT_PREFIX

INSTALL = "tm-slurm install --prefix {}; then add the lines of: tm-slurm install --print"
_STAMP = re.compile(rb"tm_slurm build: (\S+) (\S+) for Slurm (\d+\.\d+)")
_PLUGIN_LINE = re.compile(r"^\s*(?:optional|required)\s+(\S*/tm_slurm\.so)", re.M)
_INCLUDE = re.compile(r"^\s*include\s+(\S+)", re.M)
_DEEPEST_INCLUDE = 4


@dataclass(frozen=True)
class Stamp:
    """What the build has written into a plugin."""

    version: str
    sources: str
    slurm: str


def plugin_file(settings: Settings) -> Path | None:
    """The plugin that plugstack.conf names, as far as it can be read here."""
    named = settings.get("PlugStackConfig") or str(
        Path(settings.get("SLURM_CONF", "/")).with_name("plugstack.conf")
    )
    return _plugin_in(named, _DEEPEST_INCLUDE)


def _plugin_in(pattern: str, deeper: int) -> Path | None:
    for name in sorted(glob.glob(pattern)):
        try:
            text = Path(name).read_text(errors="replace")
        except OSError:
            continue
        found = _PLUGIN_LINE.search(text)
        if found:
            return Path(found[1])
        for included in _INCLUDE.findall(text) if deeper else ():
            below = _plugin_in(str(Path(name).parent / included), deeper - 1)
            if below is not None:
                return below
    return None


def stamp_of(plugin: Path) -> Stamp | None:
    """None for a file that is not there, or has none."""
    try:
        found = _STAMP.search(plugin.read_bytes())
    except OSError:
        return None
    return Stamp(*(part.decode() for part in found.groups())) if found else None


def sources_here() -> str | None:
    """The sum that a plugin built from this checkout would have in its stamp; None without a checkout."""
    folder = Path(__file__).parents[2] / "spank"
    files = [*sorted((folder / "plugin").glob("*.c")), folder / "plugin" / "plugin.h", folder / "exports.map"]
    try:
        return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]
    except OSError:
        return None


def plugin_loaded(srun_help: str, plugin: Path | None) -> Finding:
    """Of what `srun --help` prints: Slurm lists there the options of the plugins that it has loaded."""
    check = "SPANK plugin"
    if "--tm-standbys" in srun_help:
        return passed(check, f"loaded: {plugin}" if plugin else "loaded", "sbatch knows --tm-standbys")
    if plugin is not None:
        said = [line.partition("error: ")[2] for line in srun_help.splitlines() if str(plugin) in line]
        why = (said[0] if said else "it does not say why") if plugin.exists() else "there is no such file"
        meaning = f"plugstack.conf names it, and Slurm cannot load it: {why}"
        return failed(check, f"not loaded: {plugin}", meaning, INSTALL.format(plugin.parents[2]))
    meaning = "optional: a dead task is heard of by the agent and the poll only, --tm-… options are not known"
    return warned(check, "not installed", meaning, INSTALL.format(DEFAULT_PREFIX))


def plugin_build(plugin: Path | None, stamp: Stamp | None, slurm: str) -> Finding:
    """`slurm`: the release here, such as 22.05.8."""
    check = "plugin build"
    if plugin is None:
        return passed(check, "no plugin")
    mend = INSTALL.format(plugin.parents[2])
    if stamp is None:
        return warned(check, f"{plugin} does not say", "it is not there, or of an older tm_slurm", mend)
    found = f"tm_slurm {stamp.version} ({stamp.sources}) for Slurm {stamp.slurm}"
    if release(stamp.slurm) != release(slurm):
        return failed(check, found, f"Slurm here is {slurm}: the plugin does nothing", mend)
    here = sources_here()
    if stamp.version != __version__ or (here is not None and stamp.sources != here):
        return warned(check, found, f"built from other sources than this tm_slurm, {__version__}", mend)
    return passed(check, found)


def wired(settings: Settings, name: str, meaning: str) -> Finding:
    """Prolog, Epilog or HealthCheckProgram: does one of the programs that it names belong to tm_slurm?"""
    patterns = [pattern for pattern in settings.get(name, "").split(",") if pattern]
    programs = [program for pattern in patterns for program in sorted(glob.glob(pattern))]
    ours = [program for program in programs if "tm_slurm" in program]
    named = [pattern for pattern in patterns if "tm_slurm" in pattern]
    mend = INSTALL.format(DEFAULT_PREFIX)
    if named and not ours:
        there = f"{name}={','.join(named)} is not there"
        lost = "Slurm drains every node on which it is missing" if name != "HealthCheckProgram" else meaning
        return failed(name, there, lost, mend)
    if not ours:
        return warned(name, ",".join(patterns) or "none", f"optional: {meaning}", mend)
    if name == "HealthCheckProgram" and settings.get("HealthCheckInterval", "0").startswith("0"):
        return warned(name, "HealthCheckInterval=0", "it never runs", "slurm.conf: HealthCheckInterval=60")
    return passed(name, ",".join(ours))


WIRES = {
    "Prolog": "the coordinator is not told when the job comes to a node, nor of failed checks before it",
    "Epilog": "the coordinator is not told when the job has left a node, and nothing is tidied up there",
    "HealthCheckProgram": "a node that fails a check is not left before it breaks",
}
