"""Talking to a cluster that is up: commands on its hosts, and its nodes as Slurm sees them."""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from tm_slurm.localcluster import lifecycle, node_state, slurm_conf
from tm_slurm.localcluster.errors import LocalClusterError
from tm_slurm.localcluster.launch import MARK
from tm_slurm.localcluster.layout import Layout
from tm_slurm.localcluster.lifecycle import Hosts
from tm_slurm.localcluster.record import Record
from tm_slurm.localcluster.requirements import program, search_path

_POLL_S = 0.05
_ENTER = 'cd "$0" && exec "$@"'


class ClusterAccess:
    """A running cluster of some name and directory. All methods raise LocalClusterError, one line."""

    def __init__(self, name: str, directory: str | os.PathLike[str] | None) -> None:
        self.name = name
        self.layout = Layout.of(name, directory)

    @property
    def directory(self) -> Path:
        return self.layout.directory

    @property
    def node_names(self) -> tuple[str, ...]:
        return self._record().request.node_names

    @property
    def mode(self) -> str:
        """The mode it runs in: namespaces or plain."""
        return self._record().request.mode

    def address(self, host: str) -> str:
        """The IPv4 address of a node, or of `ctl`."""
        return slurm_conf.address(self._record(), host)

    def environment(self) -> dict[str, str]:
        """The variables with which any shell of this machine talks to this cluster."""
        return {"SLURM_CONF": str(self.layout.slurm_conf)}

    def command(
        self,
        cmd: Sequence[str],
        *,
        user: str | None = None,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        node: str | None = None,
    ) -> tuple[list[str], dict[str, str]]:
        """The words and environment with which `cmd` runs on the controller's host (or a node); see `run`."""
        record = self._record()
        hosts = lifecycle.hosts_of(self.layout, record)
        if node is not None:
            self._known(node)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        environment |= {"PATH": search_path(), MARK: str(self.layout.directory), **self.environment()}
        words: list[str] = []
        if os.geteuid() == 0:
            words += hosts.node_prefix(node) if node is not None else hosts.controller_prefix()
        elif node is not None and record.request.mode == "namespaces":
            raise LocalClusterError(f"only root can run a command on node {node}: use srun -w {node}")
        if user is not None:
            account = _account(user)
            if account.pw_uid != os.geteuid():
                words += [
                    program("setpriv"),
                    f"--reuid={account.pw_uid}",
                    f"--regid={account.pw_gid}",
                    "--init-groups",
                ]
            environment |= {"HOME": account.pw_dir, "USER": user, "LOGNAME": user}
        words += [
            "sh",
            "-c",
            _ENTER,
            os.path.abspath(cwd if cwd is not None else os.getcwd()),
            *map(str, cmd),
        ]
        return words, environment | dict(env or {})

    def run(
        self,
        cmd: Sequence[str],
        *,
        user: str | None = None,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        node: str | None = None,
        timeout_s: float = 60.0,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command (sbatch, scontrol, Python …) on the controller's host and captures its output.

        Args:
            user: run it as this user (root only may choose).
            cwd: its working directory; by default ours.
            env: variables added to our environment, from which SLURM* of other clusters is taken out first.
            node: run it on a node's host instead (root, mode namespaces).
            timeout_s: seconds after which it and its children are killed and LocalClusterError is raised.
            check: raise LocalClusterError with its last words if it fails.
        """
        words, environment = self.command(cmd, user=user, cwd=cwd, env=env, node=node)
        shown = " ".join(map(str, cmd))
        process = subprocess.Popen(
            words,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            _kill_session(process)
            raise LocalClusterError(f"`{shown}` had not ended after {timeout_s:g} s") from None
        except BaseException:  # an interrupt, too, must not leave the command behind
            _kill_session(process)
            raise
        if check and process.returncode != 0:
            said = (err.strip() or out.strip() or "it said nothing").splitlines()[-1]
            raise LocalClusterError(f"`{shown}` ended with {process.returncode}: {said}")
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    # nodes as Slurm sees them

    def node_states(self) -> dict[str, str]:
        """Slurm's word for the state of every node, such as `MIXED+DRAIN`."""
        return node_state.states_in(self.run(["scontrol", "-o", "show", "nodes"], timeout_s=20.0).stdout)

    def node_state(self, node: str) -> str:
        return self.node_states()[self._known(node)]

    def wait_node(
        self, node: str, wanted: str | Callable[[frozenset[str]], bool], *, timeout_s: float = 30.0
    ) -> str:
        """Waits until a node's state has all of some flags (`IDLE+DRAIN`), or a test of its flags holds.

        Returns the state. A responding node has no flag NOT_RESPONDING.
        """
        self._known(node)
        words = node_state.flags_of(wanted) if isinstance(wanted, str) else frozenset()
        test = wanted if callable(wanted) else words.issubset
        return self._wait_nodes(
            [node], test, timeout_s, wanted if isinstance(wanted, str) else "what was asked"
        )[node]

    def wait_idle(self, *, timeout_s: float = 30.0) -> None:
        """Waits until every node is IDLE and nothing else."""
        self._wait_nodes(self.node_names, lambda flags: flags == {"IDLE"}, timeout_s, "IDLE")

    def drain(self, node: str, reason: str = "maintenance") -> None:
        self._update_node(node, "drain", reason)

    def set_down(self, node: str, reason: str = "broken") -> None:
        self._update_node(node, "down", reason)

    def resume(self, node: str) -> None:
        """Makes a drained or DOWN node available again; fine if it is, or becomes so by itself meanwhile."""
        if not self._is_away(node):
            return
        try:
            self._update_node(node, "resume", None)
        except LocalClusterError:
            if self._is_away(node):
                raise

    def _is_away(self, node: str) -> bool:
        return bool(node_state.flags_of(self.node_state(node)) & (node_state.AWAY - {"NOT_RESPONDING"}))

    def _record(self) -> Record:
        record = Record.load(self.layout)
        if record is None or not lifecycle.foundation_stands(record):
            raise LocalClusterError(
                f"cluster {self.name!r} ({self.layout.directory}) is not up: "
                f"start it with `tm-slurm cluster up{self.layout.options(self.name)}`"
            )
        return record

    def _is_owner(self) -> bool:
        """Whether we may look into the cluster's machines and touch them."""
        return os.geteuid() in (0, self.layout.directory.stat().st_uid)

    def _hosts(self) -> Hosts:
        record = self._record()
        if not self._is_owner():
            owner = self.layout.directory.owner()
            raise LocalClusterError(f"cluster {self.name!r} belongs to {owner}: be {owner} to do this")
        return lifecycle.hosts_of(self.layout, record)

    def _known(self, node: str) -> str:
        names = self.node_names
        if node not in names:
            raise LocalClusterError(f"no node {node!r}: this cluster has {names[0]} to {names[-1]}")
        return node

    def _update_node(self, node: str, state: str, reason: str | None) -> None:
        words = ["scontrol", "update", f"nodename={self._known(node)}", f"state={state}"]
        self.run([*words, f"reason={reason}"] if reason is not None else words, timeout_s=20.0)

    def _wait_nodes(
        self, nodes: Iterable[str], test: Callable[[frozenset[str]], bool], timeout_s: float, wanted: str
    ) -> dict[str, str]:
        deadline = time.monotonic() + timeout_s
        names = list(nodes)
        while True:
            states = self.node_states()
            late = [name for name in names if not test(node_state.flags_of(states[name]))]
            if not late:
                return states
            if time.monotonic() > deadline:
                found = ", ".join(f"{name} is {states[name]}" for name in late)
                raise LocalClusterError(f"expected {wanted} within {timeout_s:g} s: {found}")
            time.sleep(_POLL_S)


def _kill_session(process: subprocess.Popen[str]) -> None:
    """Ends a command and its children, and closes its pipes."""
    for signum in (signal.SIGTERM, signal.SIGKILL):  # an srun that is asked to end takes its step along
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signum)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=1.0)  # something that left the session may hold the pipes open


def _account(user: str) -> pwd.struct_passwd:
    try:
        return pwd.getpwnam(user)
    except KeyError:
        raise LocalClusterError(f"no user {user!r} on this machine") from None
