"""What this machine offers: the programs of a cluster, and whether a node can be a host of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from functools import cache

from tm_slurm.localcluster.errors import LocalClusterError

_PACKAGES = {
    "munged": "munge",
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "scontrol": "slurm-wlm",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "setsid": "util-linux",
    "setpriv": "util-linux",
    "mount": "mount",
    "hostname": "hostname",
}
_PLAIN = ("munged", "slurmctld", "slurmd", "scontrol", "setsid")
_NAMESPACES = (*_PLAIN, "ip", "nsenter", "unshare", "setpriv", "mount", "hostname")
_TRIAL = "ip link add tm0 type bridge && ip link add tm1 type veth peer name tm2 && mount -t proc proc /proc"


def search_path() -> str:
    """PATH with the system directories in which Slurm's daemons live, which ordinary users often lack."""
    asked = os.environ.get("PATH", os.defpath).split(os.pathsep)
    extra = [
        "/usr/local/sbin",
        "/usr/sbin",
        "/sbin",
        "/usr/local/bin",
        "/usr/bin",
        "/bin",
        "/opt/slurm/sbin",
        "/opt/slurm/bin",
    ]
    return os.pathsep.join([*asked, *(folder for folder in extra if folder not in asked)])


def program(name: str) -> str:
    """The absolute path of a program.

    Raises:
        LocalClusterError: it is not installed; names the Debian package.
    """
    found = shutil.which(name, path=search_path())
    if found is None:
        raise LocalClusterError(f"{name} is not installed: apt-get install {_PACKAGES.get(name, name)}")
    return found


def require_programs(mode: str) -> None:
    """Checks everything that a mode needs at once.

    Raises:
        LocalClusterError: names all missing programs and the packages to install.
    """
    needed = _NAMESPACES if mode == "namespaces" else _PLAIN
    missing = [name for name in needed if shutil.which(name, path=search_path()) is None]
    if missing:
        packages = " ".join(dict.fromkeys(_PACKAGES[name] for name in missing))
        raise LocalClusterError(f"{', '.join(missing)} not installed: apt-get install {packages}")


def choose_mode(mode: str) -> str:
    """Turns `auto` into `namespaces` (root, and the kernel lets us) or `plain`, and checks a choice.

    Raises:
        LocalClusterError: an unknown mode, or namespaces without the right to make them.
    """
    if mode not in ("auto", "namespaces", "plain"):
        raise LocalClusterError(f"mode {mode!r}: expected auto, namespaces or plain")
    if mode == "plain":
        return mode
    if os.geteuid() != 0:
        if mode == "auto":
            return "plain"
        raise LocalClusterError("mode namespaces needs root: run it as root, or use --mode plain")
    obstacle = _namespaces_obstacle()
    if obstacle is None:
        return "namespaces"
    if mode == "auto":
        return "plain"
    raise LocalClusterError(f"mode namespaces does not work on this machine ({obstacle}): use --mode plain")


@cache
def _namespaces_obstacle() -> str | None:
    """Why a host cannot be made of namespaces here; None if it can. Tried where it vanishes at once."""
    tools = [
        name
        for name in ("ip", "unshare", "nsenter", "mount")
        if shutil.which(name, path=search_path()) is None
    ]
    if tools:
        return f"{', '.join(tools)} missing"
    command = [
        program("unshare"),
        "--net",
        "--uts",
        "--mount",
        "--ipc",
        "--pid",
        "--fork",
        "sh",
        "-c",
        _TRIAL,
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=False, env={"PATH": search_path()}
        )
    except subprocess.TimeoutExpired:
        return "making one took over 10 s"
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["unshare failed"])[-1]


def slurm_release() -> str:
    """The same as Slurm writes it: 22.05.8. LocalClusterError."""
    year, month, patch = slurm_version()
    return f"{year}.{month:02}.{patch}"


@cache
def slurm_version() -> tuple[int, int, int]:
    """The installed release, for example (22, 5, 8).

    Raises:
        LocalClusterError: slurmctld is missing or does not say.
    """
    done = subprocess.run(
        [program("slurmctld"), "-V"], capture_output=True, text=True, timeout=10, check=False
    )
    found = re.search(r"(\d+)\.(\d+)\.(\d+)", done.stdout)
    if found is None:
        raise LocalClusterError(f"`slurmctld -V` said {done.stdout.strip()!r}: expected a version")
    return int(found[1]), int(found[2]), int(found[3])
