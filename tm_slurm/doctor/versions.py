"""Which releases of Slurm meet here, and whether its controller answers."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tm_slurm.doctor.finding import Finding, failed, passed, warned
from tm_slurm.doctor.settings import release


def controller(ping: str) -> Finding:
    """Of what `scontrol ping` prints."""
    check = "slurmctld"
    said = " ".join(ping.split()) or "no answer"
    if re.search(r"\bis UP\b", ping):
        if re.search(r"\bis DOWN\b", ping):
            meaning = "one controller is left: without it nothing is submitted, and no node is given back"
            return warned(check, said, meaning, "start slurmctld on the other host")
        return passed(check, said)
    meaning = "nothing can be submitted; running jobs go on, but hear of no drain"
    return failed(check, said, meaning, "systemctl start slurmctld, where it runs")


def versions(client: str, server: str, nodes: Mapping[str, str]) -> Finding:
    """`client`: of the commands here, `server`: of slurmctld, `nodes`: of each slurmd ("" if none runs)."""
    check = "Slurm releases"
    newer = [name for name, version in nodes.items() if version and release(version) > release(server)]
    if newer:
        found = f"slurmctld {server}, newer on {','.join(newer)}"
        meaning = "slurmctld does not understand a slurmd that is newer"
        return failed(check, found, meaning, "upgrade slurmctld first")
    different = sorted({v for v in (client, *nodes.values()) if v and release(v) != release(server)})
    if different:
        meaning = "a SPANK plugin, and pyslurm, work with the one release that they were built for"
        found = f"slurmctld {server}, elsewhere {', '.join(different)}"
        return warned(check, found, meaning, "install one release everywhere; then: make spank")
    known = sum(1 for version in nodes.values() if version)
    return passed(check, f"{server} here, in slurmctld and on {known} of {len(nodes)} nodes")


def pyslurm(*, is_installed: bool, problem: str | None) -> Finding:
    """`problem`: why a question to slurmctld by pyslurm was not answered."""
    check = "pyslurm"
    if not is_installed:
        return passed(check, "not installed", "Slurm is asked by its commands, 5 to 10 ms a question")
    if problem is not None:
        meaning = "Slurm is asked by its commands instead"
        return warned(check, problem, meaning, "pip install the pyslurm of the controller's release, or none")
    return passed(check, "answers", "about 1 ms a question")
