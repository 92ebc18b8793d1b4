"""`tm-slurm cluster`: a real Slurm cluster on this machine."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from tm_slurm.localcluster import LocalCluster

_Command = TypeVar("_Command", bound=Callable[..., Any])


class _UserError(click.ClickException):
    """One line on stderr and exit code 2."""

    exit_code = 2


def _which_cluster(command: _Command) -> _Command:
    """The options that say which cluster is meant."""
    name = click.option("--name", default="local", show_default=True, help="Name of the cluster.")
    directory = click.option(
        "--directory",
        type=click.Path(file_okay=False),
        help="Directory of the cluster; by default by its name.",
    )
    return name(directory(command))


def _cluster(name: str, directory: str | None, **options: Any) -> LocalCluster:
    from tm_slurm.localcluster import LocalCluster

    return LocalCluster(name=name, directory=directory, **options)


class _Group(click.Group):
    """Turns the local cluster's errors into one line and exit code 2."""

    def invoke(self, ctx: click.Context) -> Any:
        from tm_slurm.localcluster import LocalClusterError

        try:
            return super().invoke(ctx)
        except LocalClusterError as error:
            raise _UserError(str(error)) from None


@click.group(cls=_Group)
def cluster() -> None:
    """A real Slurm cluster on this machine: munged, slurmctld and one slurmd a node.

    \b
    tm-slurm cluster up --nodes 4
    tm-slurm cluster run -- sinfo
    tm-slurm cluster down
    """


@cluster.command()
@click.option(
    "--nodes", default=6, show_default=True, type=click.IntRange(1, 250), help="How many nodes, n1 to nN."
)
@click.option(
    "--cpus", default=4, show_default=True, type=click.IntRange(1, 1024), help="CPUs a node claims to have."
)
@click.option(
    "--mode",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "namespaces", "plain"]),
    help="namespaces: every node a host of its own (root). plain: loopback, any user.",
)
@click.option(
    "--slurmd-timeout",
    "slurmd_timeout_s",
    default=10,
    show_default=True,
    type=click.IntRange(1, 3600),
    help="Seconds after which Slurm calls a silent node DOWN (a ping or two later).",
)
@click.option("--conf", multiple=True, metavar="KEY=VALUE", help="A further line for slurm.conf; repeatable.")
@_which_cluster
def up(name: str, directory: str | None, conf: tuple[str, ...], **options: Any) -> None:
    """Start the cluster, or mend it.

    It is ready when this returns.
    """
    found = _cluster(name, directory, extra_conf="\n".join(conf), **options)
    started = found.up()
    shown = found.layout.options(name)
    names = found.node_names
    exports = " ".join(f"export {key}={value}" for key, value in found.environment().items())
    click.echo(
        f"{'started' if started else 'already up'}: nodes {names[0]} to {names[-1]}, mode {found.mode}"
    )
    click.echo(f"use it from this shell:   {exports}")
    click.echo(f"or from the controller:   tm-slurm cluster run{shown} -- squeue")
    click.echo(f"stop it:                  tm-slurm cluster down{shown}")


@cluster.command()
@_which_cluster
def down(name: str, directory: str | None) -> None:
    """Stop the cluster, remove its files.

    Its jobs end, too.
    """
    _cluster(name, directory).down()
    click.echo("down")


@cluster.command()
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@_which_cluster
def status(name: str, directory: str | None, as_json: bool) -> None:
    """Show the cluster and its nodes.

    Exit code 1 unless it is up.
    """
    found = _cluster(name, directory).status()
    if as_json:
        click.echo(json.dumps(asdict(found), indent=1))
    else:
        click.echo(f"cluster {found.name}: {found.state}" + (f", mode {found.mode}" if found.mode else ""))
        for node in found.nodes:
            click.echo(f"  {node.name:<5} {node.address:<15} {node.host:<10} {node.slurm}")
    if found.state != "up":
        sys.exit(1)


def _node_command(command: str, method: str, done: str, text: str) -> None:
    @cluster.command(command, help=text)
    @click.argument("node")
    @_which_cluster
    def act(node: str, name: str, directory: str | None) -> None:
        getattr(_cluster(name, directory), method)(node)
        click.echo(f"{node} {done}")


_node_command(
    "power-off", "power_off", "is off", "Cut the power of NODE.\n\nAll of its processes are gone at once."
)
_node_command(
    "unplug", "unplug", "is unplugged", "Pull the network cable of NODE.\n\nIn mode namespaces only."
)
_node_command("freeze", "freeze", "is frozen", "Stop NODE's processes where they are.")
_node_command(
    "restore",
    "restore",
    "can run jobs",
    "Make NODE usable again.\n\nUndoes power-off, unplug and freeze, and resumes the node in Slurm.",
)


@cluster.command(context_settings={"ignore_unknown_options": True})
@click.option("--user", help="Run it as this user (root only).")
@click.option("--node", help="Run it on this node instead of the controller (root, mode namespaces).")
@_which_cluster
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(
    command: tuple[str, ...], name: str, directory: str | None, user: str | None, node: str | None
) -> None:
    """Run COMMAND on the controller's host.

    \b
    tm-slurm cluster run -- squeue
    """
    words, environment = _cluster(name, directory).command(command, user=user, node=node)
    sys.stdout.flush()
    os.execvpe(words[0], words, environment)
