"""A real Slurm cluster on this machine, as an object."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from filelock import FileLock, Timeout

from tm_slurm.localcluster import lifecycle, node_state, processes, slurm_conf
from tm_slurm.localcluster.errors import LocalClusterError
from tm_slurm.localcluster.launch import MARK
from tm_slurm.localcluster.layout import Layout
from tm_slurm.localcluster.lifecycle import Hosts
from tm_slurm.localcluster.processes import ProcessId
from tm_slurm.localcluster.record import Record, Request
from tm_slurm.localcluster.requirements import choose_mode, program, require_programs, search_path

_LOCK_S = 60.0
_POLL_S = 0.05
_ENTER = 'cd "$0" && exec "$@"'


@dataclass(frozen=True)
class NodeStatus:
    """One node: `slurm` is Slurm's word for its state, `host` is on, off, unplugged, frozen or no-slurmd."""

    name: str
    address: str
    slurm: str
    host: str


@dataclass(frozen=True)
class ClusterStatus:
    """A cluster: `state` is up, broken (some of it runs: `up` mends it, `down` removes it) or down."""

    name: str
    directory: str
    state: str
    mode: str | None
    nodes: tuple[NodeStatus, ...]


class LocalCluster:
    """munged, slurmctld and `nodes` slurmd on this machine, in a directory of their own.

    As a context manager it is up inside, and taken down at the end if it was not up before.
    Nodes are called `n1`…
    All methods raise LocalClusterError, one line saying what was expected, what was found and what to do.

    Args:
        nodes: how many, 1 to 250.
        cpus: CPUs that each node claims to have, whatever the machine has.
        mode: `namespaces` (root; every node a host of its own), `plain` (loopback, any user), or `auto`.
        directory: where its files go; by default NAME in /var/lib/tm_slurm or in the user's state directory.
        name: tells clusters of one machine apart.
        slurmd_timeout_s: Slurm's SlurmdTimeout, seconds after which a silent node is DOWN.
        features: node name to its features (`Feature=` in slurm.conf).
        extra_conf: further lines for slurm.conf; they replace ours of the same name.
    """

    def __init__(
        self,
        nodes: int = 6,
        cpus: int = 4,
        mode: str = "auto",
        directory: str | os.PathLike[str] | None = None,
        name: str = "local",
        *,
        slurmd_timeout_s: int = 10,
        features: Mapping[str, str] | None = None,
        extra_conf: str = "",
    ) -> None:
        for what, number, most in (
            ("nodes", nodes, 250),
            ("cpus", cpus, 1024),
            ("slurmd_timeout_s", slurmd_timeout_s, 3600),
        ):
            if not 1 <= number <= most:
                raise LocalClusterError(f"{what} is {number}: expected 1 to {most}")
        self.layout = Layout.of(name, directory)
        self.started = False
        """Whether this object's `up` started the cluster (and did not merely find it)."""
        self._mode = mode
        self._wanted = Request(
            name=name,
            mode=mode,
            nodes=nodes,
            cpus=cpus,
            slurmd_timeout_s=slurmd_timeout_s,
            features=dict(features or {}),
            extra_conf=extra_conf,
        )

    # up and down

    def up(self, *, timeout_s: float = 30.0) -> bool:
        """Starts the cluster, or finds it running and mends it; returns when every node can run jobs.

        Drained nodes stay drained, jobs go on. Returns whether it had to be started from nothing.
        """
        mode = choose_mode(self._mode)
        require_programs(mode)
        request = Request(**{**vars(self._wanted), "mode": mode})
        with self._locked():
            record = Record.load(self.layout)
            if record is not None and lifecycle.foundation_stands(record):
                self._require_same(record.request)
                self._mend(record, timeout_s)
                return False
            try:
                lifecycle.stop_processes(self.layout)
                lifecycle.start(self.layout, request)
                self.wait_idle(timeout_s=timeout_s)
            except BaseException:  # an interrupt from the keyboard, too, must not leave half a cluster
                lifecycle.stop(self.layout)
                raise
            self.started = True
            return True

    def down(self) -> None:
        """Ends everything the cluster started, jobs too, and removes its files; fine if it is not up."""
        if not self.layout.directory.is_dir():
            lifecycle.stop_processes(self.layout)
            return
        with self._locked():
            lifecycle.stop(self.layout)
        self.started = False

    def __enter__(self) -> LocalCluster:
        self.up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.started:
            self.down()

    def status(self) -> ClusterStatus:
        """How it stands; never raises because something is down."""
        record = Record.load(self.layout)
        name, directory = self._wanted.name, str(self.layout.directory)
        if record is None or not lifecycle.foundation_stands(record):
            state = "down" if record is None else "broken"
            return ClusterStatus(name, directory, state, record.request.mode if record else None, ())
        hosts = lifecycle.hosts_of(self.layout, record)
        try:
            states = self.node_states()
        except LocalClusterError:
            states = {}
        try:
            unplugged = hosts.unplugged()
        except LocalClusterError:  # not our cluster: only its owner sees its cables
            unplugged = set()
        nodes = tuple(
            NodeStatus(
                node,
                slurm_conf.address(record, node),
                states.get(node, "?"),
                _host_state(hosts, node, node in unplugged),
            )
            for node in record.request.node_names
        )
        daemons = all(record.process(daemon) is not None for daemon in ("munged", "slurmctld"))
        whole = daemons and bool(states)
        return ClusterStatus(
            record.request.name, directory, "up" if whole else "broken", record.request.mode, nodes
        )

    # commands

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
            timeout_s: seconds after which it is killed and subprocess.TimeoutExpired raised.
            check: raise LocalClusterError with its last words if it fails.
        """
        words, environment = self.command(cmd, user=user, cwd=cwd, env=env, node=node)
        done = subprocess.run(
            words,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if check and done.returncode != 0:
            said = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1]
            raise LocalClusterError(f"`{' '.join(map(str, cmd))}` ended with {done.returncode}: {said}")
        return done

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
        """Makes a drained or DOWN node available again; fine if it is."""
        if node_state.flags_of(self.node_state(node)) & (node_state.AWAY - {"NOT_RESPONDING"}):
            self._update_node(node, "resume", None)

    # nodes as machines

    def power_off(self, node: str) -> None:
        """A power cut: every process of the node is gone at once.

        In mode namespaces its neighbours hear nothing, not even a reset.
        """
        self._hosts().power_off(self._known(node))

    def unplug(self, node: str) -> None:
        """Pulls the node's network cable (mode namespaces): all goes on there, no packet comes or goes."""
        self._hosts().plug(self._known(node), connected=False)

    def freeze(self, node: str) -> None:
        """Stops every process of the node where it is; its kernel still acknowledges packets."""
        self._signal_node(node, signal.SIGSTOP, lambda process: not process.stopped())

    def thaw(self, node: str) -> None:
        """Lets the processes of a frozen node go on."""
        self._signal_node(node, signal.SIGCONT, ProcessId.stopped)

    def kill_slurmd(self, node: str) -> None:
        """Ends slurmd alone; steps and tasks of the node go on."""
        hosts = self._hosts()
        processes.signal_all(lambda: hosts.slurmd(self._known(node)), signal.SIGKILL, timeout_s=10.0)

    def node_pids(self, node: str) -> set[int]:
        """Numbers (on this machine) of all processes of a node, slurmd included; empty if it is off."""
        return {process.pid for process in self._hosts().node_processes(self._known(node))}

    def restore(self, node: str, *, timeout_s: float = 30.0) -> None:
        """Undoes all of the above and resumes the node; waits until it can run jobs.

        Power on, cable in, processes going, slurmd running.
        """
        with self._locked():
            record = self._record()
            hosts = lifecycle.hosts_of(self.layout, record)
            self._restore_host(hosts, record, self._known(node))
        self._make_usable([node], timeout_s)

    def reset(self, *, timeout_s: float = 60.0) -> None:
        """Back to how `up` left it: nodes restored and resumed, no job, no reservation, all nodes IDLE."""
        deadline = time.monotonic() + timeout_s
        with self._locked():
            record = self._record()
            lifecycle.start_daemons(self.layout, record, lifecycle.hosts_of(self.layout, record))
            broken = self._restore_hosts(record)
        jobs = self.run(["squeue", "--noheader", "--all", "--format=%A"]).stdout.split()
        if jobs:
            self.run(["scancel", *jobs], check=False)  # one of them may have ended meanwhile
        for line in self.run(["scontrol", "-o", "show", "reservations"]).stdout.splitlines():
            if line.startswith("ReservationName="):
                self.run(["scontrol", "delete", line.split()[0]])
        self._make_usable(broken, deadline - time.monotonic())
        for node in self.node_names:
            self.resume(node)
        self.wait_idle(timeout_s=deadline - time.monotonic())

    # within

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Serialises everything that starts, mends or stops, on the whole machine."""
        deadline = time.monotonic() + _LOCK_S
        while True:
            self.layout.claim()
            lock = FileLock(self.layout.lock, timeout=max(0.0, deadline - time.monotonic()))
            try:
                lock.acquire()
                break
            except FileNotFoundError:  # another `down` removed the directory between the two lines above
                continue
            except Timeout:
                raise LocalClusterError(
                    f"{self.layout.lock} is held for over {_LOCK_S:g} s: another command is at work here"
                ) from None
        try:
            yield
        finally:
            lock.release()

    def _record(self) -> Record:
        record = Record.load(self.layout)
        if record is None or not lifecycle.foundation_stands(record):
            raise LocalClusterError(
                f"cluster {self._wanted.name!r} ({self.layout.directory}) is not up: "
                "start it with `tm-slurm cluster up`"
            )
        return record

    def _hosts(self) -> Hosts:
        return lifecycle.hosts_of(self.layout, self._record())

    def _known(self, node: str) -> str:
        names = self.node_names
        if node not in names:
            raise LocalClusterError(f"no node {node!r}: this cluster has {names[0]} to {names[-1]}")
        return node

    def _require_same(self, running: Request) -> None:
        wanted = Request(
            **{**vars(self._wanted), "mode": running.mode if self._mode == "auto" else self._mode}
        )
        for key, value in vars(running).items():
            if vars(wanted)[key] != value:
                raise LocalClusterError(
                    f"cluster {running.name!r} runs with {key}={value!r}, asked for {vars(wanted)[key]!r}: "
                    "`tm-slurm cluster down` it first, or use another --name"
                )

    def _mend(self, record: Record, timeout_s: float) -> None:
        lifecycle.start_daemons(self.layout, record, lifecycle.hosts_of(self.layout, record))
        self._make_usable(self._restore_hosts(record), timeout_s)
        self._wait_nodes(
            record.request.node_names, lambda flags: not flags & node_state.BROKEN, timeout_s, "responding"
        )

    def _restore_hosts(self, record: Record) -> list[str]:
        """Mends the hosts that need it and returns their names."""
        hosts = lifecycle.hosts_of(self.layout, record)
        unplugged = hosts.unplugged()
        broken = [n for n in record.request.node_names if _host_state(hosts, n, n in unplugged) != "on"]
        for node in broken:
            self._restore_host(hosts, record, node)
        return broken

    def _restore_host(self, hosts: Hosts, record: Record, node: str) -> None:
        if not hosts.node_processes(node):
            hosts.start_nodes([node])
        else:
            hosts.plug(node, connected=True)
            self._signal_hosts(hosts, node, signal.SIGCONT, ProcessId.stopped)
            hosts.start_slurmd(node)
        record.save(self.layout)

    def _make_usable(self, nodes: Iterable[str], timeout_s: float) -> None:
        for node in nodes:
            self.wait_node(node, lambda flags: not flags & {"NOT_RESPONDING", "UNKNOWN"}, timeout_s=timeout_s)
            self.resume(node)
            self.wait_node(node, lambda flags: not flags & node_state.AWAY, timeout_s=timeout_s)

    def _update_node(self, node: str, state: str, reason: str | None) -> None:
        words = ["scontrol", "update", f"nodename={self._known(node)}", f"state={state}"]
        self.run([*words, f"reason={reason}"] if reason is not None else words, timeout_s=20.0)

    def _signal_node(self, node: str, signum: signal.Signals, which: Callable[[ProcessId], bool]) -> None:
        self._signal_hosts(self._hosts(), self._known(node), signum, which)

    def _signal_hosts(
        self, hosts: Hosts, node: str, signum: signal.Signals, which: Callable[[ProcessId], bool]
    ) -> None:
        processes.signal_all(lambda: set(filter(which, hosts.node_processes(node))), signum, timeout_s=10.0)

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


def _host_state(hosts: Hosts, node: str, unplugged: bool) -> str:
    living = hosts.node_processes(node)
    if not living:
        return "off"
    if all(process.stopped() for process in living):
        return "frozen"
    if unplugged:
        return "unplugged"
    return "on" if hosts.slurmd(node) else "no-slurmd"


def _account(user: str) -> pwd.struct_passwd:
    try:
        return pwd.getpwnam(user)
    except KeyError:
        raise LocalClusterError(f"no user {user!r} on this machine") from None
