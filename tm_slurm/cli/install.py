"""`tm-slurm install`: the administrators' part, put in place or shown."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import click

from tm_slurm.cli.failures import Failed, NotPermitted, UserMistake
from tm_slurm.install import DEFAULT_PREFIX, Installed

BUILD_LIMIT_S = 120


@click.command()
@click.option(
    "--prefix",
    type=click.Path(path_type=Path),
    help=f"Build the programs and put them below this directory; usual is {DEFAULT_PREFIX}.",
)
@click.option("--print", "print_only", is_flag=True, help="Only show the lines that put them to use.")
@click.option("--json", "as_json", is_flag=True, help="For programs: the lines by where they belong.")
@click.option("--slurm-user", default="slurm", show_default=True, help="SlurmUser of the cluster.")
def install(prefix: Path | None, print_only: bool, as_json: bool, slurm_user: str) -> None:
    """Put the SPANK plugin, prolog, epilog, health and trigger programs in place; show what refers to them.

    \b
    tm-slurm install --print
    tm-slurm install --prefix /usr/local

    Nothing of Slurm's own configuration is changed: the lines are for you to add.
    """
    if prefix is None and not print_only:
        raise UserMistake("expected --print, or --prefix DIRECTORY (usual is /usr/local)")
    installed = Installed((prefix or DEFAULT_PREFIX).absolute())
    if any(character.isspace() or character in "%#\"'\\" for character in str(installed.prefix)):
        raise UserMistake(f"--prefix {installed.prefix}: Slurm's files cannot name it: choose another")
    if not print_only:
        build_and_install(installed.prefix)
    if as_json:
        answer = {name: lines for name, _, lines in _parts(installed, slurm_user)}
        click.echo(json.dumps({"prefix": str(installed.prefix), **answer}, indent=1))
    else:
        click.echo("\n".join(_lines(installed, slurm_user)))


def build_and_install(prefix: Path, *, state: Path | None = None) -> None:
    """Build against the installed Slurm headers and put everything below `prefix`. `state`: where root notes
    the jobs of a node, /run/tm_slurm usually. Failed, NotPermitted or
    UserMistake otherwise."""
    sources = Path(__file__).parents[2] / "spank"
    if not (sources / "Makefile").exists():
        raise UserMistake(f"{sources} is not there: run this from a checkout of tm_slurm, installed with -e")
    if not os.access(_first_there(prefix), os.W_OK):
        raise NotPermitted(f"--prefix {prefix}: you may not write there: run it as root, or choose another")
    command = ["make", "--no-print-directory", "-s", "-C", str(sources), "install", f"PREFIX={prefix}"]
    if state is not None:
        command.append(f"STATE={state}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_LIMIT_S, check=False)
    except FileNotFoundError:
        raise Failed("make is not installed: apt-get install make gcc libslurm-dev libssl-dev") from None
    except subprocess.TimeoutExpired:
        raise Failed(f"`{' '.join(command)}` had not ended after {BUILD_LIMIT_S} s") from None
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line.lower()] or [
            done.stderr.strip() or "it said nothing"
        ]
        raise Failed(f"it could not be built (needs gcc, libslurm-dev, libssl-dev): {lines[0]}")


def _first_there(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _parts(installed: Installed, slurm_user: str) -> list[tuple[str, str, list[str]]]:
    """Where lines belong: a name for programs, words for people, and the lines."""
    parts = [
        ("slurm.conf", "slurm.conf, on every machine; then: scontrol reconfigure", installed.slurm_conf()),
        (
            "plugstack.conf",
            "plugstack.conf beside it (takes effect when slurmd starts)",
            installed.plugstack_conf(),
        ),
        (
            "triggers",
            f"run once, as {slurm_user} (`draining` needs Slurm 26.05)",
            installed.trigger_commands(),
        ),
    ]
    if slurm_user != "root":
        parts.append(("sudoers", "sudoers, where slurmctld runs", installed.sudoers(slurm_user)))
    return parts


def _lines(installed: Installed, slurm_user: str) -> list[str]:
    parts = _parts(installed, slurm_user)
    return [line for _, about, lines in parts for line in (f"# {about}", *lines, "")][:-1]
