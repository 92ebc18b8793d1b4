"""All checks, in the order in which they are shown."""

from __future__ import annotations

import contextlib
import glob
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from tm_slurm import __version__
from tm_slurm.doctor import administration, nodes, settings, versions
from tm_slurm.doctor.finding import Finding, failed
from tm_slurm.doctor.probing import NoNodes, Probing
from tm_slurm.slurm import PySlurm, SlurmRefused, SlurmUnavailable, connect, environment
from tm_slurm.slurm.pyslurm_client import is_installed

ANSWER_LIMIT_S = 15.0


class Examination:
    """`directory`: where jobs are to have their directories; it need not exist. `count`: nodes to ask, 0 for
    none, with `python` there; `told` is called with a line before whatever takes long."""

    def __init__(
        self,
        directory: Path,
        *,
        count: int,
        wait_s: int,
        options: Sequence[str] = (),
        python: str = sys.executable,
        told: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._directory = directory
        self._count = count
        self._wait_s = wait_s
        self._options = options
        self._python = python
        self._told = told

    def findings(self) -> list[Finding]:
        """Every check that could be made. The first failed one says so if Slurm is not there at all."""
        if shutil.which("scontrol") is None:
            meaning = "this is no machine of a Slurm cluster, or PATH lacks Slurm's bin"
            return [failed("Slurm", "no scontrol here", meaning, "apt-get install slurm-client")]
        found = [versions.controller(_output("scontrol", "ping"))]
        config = settings.parse_config(_output("scontrol", "show", "config"))
        if "SLURM_VERSION" not in config:
            return found
        found += [check(config) for check in settings.CHECKS]
        found += [self._versions(config), self._pyslurm()]
        plugin = administration.plugin_file(config)
        found.append(administration.plugin_loaded(_output("srun", "--help"), plugin))
        stamp = administration.stamp_of(plugin) if plugin is not None else None
        found.append(administration.plugin_build(plugin, stamp, config["SLURM_VERSION"]))
        found += [administration.wired(config, name, about) for name, about in administration.WIRES.items()]
        if self._count:
            found += self._of_nodes(_files_of(config, plugin))
        return found

    def _versions(self, config: settings.Settings) -> Finding:
        slurm = connect(timeout_s=ANSWER_LIMIT_S)
        server = config["SLURM_VERSION"]
        try:
            partitions = slurm.partitions().values()
            every = slurm.nodes(sorted({name for partition in partitions for name in partition.nodes}))
            client = slurm.version()
        except (SlurmUnavailable, SlurmRefused) as error:
            return failed(
                "Slurm releases", str(error), "slurmctld does not say its nodes", "scontrol show node"
            )
        return versions.versions(client, server, {name: node.version for name, node in every.items()})

    def _pyslurm(self) -> Finding:
        if not is_installed():
            return versions.pyslurm(is_installed=False, problem=None)
        with contextlib.closing(PySlurm(timeout_s=ANSWER_LIMIT_S, strict=True)) as asked:
            try:
                asked.partitions()
            except (SlurmUnavailable, SlurmRefused) as error:
                return versions.pyslurm(is_installed=True, problem=str(error))
        return versions.pyslurm(is_installed=True, problem=None)

    def _of_nodes(self, files: list[str]) -> list[Finding]:
        self._told(f"asking {self._count} nodes (at most {self._wait_s} s for them to be free)")
        try:
            folder = Path(tempfile.mkdtemp(prefix=".tm-slurm-doctor-", dir=_existing(self._directory)))
        except OSError as error:
            found = f"{error.filename}: {error.strerror}"
            meaning = "no job directory can be made there"
            return [
                failed("job directory", found, meaning, "tm-slurm doctor --directory DIR; job.directory: DIR")
            ]
        try:
            with Probing(
                folder, self._count, wait_s=self._wait_s, options=self._options, python=self._python
            ) as probing:
                return self._asked(probing, files)
        except NoNodes as none:
            if none.busy:
                return [nodes.not_asked(str(none), self._count)]
            return [nodes.did_not_run(str(none), self._python)]
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _asked(self, probing: Probing, files: list[str]) -> list[Finding]:
        names = probing.nodes
        holder, other = names[0], names[-1]
        who = probing.ask("who", nodes=names, files=files)
        probing.ask_clocks()
        wrote = probing.ask("write")
        saw = probing.ask("see", nodes=names)
        kept = probing.ask("lock", node=holder, wait_s=1.0, keep=True)
        tried = (
            probing.ask("lock", node=other, wait_s=0.0, keep=False)
            if other != holder
            else {other: {"taken": False}}
        )
        probing.ask("unlock")
        freed = probing.ask("lock", node=other, wait_s=5.0, keep=False)
        listeners = {
            node: (answer["address"], answer["port"]) for node, answer in who.items() if answer["port"]
        }
        hosts = {node: answer["host"] for node, answer in who.items()}
        reach = probing.ask("reach", hosts=hosts, listeners=listeners)
        return [
            nodes.same_package(who, __version__),
            nodes.shared_directory(str(self._directory), wrote, saw),
            nodes.locks(kept, tried, freed, holder=holder, other=other),
            nodes.addresses(who),
            nodes.names(reach, who),
            nodes.ports(reach),
            nodes.clocks(probing.clocks),
            nodes.open_files(who),
            nodes.interface_choice(who),
            nodes.same_files(who),
        ]


def _files_of(config: settings.Settings, plugin: Path | None) -> list[str]:
    """The administrators' files that every node should have alike."""
    named = [str(plugin)] if plugin is not None else []
    for name in administration.WIRES:
        for pattern in filter(None, config.get(name, "").split(",")):
            if "tm_slurm" in pattern:
                named += sorted(glob.glob(pattern)) or [pattern]
    return named


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def _output(*words: str) -> str:
    """What a command of Slurm's prints, on both streams; nothing when it cannot be run or does not end."""
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            errors="replace",
            env=environment.for_client(),
            stdin=subprocess.DEVNULL,
            timeout=ANSWER_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr
