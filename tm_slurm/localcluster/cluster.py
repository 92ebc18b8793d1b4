"""A real Slurm cluster on this machine, as an object."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import TracebackType

from filelock import FileLock, Timeout

from tm_slurm.localcluster import lifecycle, node_state, processes, slurm_conf
from tm_slurm.localcluster.access import ClusterAccess
from tm_slurm.localcluster.errors import LocalClusterError
from tm_slurm.localcluster.lifecycle import Hosts
from tm_slurm.localcluster.processes import ProcessId
from tm_slurm.localcluster.record import Record, Request
from tm_slurm.localcluster.requirements import choose_mode, require_programs
from tm_slurm.localcluster.status import ClusterStatus, NodeStatus, host_state

_LOCK_S = 60.0
_SIGNAL_S = 10.0
_PATIENCE_S = 1.0


class LocalCluster(ClusterAccess):
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
        administration: the prefix of a `tm-slurm install --prefix`: its plugin, prolog and epilog are in use.
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
        administration: str | os.PathLike[str] = "",
    ) -> None:
        for what, number, most in (
            ("nodes", nodes, 250),
            ("cpus", cpus, 1024),
            ("slurmd_timeout_s", slurmd_timeout_s, 3600),
        ):
            if not 1 <= number <= most:
                raise LocalClusterError(f"{what} is {number}: expected 1 to {most}")
        super().__init__(name, directory)
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
            administration=os.path.abspath(administration) if administration else "",
        )

    def up(self, *, timeout_s: float = 30.0) -> bool:
        """Starts the cluster, or finds it running and mends it; returns when every node can run jobs.

        Drained nodes stay drained, jobs go on. Returns whether it had to be started from nothing.
        """
        mode = choose_mode(self._mode)
        require_programs(mode)
        request = replace(self._wanted, mode=mode)
        with self._locked():
            record = Record.load(self.layout)
            if record is not None and lifecycle.was_started(record) and lifecycle.foundation_stands(record):
                self._require_same(record.request)
                self._mend(record, timeout_s)
                return False
            try:
                lifecycle.stop_processes(self.layout)
                lifecycle.start(self.layout, request)
                self._wait_first_idle(timeout_s)
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
        name, directory = self.name, str(self.layout.directory)
        if record is None or not lifecycle.foundation_stands(record):
            state = "down" if record is None else "broken"
            return ClusterStatus(name, directory, state, record.request.mode if record else None, ())
        states: dict[str, str] = {}
        if all(record.process(daemon) is not None for daemon in ("munged", "slurmctld")):
            with suppress(LocalClusterError):
                states = self.node_states()
        hosts = lifecycle.hosts_of(self.layout, record)
        machines = dict.fromkeys(record.request.node_names, "?")  # only its owner can look into them
        if self._is_owner():
            unplugged = hosts.unplugged()
            machines = {node: host_state(hosts, node, unplugged=node in unplugged) for node in machines}
        nodes = tuple(
            NodeStatus(node, slurm_conf.address(record, node), states.get(node, "?"), machine)
            for node, machine in machines.items()
        )
        state = "up" if states else "broken"
        return ClusterStatus(record.request.name, directory, state, record.request.mode, nodes)

    def power_off(self, node: str, *, silent: bool = False) -> None:
        """A power cut: every process of the node is gone at once, and its kernel closes their connections.

        `silent` (mode namespaces): the cable is cut first, so that its neighbours hear nothing, not even a
        reset, as of a machine that takes its kernel along.
        """
        self._hosts().power_off(self._known(node), silent=silent)

    def unplug(self, node: str) -> None:
        """Pulls the node's network cable (mode namespaces): all goes on there, no packet comes or goes."""
        self._hosts().plug(self._known(node), connected=False)

    def plug_in(self, node: str) -> None:
        """Puts the cable of an unplugged node back; nothing else about it changes."""
        self._hosts().plug(self._known(node), connected=True)

    def freeze(self, node: str) -> None:
        """Stops every process of the node where it is; its kernel still acknowledges packets."""
        self._signal(self._hosts(), node, signal.SIGSTOP, lambda process: not process.stopped())

    def thaw(self, node: str) -> None:
        """Lets the processes of a frozen node go on."""
        self._signal(self._hosts(), node, signal.SIGCONT, ProcessId.stopped)

    def kill_slurmd(self, node: str) -> None:
        """Ends slurmd alone; steps and tasks of the node go on."""
        self._end_slurmd(self._hosts(), node)

    def node_pids(self, node: str) -> set[int]:
        """Numbers (on this machine) of all processes of a node, slurmd included; empty if it is off."""
        return {process.pid for process in self._hosts().node_processes(self._known(node))}

    def restore(self, node: str, *, timeout_s: float = 30.0) -> None:
        """Undoes all of the above, and drain and set_down; waits until the node can run jobs.

        Power on, cable in, processes going, slurmd running, resumed.
        """
        self._record()  # one that is not up is told before its directory and lock are made
        with self._locked():
            record = self._record()
            hosts = lifecycle.hosts_of(self.layout, record)
            self._restore_host(hosts, record, self._known(node))
            self._make_usable(hosts, record, [node], timeout_s)
        self.resume(node)
        self._wait_nodes([node], lambda flags: not flags & node_state.AWAY, timeout_s, "usable")

    def reset(self, *, timeout_s: float = 60.0) -> None:
        """Back to how `up` left it: nodes restored and resumed, no job, no reservation, all nodes IDLE."""
        deadline = time.monotonic() + timeout_s
        self._record()
        with self._locked():
            self._mend(self._record(), timeout_s)
        jobs = self.run(["squeue", "--noheader", "--all", "--format=%i"]).stdout.split()
        if jobs:
            self.run(["scancel", *jobs], check=False)  # one of them may have ended meanwhile
        for line in self.run(["scontrol", "-o", "show", "reservations"]).stdout.splitlines():
            if line.startswith("ReservationName="):
                self.run(["scontrol", "delete", line.split()[0]])
        for node in self.node_names:
            self.resume(node)
        self.wait_idle(timeout_s=max(0.0, deadline - time.monotonic()))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Serialises everything that starts, mends or stops, on the whole machine. Not to be nested."""
        deadline = time.monotonic() + _LOCK_S
        while True:
            self.layout.claim()
            lock = FileLock(self.layout.lock, timeout=max(0.0, deadline - time.monotonic()))
            try:
                lock.acquire()
                break
            except FileNotFoundError:  # a `down` removed the directory between the two lines above
                continue
            except Timeout:
                raise LocalClusterError(
                    f"{self.layout.lock} is held for over {_LOCK_S:g} s: another command is at work here"
                ) from None
        try:
            yield
        finally:
            lock.release()

    def _require_same(self, running: Request) -> None:
        mode = running.mode if self._mode == "auto" else self._mode
        wanted = vars(replace(self._wanted, mode=mode))
        for key, value in vars(running).items():
            if wanted[key] != value:
                raise LocalClusterError(
                    f"cluster {running.name!r} runs with {key}={value!r}, asked for {wanted[key]!r}: "
                    f"`tm-slurm cluster down{self.layout.options(self.name)}` first, or use another --name"
                )

    def _wait_first_idle(self, timeout_s: float) -> None:
        """Waits until all nodes are IDLE, and not in vain for a slurmd that ended."""
        deadline = time.monotonic() + timeout_s
        while True:
            left = deadline - time.monotonic()
            try:
                return self.wait_idle(timeout_s=min(1.0, left))
            except LocalClusterError:
                hosts = self._hosts()
                for node in self.node_names:
                    if not hosts.slurmd(node):
                        said = self.layout.last_words(f"slurmd.{node}")
                        raise LocalClusterError(f"slurmd of {node} ended at once: {said}") from None
                if left <= 0:
                    raise

    def _mend(self, record: Record, timeout_s: float) -> None:
        """Starts what is missing and waits until the nodes respond; drained ones stay drained."""
        hosts = lifecycle.hosts_of(self.layout, record)
        lifecycle.start_daemons(self.layout, record, hosts)
        unplugged = hosts.unplugged()
        names = record.request.node_names
        for node in names:
            if host_state(hosts, node, unplugged=node in unplugged) != "on":
                self._restore_host(hosts, record, node)
        self._make_usable(hosts, record, names, timeout_s)

    def _restore_host(self, hosts: Hosts, record: Record, node: str) -> None:
        if not hosts.node_processes(node):
            hosts.start_nodes([node])
        else:
            hosts.plug(node, connected=True)
            self._signal(hosts, node, signal.SIGCONT, ProcessId.stopped)
            hosts.start_slurmd(node)
        record.save(self.layout)

    def _make_usable(self, hosts: Hosts, record: Record, nodes: Iterable[str], timeout_s: float) -> None:
        """Waits until nodes whose machines are well respond to slurmctld and are not DOWN."""
        names = list(nodes)
        try:
            self._wait_nodes(names, _responds, min(_PATIENCE_S, timeout_s), "responding")
        except LocalClusterError:  # slurmctld asks again only after a while; a new slurmd calls it at once
            for node, state in self.node_states().items():
                if node in names and not _responds(node_state.flags_of(state)):
                    self._end_slurmd(hosts, node)
                    hosts.start_slurmd(node)
            record.save(self.layout)
            self._wait_nodes(names, _responds, timeout_s, "responding")
        for node, state in self.node_states().items():
            flags = node_state.flags_of(state)
            if node in names and flags & node_state.BROKEN and "DRAIN" not in flags:
                self.resume(node)
        self._wait_nodes(
            names, lambda flags: not flags & node_state.BROKEN, timeout_s, "responding, not DOWN"
        )

    def _end_slurmd(self, hosts: Hosts, node: str) -> None:
        processes.signal_all(lambda: hosts.slurmd(self._known(node)), signal.SIGKILL, timeout_s=_SIGNAL_S)

    def _signal(
        self, hosts: Hosts, node: str, signum: signal.Signals, which: Callable[[ProcessId], bool]
    ) -> None:
        self._known(node)
        processes.signal_all(
            lambda: set(filter(which, hosts.node_processes(node))), signum, timeout_s=_SIGNAL_S
        )


def _responds(flags: frozenset[str]) -> bool:
    return not flags & {"NOT_RESPONDING", "UNKNOWN"}
